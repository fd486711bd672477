"""Notices, in tens of microseconds for hundreds of tensors, that state is no longer made of the very same objects.

A save looks up names and shards that were worked out once. That is right only as long as every module, dict, parameter
and state tensor is still the same object with the same memory, shape, strides and dtype; anything else asks for a new
look at everything. False alarms cost milliseconds, a missed change would save wrong bytes: when in doubt, changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Values of these kinds are read anew at every save; that they change is not a change of structure.
SCALARS = frozenset((int, float, bool, str, bytes, type(None)))
# Of a tensor, beside its address; each is asked of all tensors in one go, and by calls that every device has.
_FACTS: tuple[Callable[[torch.Tensor], object], ...] = (
    attrgetter("shape"), torch.Tensor.stride, attrgetter("dtype"), torch.Tensor.is_conj, torch.Tensor.is_neg
)  # fmt: skip


class Containers:
    """A fixed set of dicts: unchanged while they hold the same keys and the same objects.

    Args:
        dicts: watched shallowly; numbers and strings in them may change.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._keys = list(chain.from_iterable(self._dicts))
        # Of strings equal ones are the same key; compared so, a list costs a fifth.
        self._named = all(type(key) is str for key in self._keys)
        self._values = self._all_values()
        self._objects = _no_scalars(self._values)

    def unchanged(self) -> bool:
        """Return whether every key and every object is the very same."""
        keys = list(chain.from_iterable(self._dicts))
        if not (keys == self._keys if self._named else same_objects(keys, self._keys)):
            return False
        values = self._all_values()
        return same_objects(values, self._values) or same_objects(_no_scalars(values), self._objects)

    def _all_values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))


class Tensors:
    """A fixed list of tensors: unchanged while memory, shape, strides, dtype and placement are the same.

    Nothing that the garbage collector tracks is kept of a look: a few thousand tuples per save would make it search the
    whole process again and again, which took longer than all else of a save. Nor is anything kept that holds memory: what a
    script frees by another `.data` is free at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._plain = [t for t in tensors if not isinstance(t, DTensor)]
        self._sharded = [t for t in tensors if isinstance(t, DTensor)]
        self._placements = [(t.device_mesh, t.placements, t.shape) for t in self._sharded]
        seen = self._local()
        self._addresses = array("Q", map(torch.Tensor.data_ptr, seen))
        self._facts = [list(map(getter, seen)) for getter in _FACTS]

    def unchanged(self) -> bool:
        """Return whether every tensor is where and what it was."""
        now = self._local()
        return (
            array("Q", map(torch.Tensor.data_ptr, now)) == self._addresses
            and all(all(map(eq, map(getter, now), seen)) for getter, seen in zip(_FACTS, self._facts, strict=True))
            and all(
                t._spec.mesh is mesh and t._spec.placements == placements and t.shape == shape
                for t, (mesh, placements, shape) in zip(self._sharded, self._placements, strict=True)
            )
        )

    def _local(self) -> list[torch.Tensor]:
        # FSDP2 and torch write into the local tensor in place; `_local_tensor` costs a tenth of `to_local()`.
        return [*self._plain, *(t._local_tensor for t in self._sharded)]


def _no_scalars(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if type(value) not in SCALARS]


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether two sequences hold the very same objects in the same order."""
    return len(left) == len(right) and all(map(is_, left, right))
