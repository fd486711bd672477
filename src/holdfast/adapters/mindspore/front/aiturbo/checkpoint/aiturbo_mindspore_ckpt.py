"""Has what `ModelCheckpoint` of MindSpore counts checkpoints with."""

from __future__ import annotations

from holdfast.adapters.mindspore.aiturbo import CheckpointShmManager

__all__ = ["CheckpointShmManager"]
