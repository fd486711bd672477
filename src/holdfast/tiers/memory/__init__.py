"""Slots in shared memory and the budget that they share."""
