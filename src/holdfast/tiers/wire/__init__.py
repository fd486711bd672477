"""Frames and connections between processes."""
