"""Gradients that live from one step to the next: what no step surely clears, and the next backward pass adds to."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.usage import carried_tensors

# Why no version is right where they cannot be carried.
UNSURE = "gradients live from one step to the next"


def there_are(parameters: Sequence[torch.Tensor], cleared: Container[int] = ()) -> bool:
    """Tell whether a parameter has a gradient that is not zero, those left out whose `id` is in `cleared`."""
    return any(
        id(p) not in cleared and p.grad is not None and bool(local_of(p.grad).count_nonzero()) for p in parameters
    )


def packed(parameters: Sequence[torch.Tensor], cleared: Container[int] = ()) -> dict[str, Any] | None:
    """Returns all gradients as they are saved, by the number of their parameter; nothing where none lives; None if they cannot be.

    They can be in a job of one process, up to 64 MiB, where each has memory of its own and no graph.

    Args:
        parameters: those that are stepped.
        cleared: the `id` of each whose gradient every step surely clears before it reads it.
    """
    if not there_are(parameters, cleared):
        return {}
    found = {str(number): p.grad for number, p in enumerate(parameters) if p.grad is not None}
    grads = list(found.values())
    if dist.is_available() and dist.is_initialized():
        return None
    plain = all(
        type(grad) is torch.Tensor and grad.layout is torch.strided and grad.is_contiguous() and not grad.requires_grad
        for grad in grads
    )
    if not plain or sum(grad.nbytes for grad in grads) > carried_tensors.MAX_BYTES:
        return None
    memory = {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}
    if len(memory) < sum(1 for grad in grads if grad.numel()):
        return None
    return {number: carried_tensors.packed(grad) for number, grad in found.items()}


def put(parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Gives parameters the gradients that were saved, if any were."""
    for number, parameter in enumerate(parameters if saved else ()):
        one = saved.get(str(number))
        parameter.grad = None if one is None else carried_tensors.unpacked(one)
