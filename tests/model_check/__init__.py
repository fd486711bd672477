"""Exhaustive model checks of the protocol."""
