"""Writes sealed slots to storage, takes over from writers that failed, and retires versions."""
