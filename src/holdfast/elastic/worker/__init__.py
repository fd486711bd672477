"""Runs the script of a user in a worker process, more than once."""
