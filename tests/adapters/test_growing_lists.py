"""Containers that take up tensors and arrays: they come back bit for bit, and what did not change is not copied again."""

from __future__ import annotations

import collections
import multiprocessing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.reach import growing_lists
from holdfast.adapters.zero_lines.reach.growing_lists import Grown, brought, grown, without_data
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.checkpoint.entries import carried_tensors
from holdfast.checkpoint.usage import sandbox
from holdfast.tiers.format import values as value_codec


def _grown(value: Any) -> Grown:
    found = grown(value)
    assert isinstance(found, Grown), found
    return found


class Row(NamedTuple):
    loss: torch.Tensor


def _of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def _shown(value: Any) -> Any:
    """Returns a value with the kinds of its containers and the bits of its tensors."""
    if isinstance(value, torch.Tensor):
        data = value.flatten().view(torch.uint8).tolist() if value.numel() else []
        return "tensor", str(value.dtype), tuple(value.shape), data
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(key, _shown(part)) for key, part in value.items()], getattr(value, "_metadata", None)
    return (type(value), [*map(_shown, value)]) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    "value",
    [
        [torch.tensor(1.5), torch.tensor(2.5), torch.tensor([True]), torch.zeros(2, 0), torch.tensor(3)],
        [np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros(0), torch.arange(6, dtype=torch.int16).reshape(2, 3)],
        [(torch.tensor([1.0, -0.0, float("nan")]), 3, None, [torch.ones(2, dtype=torch.bfloat16), ["a"]]), 1, 2],
        {"loss": [torch.tensor(1.0)], 3: np.ones(2), "n": {"m": 1}},
        torch.nn.BatchNorm1d(3).state_dict(),
        [torch.rand(300, 300), torch.rand(900, 900), torch.rand(3), np.random.default_rng(0).random((700, 300))],
    ],
)  # fmt: skip
def test_it_comes_back_bit_for_bit(value: Any) -> None:
    stored = _grown(value).stored()
    kept = value_codec.decode(value_codec.encode(without_data(stored)))
    there = brought(
        {**kept, "data": {name: [blob.clone() for blob in blobs] for name, blobs in stored["data"].items()}}
    )
    assert _shown(there) == _shown(value)
    assert all(
        part.flags.owndata for part in (there if isinstance(there, list) else ()) if isinstance(part, np.ndarray)
    )
    assert _grown(there).token == _grown(value).token


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([torch.ones(2, requires_grad=True)], "requires a gradient"),
        ([torch.ones(2, requires_grad=True) * 2], "requires a gradient"),
        ([torch.nn.Parameter(torch.ones(2), requires_grad=False)], "of the class Parameter"),
        ([torch.empty(2, device="meta")], "on meta"),
        ([torch.ones(3, 2).t()], "a view"),
        ([torch.eye(2).to_sparse()], "sparse"),
        ([_of_inference()], "made in inference mode"),
        ([Row(torch.ones(2))], "a Row in it"),
        ([np.ones((3, 2)).T], "an array that is a view"),
        ([np.ones(2).view(np.matrix)], "of another class"),
        ([torch.ones(2), {1, 2}, object()], "a object in it"),
        ([torch.ones(2), collections.deque([torch.ones(2)])], "a deque in it"),
        ([torch.ones(2)] * 2, "twice"),
        ({(1, 2): torch.ones(2)}, "keys"),
        ([torch.empty((carried_tensors.MAX_BYTES >> 1) + 1, dtype=torch.uint8) for _ in range(2)], "64 MiB"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_told(value: Any, why: str) -> None:
    assert why in str(grown(value))


def test_a_list_that_grows_is_copied_once() -> None:
    """Of 5 MiB that are there already nothing is copied again; who keeps no version keeps no copy."""
    seen = [torch.full((1 << 18,), float(i)) for i in range(5)]
    first = _grown(seen).stored()
    seen.append(torch.zeros(3))
    second = _grown(seen).stored()
    assert [
        a is b for a, b in zip(first["data"]["tensor float32"], second["data"]["tensor float32"], strict=False)
    ] == [True] * 5
    seen[0].data[0] = 7  # torch counts no such write
    third = _grown(seen).stored()
    assert [a is b for a, b in zip(second["data"]["tensor float32"], third["data"]["tensor float32"], strict=True)] == [
        False
    ] + [True] * 5
    assert second["data"]["tensor float32"][0][:4].view(torch.float32).item() == 0.0, "what was stored is changed"
    del first, second, third
    assert not growing_lists._blobs


def test_a_list_that_grows_seldom_has_another_size() -> None:
    """A layout of hundreds of tensors takes tens of milliseconds to plan."""
    seen, sizes = list[torch.Tensor](), list[int]()
    for number in range(3000):
        seen.append(torch.full((2,), float(number)))
        if number % 50 == 0:
            stored = _grown(seen).stored()
            sizes += [blob.nbytes for blob in stored["data"]["tensor float32"]]
            assert _shown(brought(stored)) == _shown(seen)
    assert sorted({*sizes}) == [4096, 8192, 16384, 32768]
    assert sizes == sorted(sizes)


def test_objects_of_the_beginning_are_filled_and_others_made() -> None:
    bank = [torch.zeros(2), np.zeros(2), torch.zeros(2)]
    before = _grown(bank)
    bank[0].add_(1)
    bank[1][:] = 2
    now = [*bank[:2], torch.ones(3), bank[2]]
    stored = _grown(now).stored(before)
    for part in bank:
        part[...] = 0
    there = brought(stored, before)
    assert [part is each for part, each in zip(there, [*bank[:2], None, bank[2]], strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert [part.tolist() for part in there] == [[1, 1], [2, 2], [1, 1, 1], [0, 0]]


def _changes(main: dict[str, Any]) -> Changes:
    reach = Reach(used=[*main], kept=[], named={})
    return Changes(lambda: reach.look(main, []), {}, before=reach.look(main, []))


def test_memory_that_other_processes_see_is_refused() -> None:
    shared = np.frombuffer(multiprocessing.Array("f", 3).get_obj(), dtype="f")
    main = {"seen": [shared, np.zeros(2)]}
    changes = _changes(main)
    assert changes.now().reason == ""
    main["seen"].append(np.ones(2))
    assert "other processes may write" in changes.now().reason


def test_the_kernel_is_asked_once_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the map of the memory takes as long as to look at 50 tensors."""
    main = {"seen": [torch.ones(1) for _ in range(100)]}
    changes, asked = _changes(main), []
    monkeypatch.setattr(sandbox, "shared_memory", lambda: asked.append(1) or iter(()))
    main["seen"].append(torch.ones(1))
    assert len(changes.now().rows) == 1
    assert asked == [1]


def test_what_is_stored_does_not_follow_the_script() -> None:
    """What the item of an outer loop began with is kept, while the inner loop goes on."""
    history: dict[str, list[Any]] = {"loss": [torch.zeros(2)], "n": [1]}
    kept = growing_lists.apart(_grown(history).stored())
    history["n"].append(2)
    history["loss"][0].add_(1)
    assert _shown(brought(kept)) == _shown({"loss": [torch.zeros(2)], "n": [1]})


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (lambda main: [main["buffer"][0]], "'buffer' has a part of it"),
        (lambda main: [main["x"], main["x"][:2]], "'x' has a part of it"),
        (lambda _: [*torch.zeros(2, 2)], "two of its parts share memory"),
        (lambda main: [main["model"].weight.detach()], "'model.weight' has a part of it"),
    ],
)
def test_memory_that_something_else_has_is_refused_without_a_rehearsal(take: Callable[..., Any], why: str) -> None:
    main: dict[str, Any] = {"seen": [], "buffer": torch.zeros(3, 4), "x": torch.ones(3), "model": torch.nn.Linear(2, 2)}
    changes = _changes(main)
    main["seen"].extend(take(main))
    assert changes.now().reason == f"'seen' changes in the loop, and cannot be carried to a restart: {why}"
