"""Gradients that live from one step to the next: what no step surely clears, and the next backward pass adds to."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.entries import carried_tensors
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.entries.tensor_words import same_memory

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Why no version is right where they cannot be carried.
UNSURE = "gradients live from one step to the next"
_ZEROS = bytes(4096)
# In the place of a number: of every parameter.
_ALL = "all"
_NUMBER = "_holdfast_number"
_numbers = itertools.count(1)


def there_are(parameters: Sequence[torch.Tensor], cleared: Container[int] = ()) -> bool:
    """Tell whether a parameter has a gradient that is not zero, those left out whose `id` is in `cleared`."""
    return any(
        id(p) not in cleared and p.grad is not None and bool(local_of(p.grad).count_nonzero()) for p in parameters
    )


def packed(
    parameters: Sequence[torch.Tensor], cleared: Container[int] = (), *, zeros: bool = False
) -> dict[str, Any] | None:
    """Returns all gradients as they are saved, by the number of their parameter; nothing where none lives; None if they cannot be.

    Each rank saves its own.

    Args:
        parameters: those that are stepped.
        cleared: the `id` of each whose gradient every step surely clears before it reads it.
        zeros: say also where a gradient is that is zero, or is cleared. A step moves a parameter that has one, by decay and
            momentum, and leaves one that has none.
    """
    with_grad = {str(number): p for number, p in enumerate(parameters) if p.grad is not None}
    lives = there_are(parameters, cleared)
    found = {name: p for name, p in with_grad.items() if lives and id(p) not in cleared}
    if why_not(found.values()):
        return None
    here = with_grad if lives or zeros else {}
    rest: dict[str, Any] = {
        name: {} for name, p in here.items() if name not in found and p.grad is not None and may_be_zero(p, p.grad)
    }
    if len(rest) == len(parameters):
        return {_ALL: {}} if rest else {}
    return {**rest, **as_saved(found, copied=True)}


def as_saved(parameters: Mapping[str, torch.Tensor], *, copied: bool = False) -> dict[str, Any]:
    """Returns gradients that can be carried, or copies of them; of one in host memory that is zero, only that it is there."""
    grads = {name: local_of(p.grad) for name, p in parameters.items() if p.grad is not None}
    zero = {name for name in grads if is_zero(parameters[name])}
    return {name: {} if name in zero else carried_tensors.packed(grad, copied=copied) for name, grad in grads.items()}


def why_not(parameters: Iterable[torch.Tensor], *, in_buckets: bool = False) -> str:
    """Returns why the gradients of these parameters cannot be carried; empty if they can.

    They can be up to 64 MiB, where each has memory of its own and no graph, and lies on the ranks as its parameter
    does. `in_buckets`: they may be parts of memory that nobody else reads, as DDP makes them.
    """
    pairs = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not all(_lies_as(parameter, grad) for parameter, grad in pairs):
        return "they are sparse, or cut in another way than their parameters"
    if sum(local_of(grad).nbytes for _, grad in pairs) > carried_tensors.MAX_BYTES:
        return f"they have more than {carried_tensors.MAX_BYTES >> 20} MiB"
    if not _lie_apart([grad for _, grad in pairs if local_of(grad).numel()], whole=not in_buckets):
        return "they are parts of memory that others may read"
    return ""


def is_sharded(part: nn.Module) -> TypeGuard[FSDPModule]:
    """Tell whether `fully_shard` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has called it where nobody imported it, which takes long
    return fsdp is not None and isinstance(part, fsdp.FSDPModule)


def has_unreduced(part: nn.Module) -> bool:
    """Tell whether `fully_shard` holds gradients of a module that are summed up and not reduced yet."""
    groups = _groups(part)
    params = [param for group in groups for param in getattr(group, "fsdp_params", ())]
    held = [getattr(group, "_partial_reduce_output", None) for group in groups]
    held += [getattr(param, "unsharded_accumulated_grad", None) for param in params]
    held += [getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in params]
    return any(grad is not None for grad in held)


def unsharded(part: nn.Module) -> dict[int, torch.Tensor]:
    """Returns by the `id` of each parameter that `fully_shard` cut what stands for it in a forward and a backward pass, as far as it is there."""
    params = [param for group in _groups(part) for param in getattr(group, "fsdp_params", ())]
    found = {id(param.sharded_param): getattr(param, "_unsharded_param", None) for param in params}
    return {key: whole for key, whole in found.items() if whole is not None}


def _groups(part: nn.Module) -> list[Any]:
    state = part._get_fsdp_state() if is_sharded(part) else None
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def _lie_apart(grads: Sequence[torch.Tensor], *, whole: bool) -> bool:
    """Tell whether each has memory of its own: a `whole` piece of it, or a part that no other one has.

    Shards may be parts of one piece: whoever reduced them looks at it no more.
    """
    spans = []
    for grad in grads:
        local = local_of(grad)
        if isinstance(grad, DTensor) or not whole:
            spans.append((local.data_ptr(), local.nbytes))
        else:
            spans.append((local.untyped_storage().data_ptr(), local.untyped_storage().nbytes()))
    spans.sort()
    return all(begin + num_bytes <= after for (begin, num_bytes), (after, _) in itertools.pairwise(spans))


def _lies_as(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Tell whether a gradient is plain memory without gaps, cut and placed as its parameter is."""
    if isinstance(grad, DTensor):
        if not isinstance(parameter, DTensor) or grad._spec.placements != parameter._spec.placements:
            return False
        if grad.device_mesh != parameter.device_mesh or any(part.is_partial() for part in grad.placements):
            return False
    local = local_of(grad)
    plain = type(local) is torch.Tensor and local.layout is torch.strided and not local.is_inference()
    return (
        plain
        and _is_gapless(local)
        and not grad.requires_grad
        and isinstance(grad, DTensor) == isinstance(parameter, DTensor)
    )


def _is_gapless(local: torch.Tensor) -> bool:
    length = 1
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


def put(parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Gives parameters the gradients that were saved, if any were, and takes them from the others."""
    for number, parameter in enumerate(parameters if saved else ()):
        one = saved.get(str(number), saved.get(_ALL))
        if one is None:
            clear(parameter)
            continue
        if one:
            # Where the parameter is by now: its rank may have come back on another device of its node.
            _give(parameter, carried_tensors.unpacked(one, device=local_of(parameter).device))
        else:
            put_zero(parameter)


def number_of(grad: torch.Tensor) -> int:
    """Returns what a gradient is known by, without a reference to it; 0 for one that has no number yet."""
    number, owner = vars(grad).get(_NUMBER, (0, 0))
    return number if owner == id(grad) else 0  # a copy has it too, of this process or of one before


def numbered(grad: torch.Tensor) -> int:
    """Returns the same of a gradient, which has a number from now on."""
    if not (number := number_of(grad)):
        number = next(_numbers)
        vars(grad)[_NUMBER] = number, id(grad)
    return number


def may_be_zero(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Tell whether a gradient would be that of `put_zero`, but for its numbers."""
    local = local_of(grad)
    return type(local) is torch.Tensor and local.layout is torch.strided and local.dtype == parameter.dtype


def is_zero(parameter: torch.Tensor) -> bool:
    """Tell whether the gradient of a parameter, which has one, is that of `put_zero`. One on a device is not looked at: that would wait.

    It takes a microsecond or two, and as long as one read if it is zero.
    """
    grad = parameter.grad  # held while it is read: another thread may take it from the parameter
    if grad is None or (memory := host_memory(parameter, grad)) is None:
        return False
    address, num_bytes = memory
    head = min(num_bytes, len(_ZEROS))  # the rest is zero if each of its bytes equals the one so far before it
    return same_memory(address, _ZEROS, head) and same_memory(address + head, address, num_bytes - head)


def host_memory(parameter: torch.Tensor, grad: torch.Tensor) -> tuple[int, int] | None:
    """Returns address and bytes of a gradient that could be that of `put_zero`; None for one that is not, or not in host memory.

    Whoever reads them holds the gradient.
    """
    grad = local_of(grad)
    if not grad.is_cpu or not may_be_zero(parameter, grad) or grad.is_conj():
        return None
    if not grad.is_contiguous() and not _is_gapless(grad):
        return None
    address, num_bytes = grad.data_ptr(), grad.nbytes
    return None if num_bytes and not address else (address, num_bytes)  # its memory may have been taken away


def put_zero(parameter: torch.Tensor) -> None:
    """Gives a parameter a gradient that is zero."""
    _give(parameter, torch.zeros_like(local_of(parameter).detach()))


@torch.no_grad()
def _give(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        # `from_local` would move what is offloaded to host memory to the mesh's device.
        whole = torch.empty_like(parameter, dtype=grad.dtype)
        local_of(whole).copy_(grad)
        grad = whole
    parameter.grad = grad


@torch.no_grad()
def clear(parameter: torch.Tensor) -> None:
    """Takes the gradient from a parameter; one that a graph, or whoever else has its memory, may write to again becomes zero."""
    grad = parameter.grad
    if grad is None:
        return
    is_plain = grad.layout is torch.strided  # of another one, as a sparse one, nobody else has the memory
    if isinstance(grad, DTensor) or not is_plain or (grad.is_cpu and grad.untyped_storage().nbytes() == grad.nbytes):
        parameter.grad = None
    else:
        grad.zero_()
