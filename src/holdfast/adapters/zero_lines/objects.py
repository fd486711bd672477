"""Holds the objects of a script that are kept, and tells what needs not be: what never changes, or is seen to change.

Taken as it is found: plain values, generators of random numbers, functions, classes, settings, datasets and samplers without a position
of their own. That these are as they were, or are carried, is proven at every step (`reach.py`, `changes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from holdfast.adapters.zero_lines.reach.attributes import is_iterator
from holdfast.adapters.zero_lines.reach.walk import STANDING
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.containers import parts_of
from holdfast.checkpoint.entries.rng import random_state

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, *STANDING)


@dataclass(slots=True)
class Kept:
    """The objects that are restored and saved.

    Attributes:
        objects: arguments of a Checkpointer, by name.
    """

    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def things(self) -> list[Any]:
        """Lists them one by one."""
        found: list[Any] = []
        for value in self.objects.values():
            parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
            found += parts
        return found


def why_no_state(path: str, value: Any) -> str:
    """Returns why an object that hands out its state does not; empty if it does. One of the user's is asked when it is looked at."""
    try:
        value.state_dict()
    except Exception as error:  # noqa: BLE001 - objects of other people are asked
        pass_on(error)
        return f"{path!r}, a {_kind(value)}, cannot hand out its state: {type(error).__name__}: {error}"
    return ""


def never_changes(value: Any) -> bool:
    """Tell whether this keeps nothing from one step to the next, or what `reach.py` sees."""
    if isinstance(value, tuple | frozenset):
        return all(never_changes(part) for part in parts_of(value))
    if is_iterator(value) and not isinstance(value, type):
        return False
    if isinstance(value, Dataset):
        return hasattr(value, "__getitem__")
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        return not value.dtype.hasobject
    # By its type: some classes of torch 2.12 ask the object for attributes when they are asked for an instance.
    return issubclass(type(value), _CONSTANT) or random_state(value) is not None


def _kind(value: Any) -> str:
    return type(value).__qualname__
