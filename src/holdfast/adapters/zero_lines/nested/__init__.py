"""Loops that lie inside each other, or go over batches: found in a script's text, looked at, saved, and taken up at their items."""
