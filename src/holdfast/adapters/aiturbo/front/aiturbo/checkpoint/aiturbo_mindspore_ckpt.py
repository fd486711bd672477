"""Has what `ModelCheckpoint` of MindSpore counts checkpoints with."""

from __future__ import annotations

from holdfast.adapters.aiturbo.engine import CheckpointShmManager

__all__ = ["CheckpointShmManager"]
