"""Decisions: pure functions and state machines on the standard library; no clock, file, socket, thread, environment."""
