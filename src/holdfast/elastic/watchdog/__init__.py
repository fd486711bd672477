"""Finds workers that hang, and proves it before it acts."""
