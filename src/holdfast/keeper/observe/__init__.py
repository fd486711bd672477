"""Tells what a keeper knows about itself: status, metrics, journal."""
