"""Deprecated: the name of `adapters.aiturbo.front` before 0.2; it goes with 0.3."""
