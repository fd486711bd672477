"""Decisions of a recovery: which version, from whom, in which order."""
