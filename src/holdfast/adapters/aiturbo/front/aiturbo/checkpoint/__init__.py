"""Answers where MindSpore looks; see holdfast.adapters.aiturbo.engine."""
