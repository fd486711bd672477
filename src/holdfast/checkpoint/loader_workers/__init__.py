"""Keeps what the workers of a data loader draw and count, for those of a restart to go on with."""
