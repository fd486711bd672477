"""The keeper process and its handlers."""
