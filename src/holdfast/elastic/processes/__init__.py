"""Forks, replaces and ends the worker processes of an agent."""
