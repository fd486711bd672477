"""Tells what the samplers of a loader have drawn: generators of their own, what they count, an order that they shuffle in place.

    samplers = Samplers(loader)          # as the script made it
    samplers.load_state_dict(state)      # what samplers.state_dict() was, in an earlier process

A process that is started again makes its samplers anew, and these would draw the first epoch's order once more. What did not change since
they were made is left out (ranks, numbers of rows): that is the script's to say. Must never: touch what a sampler of a
known package counts, for its loader places it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.entries.rng import random_state

logger = logging.getLogger(__name__)

# What their samplers count is placed by the loader, or with `set_epoch`.
_KNOWN = frozenset(("torch", "torchdata", "accelerate", "transformers"))
# A longer order is not carried; each version would hold it.
_MAX_NUMBERS = 1 << 20


class Samplers:
    """The samplers of one loader, as an object with a state.

    Args:
        loader: a `DataLoader`, or what stands around one.
    """

    def __init__(self, loader: Any) -> None:
        self._parts = list(_below(loader))
        self._told: set[str] = set()
        self._began = self._now()

    def state_dict(self) -> dict[str, Any]:
        """Return every generator, and every other attribute that is no more what it was when the script made it."""
        return {
            place: value
            for place, (value, is_drawn) in self._now().items()
            if is_drawn or not _same(self._began.get(place, (None, False))[0], value)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put them back; what the samplers of this script do not have is left out."""
        for place, part, name in self._attributes():
            if place in state:
                _put(part, name, state[place])

    def _now(self) -> dict[str, tuple[Any, bool]]:
        """Return each attribute as it is saved, and whether it is a generator."""
        return {place: _taken(getattr(part, name)) for place, part, name in self._attributes()}

    def _attributes(self) -> Iterator[tuple[str, Any, str]]:
        for number, part in enumerate(self._parts):
            of_known = type(part).__module__.partition(".")[0] in _KNOWN
            for name, value in sorted(vars(part).items()):
                if random_state(value) is not None or (not of_known and self._is_kept(part, name, value)):
                    yield f"{number}.{name}", part, name

    def _is_kept(self, part: object, name: str, value: Any) -> bool:
        if isinstance(value, bool | int | float | str):
            return True
        if not _is_order(value) or len(value) <= _MAX_NUMBERS:
            return _is_order(value)
        where = f"{type(part).__name__}.{name}"
        if where not in self._told:
            self._told.add(where)
            logger.warning(
                "%s holds %d numbers, and is not kept: a restart begins with the script's", where, len(value)
            )
        return False


def _below(loader: Any) -> Iterator[Any]:
    """Yield the samplers below a loader, each once, from the outermost on."""
    seen, left = set(), [loader]
    while left:
        part = left.pop(0)
        for name in ("batch_sampler", "sampler"):
            below = getattr(part, name, None)
            if hasattr(below, "__dict__") and id(below) not in seen:
                seen.add(id(below))
                left.append(below)
                yield below


def _is_order(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind == "i"
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and value.layout is torch.strided and not value.requires_grad
    return type(value) is list and all(type(item) is int for item in value)


def _taken(value: Any) -> tuple[Any, bool]:
    """Return the value as it is saved, and whether it is a generator."""
    if (drawn := random_state(value)) is not None:
        return drawn[0](), True
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), False
    return torch.tensor(value, dtype=torch.int64, device="cpu") if _is_order(value) else value, False


def _put(part: Any, name: str, saved: Any) -> None:
    """Set it; an order in place, for others may hold it too."""
    value = getattr(part, name)
    if (drawn := random_state(value)) is not None:
        drawn[1](saved)
    elif isinstance(value, list) and isinstance(saved, torch.Tensor):
        value[:] = saved.tolist()
    elif isinstance(value, torch.Tensor | np.ndarray) and len(value) == len(saved):
        value[:] = saved if isinstance(value, torch.Tensor) else saved.numpy()
    elif type(value) is type(saved):
        setattr(part, name, saved)


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return torch.equal(before, now)
    return type(before) is type(now) and bool(before == now)
