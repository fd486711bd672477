"""Answers where MindSpore looks for `aiturbo`; see holdfast.adapters.aiturbo.engine."""
