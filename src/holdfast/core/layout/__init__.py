"""Decisions about layouts: who holds the same bytes, where copies go, how states are resharded."""
