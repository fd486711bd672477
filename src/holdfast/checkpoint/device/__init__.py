"""Accelerators behind one interface, chunks on their way to them, and what is looked at there."""
