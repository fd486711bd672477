"""Sends sealed slots to the nodes that keep the second copy."""
