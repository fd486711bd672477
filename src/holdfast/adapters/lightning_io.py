"""Deprecated: the name of `adapters.lightning.checkpoint_io` before 0.2; it goes with 0.3."""

from __future__ import annotations

import warnings

from holdfast.adapters.lightning.checkpoint_io import checkpoint_io

__all__ = ["checkpoint_io"]
warnings.warn(
    "holdfast.adapters.lightning_io is called holdfast.adapters.lightning.checkpoint_io now",
    DeprecationWarning,
    stacklevel=2,
)
