"""Memory that objects hold: where their tensors and arrays lie."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.adapters.zero_lines.reach import held_arrays
from holdfast.adapters.zero_lines.reach.plain_values import ATOMS, MAX_DEPTH
from holdfast.checkpoint.containers import parts_of
from holdfast.checkpoint.entries.sharding import local_of


def spans_of(thing: Any, depth: int = 0, *, gradients: bool = True) -> Iterable[held_arrays.Span]:
    """Yields where the tensors and arrays of a kept object, or of what is carried, lie, and the gradients of parameters."""
    if isinstance(thing, torch.Tensor):
        yield held_arrays.span(local_of(thing))
        if gradients and thing.is_leaf and thing.grad is not None:
            yield held_arrays.span(local_of(thing.grad))
    elif type(thing).__module__ == "numpy" and hasattr(thing, "__array_interface__"):
        yield held_arrays.span(thing)
    elif depth > MAX_DEPTH:
        return
    elif isinstance(thing, nn.Module):
        yield from (
            span
            for part in (*thing.parameters(), *thing.buffers())
            for span in spans_of(part, depth + 1, gradients=gradients)
        )
    elif isinstance(thing, Optimizer):
        yield from spans_of([*thing.state.values(), *thing.param_groups], depth + 1, gradients=gradients)
    elif isinstance(thing, dict | list | tuple | collections.deque):
        yield from (
            span
            for part in parts_of(thing)
            if not isinstance(part, ATOMS)
            for span in spans_of(part, depth + 1, gradients=gradients)
        )
    elif depth == 0 and hasattr(thing, "__dict__"):  # what it hands out is not looked at
        yield from spans_of(list(vars(thing).values()), depth + 1, gradients=gradients)


def addresses_in(value: Any, depth: int = 0) -> set[int]:
    """Returns the addresses of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return {local_of(value).data_ptr()}
    if depth > MAX_DEPTH or not isinstance(value, dict | list | tuple):
        return set()
    return set().union(*(addresses_in(part, depth + 1) for part in parts_of(value) if not isinstance(part, ATOMS)))
