"""Rounds of launchers that meet, and what happens when their store is lost."""
