"""Tells about a keeper: status, metrics, journal."""
