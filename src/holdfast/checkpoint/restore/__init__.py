"""Chooses a version together with all ranks and fills the live state from the nearest copy."""
