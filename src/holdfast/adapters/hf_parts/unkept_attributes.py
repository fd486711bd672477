"""Names what changes from step to step in objects of the script that a framework calls, and is in no version.

    unkept = Unkept("give it by name")       # what keeps such an attribute
    unkept.look(callbacks)                   # before the first step and behind each: what changed is named, once

A callback that counts in an attribute goes on counting; in a process that was started again it begins as the script makes it. Such an
object may mean it so (a clock), so this is a warning and no error. Must never: change anything.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.base.installed import is_installed
from holdfast.checkpoint.entries.rng import random_state

logger = logging.getLogger(__name__)

_SCALARS = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, deque)
# So many entries of a container are looked at.
_ENTRIES = 64
_DEPTH = 2


class Unkept:
    """Watches objects.

    Args:
        remedy: what keeps an attribute, as the warning says it.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._before: dict[tuple[int, str], Any] = {}
        self._told: set[tuple[int, str]] = set()

    def look(self, objects: Iterable[Any], known: frozenset[str] = frozenset()) -> None:
        """Name what changed since it was looked at before.

        Args:
            objects: those of classes that are not the script's are left out.
            known: attributes that are kept, or nobody's affair.
        """
        changed = []
        for one in objects:
            for name, value in vars(one).items() if hasattr(one, "__dict__") and is_of_script(one) else ():
                place = id(one), name
                if name in known or place in self._told:
                    continue
                now = _mark(value)
                if self._before.setdefault(place, now) != now:
                    self._told.add(place)
                    changed.append(f"{type(one).__name__}.{name}")
        if changed:
            logger.warning(
                "holdfast does not keep what changes here: %s; after a restart it begins as the script makes it. %s",
                ", ".join(sorted(changed)),
                self._remedy,
            )


def is_of_script(one: Any) -> bool:
    """Return whether the class of an object is the user's own code."""
    file = getattr(sys.modules.get(type(one).__module__), "__file__", None)
    return file is None or not is_installed(file)


def _mark(value: Any, depth: int = 0) -> Any:
    """Return what is another thing when the value has changed, as far as can be told at once."""
    if isinstance(value, _SCALARS):
        return repr(value)  # NaN is the same as before
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if (drawn := random_state(value)) is not None:
        return drawn[0]()
    if not isinstance(value, _CONTAINERS):
        return type(value).__name__
    if depth == _DEPTH:
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else () if isinstance(value, set) else value
    return len(value), [_mark(part, depth + 1) for part, _ in zip(parts, range(_ENTRIES), strict=False)]
