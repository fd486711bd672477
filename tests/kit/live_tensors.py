"""Live tensors as the state hands them out."""

from __future__ import annotations

import torch

from holdfast.checkpoint.entries.types import LiveTensor, dtype_name
from holdfast.core.model import Extent, Shard


def live(name: str, tensor: torch.Tensor, *, ranks: tuple[int, ...] = (0,), late: bool = True) -> LiveTensor:
    shape = tuple(tensor.shape)
    extent = Extent((0,) * len(shape), shape)
    return LiveTensor(Shard(name, dtype_name(tensor.dtype, where=name), shape, extent, ranks), tensor, late)
