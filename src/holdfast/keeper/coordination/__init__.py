"""The coordinator of a job and its clients."""
