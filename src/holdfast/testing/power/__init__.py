"""The power drill."""
