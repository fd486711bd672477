"""Copies inside the bubbles of pipeline schedules."""
