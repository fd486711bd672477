"""Containers that become others in the loop: they come back with their class, their length and what makes missing parts, or are refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.tiers.format import values as value_codec


class Cards(dict[str, int]):
    """A class of the user."""


def _noted(log: SimpleNamespace) -> tuple[Changes, Reach]:
    reach = Reach(used=["log"], kept=[], named={})
    return Changes(lambda: reach.look({"log": log}, []), {}, before=reach.look({"log": log}, [])), reach


def _brought(begins: dict[str, Any], value: Any) -> Any:
    """Returns what a restart has where the loop puts a value; why it is refused, if it is."""
    log = SimpleNamespace(**begins)
    changes, _ = _noted(log)
    log.seen = value
    changed = changes.now()
    if changed.reason:
        return changed.reason
    again = SimpleNamespace(**begins)
    _noted(again)[0].before.put(value_codec.decode(value_codec.encode(changed.rows)), changed.gone)
    return again.seen


def _shown(value: Any) -> Any:
    return type(value), value, getattr(value, "maxlen", None), getattr(value, "default_factory", None)


MADE = [
    deque([1, 2], maxlen=3), deque([1]), deque([1, 2], maxlen=0), defaultdict(list, a=[1]), defaultdict(int, a=1), defaultdict(None, a=1), Counter("ab"),
    OrderedDict(b=1, a=2), [1, 2], {"a": 1},
]  # fmt: skip
BEGINS = {
    "nothing": dict, "a number": lambda: {"seen": 0}, "a list": lambda: {"seen": [9]}, "a dict": lambda: {"seen": {"c": 9}},
    "a deque": lambda: {"seen": deque([9], maxlen=2)}, "a Counter": lambda: {"seen": Counter("c")},
    "a defaultdict": lambda: {"seen": defaultdict(float, c=9.0)}, "a set": lambda: {"seen": {9}},
}  # fmt: skip


@pytest.mark.parametrize("value", MADE, ids=repr)
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS.keys())
def test_a_container_comes_back_with_its_class(begins: Any, value: Any) -> None:
    assert _shown(_brought(begins(), value)) == _shown(value)


@pytest.mark.parametrize(
    ("begins", "value"),
    [
        ({}, Cards(a=1)),
        ({"seen": {"a": 2}}, Cards(a=1)),
        ({}, defaultdict(lambda: 0, a=1)),
        ({"seen": defaultdict(lambda: 1, a=1)}, defaultdict(lambda: 0, a=1)),
        ({"seen": deque([1])}, [torch.ones(1)]),
        ({"seen": {1}}, [torch.ones(1)]),
        ({"seen": []}, deque([torch.ones(1)])),
    ],
)
def test_a_class_that_cannot_be_stored_is_refused(begins: dict[str, Any], value: Any) -> None:
    assert f"another {type(value).__name__}" in _brought(begins, value)


def test_one_that_is_made_anew_like_the_first_is_refilled() -> None:
    """A function without a name is the same as another one of the same text."""
    made = [defaultdict(lambda: 1, a=number) for number in range(3)]
    brought = _brought({"seen": made[0]}, made[2])
    assert brought is made[0]
    assert brought == {"a": 2}


def test_what_makes_missing_parts_is_seen_to_change() -> None:
    log = SimpleNamespace(seen=defaultdict(int, a=1))
    changes, _ = _noted(log)
    assert changes.now().rows == []
    log.seen.default_factory = None
    again = SimpleNamespace(seen=defaultdict(int, a=1))
    changed = changes.now()
    assert changed.reason == ""
    _noted(again)[0].before.put(changed.rows, changed.gone)
    assert _shown(again.seen) == _shown(log.seen)


def _act(double: bool) -> Any:
    if double:

        def act(x: float) -> float:
            return 2 * x
    else:

        def act(x: float) -> float:
            return x

    return act


FUNCTIONS = {
    "lambdas": lambda new: (lambda _: 0.1) if new else (lambda _: 1.0),
    "functions of one name": _act,
    "functions of NumPy": lambda new: np.maximum if new else np.minimum,
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_function_that_another_one_takes_the_place_of_is_refused(make: Any) -> None:
    log = SimpleNamespace(weigh=make(False))
    changes, _ = _noted(log)
    log.weigh = make(False)
    assert not changes.now().reason  # the same text
    log.weigh = make(True)
    assert changes.now().reason.startswith("'log.weigh' changes in the loop")


def test_a_function_has_the_same_token_in_every_process() -> None:
    _, reach = _noted(log := SimpleNamespace(weigh=_act(True)))
    (token,) = {repr(each) for path, each in reach.look({"log": log}, []).fixed.items() if path == "log.weigh"}
    assert token == f"{__name__}._act.<locals>.act"
