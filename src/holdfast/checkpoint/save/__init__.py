"""Saves to memory and to storage, and follows each save to its levels."""
