"""State that nobody hands out: it changes between saves, is in no version, and a restart begins without it.

An attribute of an optimizer that its `state_dict()` does not name, a buffer with `persistent=False`, the state of DDP's
communication hook: `torch.save` loses these too. They are compared at the first saves, by value: what changed twice is
told once, by name. Numbers and tensors in host memory are compared; a tensor by some of its elements, so what is told is
certain, and what is not told need not be absent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from holdfast.base.handler_errors import pass_on
from holdfast.base.terminal import some_of
from holdfast.checkpoint.containers import items_of, parts_of
from holdfast.checkpoint.entries.sharding import local_of, memory_of

logger = logging.getLogger(__name__)

# Looks that are taken, each after the parameters have changed: the first two may differ by what the first step makes.
NUM_LOOKS = 5
# Parameters and states by which it is seen that they have, and how often it is asked at most.
NUM_WITNESSES, MAX_CALLS = 8, 30
# Objects that are looked at of one attribute, and elements of one tensor.
MAX_OBJECTS, MAX_ELEMENTS = 500, 16

_NUMBERS = (int, float, complex, str, bytes)


class UnsavedStateCheck:
    """Looks at the first saves of one rank.

    Args:
        sources: gives name and token of what is in no version.
    """

    def __init__(self, sources: Callable[[], Iterable[tuple[str, object]]]) -> None:
        self._sources = sources
        self._looks = self._calls = 0
        self._witnesses: object = None
        self._seen: dict[str, object] = {}
        self._changed: set[str] = set()
        self.told: set[str] = set()

    def look(self, trained: Iterable[torch.Tensor]) -> None:
        """Compares with the look before; tells what changed for the second time.

        Args:
            trained: what optimizers own; if it is as it was at the last look, nothing is looked at.
        """
        if self._looks >= NUM_LOOKS or self._calls >= MAX_CALLS:
            return
        self._calls += 1
        try:
            self._look(trained)
        except Exception as error:  # noqa: BLE001 - a save must not fail of what other people's objects hold
            pass_on(error)
            logger.info("it is not looked for state that no version has: %s: %s", type(error).__name__, error)
            self._looks = NUM_LOOKS

    def _look(self, trained: Iterable[torch.Tensor]) -> None:
        some = list(islice(trained, NUM_WITNESSES))
        # The count of writes that torch keeps does not see every write, and the elements not those on a device.
        witnesses = [tensor._version for tensor in some], [token(tensor) for tensor in some[:1]]
        if witnesses == self._witnesses:
            return
        self._witnesses = witnesses
        self._looks += 1
        now = dict(self._sources())
        changed = {name for name, value in now.items() if name in self._seen and self._seen[name] != value}
        fresh = sorted((changed & self._changed) - self.told)
        self._seen, self._changed = now, self._changed | changed
        self.told.update(fresh)
        if fresh:
            logger.warning(
                "changes from save to save and is in no version, for no state_dict() hands it out: %s. If the next step "
                "depends on it a restart does not go on bit for bit; let the object hand it out and take it back",
                some_of(fresh),
            )


def token(value: Any, known: Container[object] = ()) -> object:
    """Returns what is equal as long as numbers and tensors in a value are; None where there are none.

    Args:
        value: a number, a tensor, or containers of these; anything else counts as nothing.
        known: memory (`sharding.memory_of`) of tensors that count as nothing either.
    """
    return _token(value, known, [MAX_OBJECTS])


def tokens(tree: Any) -> Iterator[object]:
    """Yields the tokens of a tree and of everything in it."""
    yield token(tree)
    for item in parts_of(tree) if isinstance(tree, dict | list | tuple) else ():
        yield from tokens(item)


def keys(tree: Any) -> Iterator[str]:
    """Yields the keys of all dicts in a tree that are strings."""
    for key, item in items_of(tree) if isinstance(tree, dict | list | tuple) else ():
        if isinstance(key, str):
            yield key
        yield from keys(item)


def _token(value: Any, known: Container[object], left: list[int]) -> object:
    left[0] -= 1
    if left[0] < 0 or value is None:
        return None
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        local = local_of(value)
        return None if memory_of(local) in known else _elements(local)
    items = parts_of(value) if isinstance(value, dict | list | tuple | deque) else ()
    found = [_token(item, known, left) for item in items]
    return tuple(found) if any(item is not None for item in found) else None


def _elements(tensor: torch.Tensor) -> object:
    """Shape, dtype and some elements; nothing of a tensor on a device, which would have to be waited for."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    count = min(MAX_ELEMENTS, tensor.numel())
    try:
        found = [repr(tensor[_place(index * tensor.numel() // count, tensor.shape)].item()) for index in range(count)]
    except (RuntimeError, TypeError, ValueError) as error:  # a class of its own, or without memory
        pass_on(error)
        return None
    return (tuple(tensor.shape), str(tensor.dtype), *found)


def _place(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of an element by its number, row by row."""
    found = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        found.append(index)
    return tuple(reversed(found))
