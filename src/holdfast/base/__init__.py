"""Errors, events, settings: what every other room may use, and nothing that decides or moves bytes."""
