"""Defines what a door's script prints for the checks in `adapter.py`: where it starts, every step, and whole tensors.

A script that must not import holdfast prints these lines itself; their form stands in `adapter.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def start(rank: int, step: int) -> None:
    """This rank goes on with `step`."""
    _say(rank=rank, start=step)


def step(rank: int, number: int, tensors: Iterable[torch.Tensor]) -> None:
    """This rank finished step `number` and then held `tensors`: parameters, optimizer state, the loss."""
    _say(rank=rank, step=number, digest=digest(tensors))


def whole(rank: int, at: int, tensors: Iterable[torch.Tensor]) -> None:
    """Tell what the whole tensors are when step `at` comes next. Collective for DTensors; told by rank 0."""
    found = digest(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    if rank == 0:
        _say(rank=rank, at=at, whole=found)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bytes, dtypes and shapes of this rank's parts, in the order given."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
        state.update(f"{local.dtype} {tuple(local.shape)}".encode())
        state.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _say(**facts: Any) -> None:
    sys.stdout.write(f"door {json.dumps(facts)}\n")  # one write, so that lines of several ranks do not mix
    sys.stdout.flush()
