"""Gradients that live from one step to the next: what no step surely clears, and the next backward pass adds to."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

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

    They can be up to 64 MiB, where each has memory of its own and no graph, and lies on the ranks as its parameter does. Each
    rank saves its own.

    Args:
        parameters: those that are stepped.
        cleared: the `id` of each whose gradient every step surely clears before it reads it.
    """
    if not there_are(parameters, cleared):
        return {}
    found = {str(number): (p, p.grad) for number, p in enumerate(parameters) if p.grad is not None}
    if not all(_lies_as(parameter, grad) for parameter, grad in found.values()):
        return None
    grads = {number: local_of(grad) for number, (_, grad) in found.items()}
    if sum(grad.nbytes for grad in grads.values()) > carried_tensors.MAX_BYTES:
        return None
    if not _lie_apart([grad for _, grad in found.values() if local_of(grad).numel()]):
        return None
    return {number: carried_tensors.packed(grad) for number, grad in grads.items()}


def _lie_apart(grads: Sequence[torch.Tensor]) -> bool:
    """Tell whether each has memory of its own. Shards may be parts of one piece: whoever reduced them looks at it no more."""
    spans = []
    for grad in grads:
        if isinstance(grad, DTensor):
            spans.append((local_of(grad).data_ptr(), local_of(grad).nbytes))
        else:
            spans.append((grad.untyped_storage().data_ptr(), grad.untyped_storage().nbytes()))
    spans.sort()
    return all(begin + num_bytes <= after for (begin, num_bytes), (after, _) in itertools.pairwise(spans))


def _lies_as(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Tell whether a gradient is plain memory, cut and placed as its parameter is."""
    if isinstance(grad, DTensor):
        if not isinstance(parameter, DTensor) or grad._spec.placements != parameter._spec.placements:
            return False
        if grad.device_mesh != parameter.device_mesh or any(part.is_partial() for part in grad.placements):
            return False
    local = local_of(grad)
    plain = type(local) is torch.Tensor and local.layout is torch.strided and local.is_contiguous()
    return plain and not grad.requires_grad and isinstance(grad, DTensor) == isinstance(parameter, DTensor)


def put(parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Gives parameters the gradients that were saved, if any were."""
    for number, parameter in enumerate(parameters if saved else ()):
        one = saved.get(str(number))
        grad = None if one is None else carried_tensors.unpacked(one)
        if grad is not None and isinstance(parameter, DTensor):
            grad = DTensor.from_local(
                grad, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = grad
