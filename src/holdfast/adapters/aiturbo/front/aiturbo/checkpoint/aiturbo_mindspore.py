"""Has what `ModelCheckpoint`, `save_checkpoint` and `load_checkpoint` of MindSpore call."""

from __future__ import annotations

from holdfast.adapters.aiturbo.engine import init, load_ckpt, save_ckpt

__all__ = ["init", "load_ckpt", "save_ckpt"]
