"""Bugs planted on purpose, which the crash drill has to find."""
