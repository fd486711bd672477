"""The soak drill."""
