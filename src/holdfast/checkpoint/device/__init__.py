"""Accelerators behind one interface, and chunks on their way to them."""
