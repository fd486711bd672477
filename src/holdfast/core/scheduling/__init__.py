"""Decisions about when to save."""
