"""Looks at what objects hold call nothing of the classes of containers: that may read files, count, or draw random numbers."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.adapters.zero_lines.objects import never_changes
from holdfast.checkpoint.containers import items_of, length_of, parts_of
from holdfast.checkpoint.loader_workers.dataset_generators import Look
from holdfast.checkpoint.state import nested_optimizers, unsaved_state
from holdfast.checkpoint.usage import loop_snapshot
from holdfast.checkpoint.usage.given_objects import Given

CALLED: list[str] = []


def made_from(base: type) -> type:
    """Returns a class of containers whose methods are noted when they are called."""

    def noted(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            CALLED.append(name)
            return getattr(base, name)(self, *args)

        return method

    names = ("__iter__", "__len__", "__getitem__", "__contains__", "__reversed__", "keys", "values", "items", "get")
    return type(f"Noted{base.__name__}", (base,), {name: noted(name) for name in names if hasattr(base, name)})


MAPPINGS = [made_from(base)({"a": 1.0, "b": torch.ones(1)}) for base in (dict, OrderedDict)]
MAPPINGS.append(made_from(defaultdict)(int, a=1.0, b=torch.ones(1)))
LISTS = [made_from(base)([1.0, torch.ones(1)]) for base in (list, tuple, deque)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    CALLED.clear()
    yield
    assert not CALLED


@pytest.mark.parametrize("held", [*MAPPINGS, *LISTS])
def test_looks_at_objects_call_nothing_of_their_containers(held: Any) -> None:
    holder = types.SimpleNamespace(held=held)
    is_deque = isinstance(held, deque)
    tensor = next(part for part in parts_of(held) if isinstance(part, torch.Tensor))
    assert Given({"one": holder}).has(tensor) != is_deque
    assert bool(loop_snapshot.kind_of(held)) != is_deque
    assert loop_snapshot.look_early(None, {}).code is None
    assert list(loop_snapshot._plain_tokens({"holder": holder, "type": type(held)})) or is_deque
    assert set(loop_snapshot._classes(held)) == (set() if is_deque else {type(held)})
    assert unsaved_state.token(held) == unsaved_state.token([1.0, torch.ones(1)])
    assert list(unsaved_state.keys(held)) == (["a", "b"] if isinstance(held, dict) else [])
    assert list(unsaved_state.tokens(held))
    assert DataAttributes(types.SimpleNamespace(dataset=holder), set(), CALLED.append).state_dict() == {}
    assert not Look({"dataset": holder}).words
    if isinstance(held, tuple):
        assert never_changes(held) is False


def test_optimizers_are_found_without_a_call_of_their_containers() -> None:
    parameter = nn.Parameter(torch.ones(1))
    inner, outer = (torch.optim.SGD([parameter], 0.1) for _ in range(2))
    for base, args in ((list, [inner]), (dict, {"a": inner})):
        outer.held = made_from(base)(args)  # type: ignore[attr-defined]
        assert [found for _, found in nested_optimizers._held(outer)] == [inner]


def test_containers_of_all_kinds_are_read() -> None:
    pair = namedtuple("pair", "x y")
    moved = OrderedDict(a=1, b=2)
    moved.move_to_end("a")
    expected: list[tuple[Any, list[tuple[Any, Any]]]] = [
        (moved, [("b", 2), ("a", 1)]),
        (defaultdict(int, a=1), [("a", 1)]),
        (Counter("aab"), [("a", 2), ("b", 1)]),
        (pair(1, 2), [(0, 1), (1, 2)]),
        (torch.Size([3, 4]), [(0, 3), (1, 4)]),
        (frozenset([5]), [(0, 5)]),
        (UserDict(a=1), []),
        (nn.ModuleList([nn.ReLU()]), []),
        ("text", []),
    ]
    for value, items in expected:
        assert list(items_of(value)) == items
        assert length_of(value) == len(items)
    modules = nn.ModuleList([nn.ReLU()])
    assert Given({"one": types.SimpleNamespace(held=UserDict(a=modules))}).has(modules[0])


class Liar:
    """Says that it is a list."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return list

    def __iter__(self) -> Iterator[int]:
        CALLED.append("iter")
        return iter([1])


def test_what_only_says_that_it_is_a_container_has_no_parts() -> None:
    assert not list(parts_of(Liar()))
    assert unsaved_state.token(Liar()) is None
    assert not loop_snapshot.kind_of(Liar())


class Late:
    """Opens with the first attribute that is asked for and not there, as a proxy of a file does."""

    __slots__ = ("__hidden", "file", "generator")

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.__hidden = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        CALLED.append(name)
        raise OSError(name)

    def __getitem__(self, index: int) -> int:
        return index


class Rows:
    """A dataset of such objects."""

    of_class = Late()

    def __init__(self) -> None:
        self.seen, self.late = 0, Late()

    def __getitem__(self, index: int) -> int:
        self.seen += 1
        self.late[index] += 1
        return index


def test_what_an_object_opens_late_is_not_opened_by_a_look() -> None:
    CALLED.clear()
    rows = Rows()
    looked = Look({"dataset": rows})
    assert {"dataset.seen", "dataset.late.generator", "dataset.late._Late__hidden"} <= looked.found.keys()
    rows.late = Late()
    for beside in looked.beside:
        beside.changed()
    Given({"rows": rows}).has(object())
    assert not CALLED
