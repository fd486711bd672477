"""Answers where MindSpore looks; see holdfast.adapters.mindspore.aiturbo."""
