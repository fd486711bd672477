"""Copies the training state into slots and proves that a copy is the state at the call."""
