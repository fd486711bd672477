"""The side of a data loader's worker that stays: it notes what it keeps when it is asked, and takes over what an earlier one had noted.

A worker goes on with its generators of random numbers and its copy of the dataset from epoch to epoch. torch makes a fetcher in it
when it begins, and again at each message that an epoch begins; there it looks. Which of these calls is meant is counted, for
a worker may still have items to load when it is asked. What it says lies in memory that it shares with its main process.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.reach.look import Leaf, Look
from holdfast.adapters.zero_lines.reach.plain_values import CLOCK
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.base import config
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.rng import process_generators
from holdfast.checkpoint.loader_workers.worker_init import WorkerInit
from holdfast.tiers.format import values as value_codec

# Bytes for what a worker is told, and as many for what it says; a page costs memory when it is written.
MAX_NOTE = 1 << 20
_HEAD = struct.Struct("<QQQQQ")  # which call is asked for, which was answered; lengths; digest of the answer
_ROOM = 64
_TOO_LARGE = "what it keeps is too large to be carried"


class Slot:
    """Memory that a worker shares with its main process: a question there, an answer back. Made before the worker is forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ROOM + 2 * MAX_NOTE)

    def ask(self, call: int, what: Mapping[str, Any] | None) -> bool:
        """Asks for a note at one call, after it has taken over what an earlier worker had noted; False if that has no room."""
        data = value_codec.encode(dict(what)) if what is not None else b""
        if len(data) > MAX_NOTE:
            return False
        self._memory[_ROOM : _ROOM + len(data)] = data
        self._memory[: _HEAD.size] = _HEAD.pack(call, 0, len(data), 0, 0)
        return True

    def asked(self, call: int) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether this call is the one, and what is to be taken over."""
        wanted, _, length, _, _ = _HEAD.unpack(self._memory[: _HEAD.size])
        if wanted != call:
            return False, None
        data = self._memory[_ROOM : _ROOM + length]
        return True, value_codec.decode(data) if length else None

    def answer(self, call: int, note: Mapping[str, Any]) -> None:
        """Says what the worker keeps at this call."""
        data = value_codec.encode(dict(note))
        if len(data) > MAX_NOTE:
            data = value_codec.encode({"reason": _TOO_LARGE})
        at = _ROOM + MAX_NOTE
        self._memory[at : at + len(data)] = data
        self._memory[8 : _HEAD.size] = _HEAD.pack(0, call, 0, len(data), xxhash.xxh3_64_intdigest(data))[8:]

    def answered(self, call: int) -> dict[str, Any] | None:
        """Returns the note of this call; None if it is not there yet."""
        _, done, _, length, digest = _HEAD.unpack(self._memory[: _HEAD.size])
        at = _ROOM + MAX_NOTE
        data = self._memory[at : at + length]
        if done != call or xxhash.xxh3_64_intdigest(data) != digest:
            return None
        note: dict[str, Any] = value_codec.decode(data)
        return note


class Noting(WorkerInit):
    """Has a worker look at itself.

    Args:
        init: the loader's own; None if it has none.
        slots: of the workers, by number.
    """

    def __init__(self, init: Callable[[int], Any] | None, slots: Sequence[Slot], reach: Reach) -> None:
        super().__init__(init)
        self._slots, self._reach = slots, reach
        self._calls = 0
        self._first: Look | None = None
        self._seeded: dict[str, Any] = {}
        self._around: dict[str, object] = {}
        self._refused = ""
        self._digests: dict[str, tuple[object, int]] = {}

    def fetches(self, number: int, dataset: Any, collate_fn: Any, fetcher: Any) -> None:  # noqa: ARG002
        """Looks at the worker, and answers if this is the call that was asked for."""
        self._calls += 1
        things, slot = named(dataset, collate_fn), self._slots[number]
        try:
            if self._first is None:
                self._first = self._reach.of(things)
                self._seeded = {name: read() for name, (read, _) in process_generators().items()}
                self._refused = why_not(self._first)
                self._around = around()
            is_asked, what = slot.asked(self._calls)
            if is_asked:
                if what is not None:
                    self._take_over(things, what)
                slot.answer(self._calls, self._note(things))
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the worker has to go on
            self._refused = f"what it keeps cannot be looked at: {type(error).__name__}: {error}"
            slot.answer(self._calls, {"reason": self._refused})
            pass_on(error)

    def _take_over(self, things: Mapping[str, Any], what: Mapping[str, Any]) -> None:
        self._reach.of(things).put(what["rows"], what["gone"])
        known = process_generators()
        for name, state in what["generators"].items():
            known[name][1](state)

    def _note(self, things: Mapping[str, Any]) -> dict[str, Any]:
        assert self._first is not None
        now = self._reach.of(things)
        changed = Changes(lambda: now, {}, before=self._first).between(now)
        made = (path for path, leaf in now.leaves.items() if leaf.lasts and not _lasted(self._first, path))
        born = next((f"{path!r} came to be in it, and a restart cannot make it" for path in made), "")
        states = {name: read() for name, (read, _) in process_generators().items()}
        token = xxhash.xxh3_64(repr((settings(), where_made())).encode())
        times = {path for path, leaf in now.leaves.items() if _is_time(leaf)}
        for path, value in {**tokens(now), **states}.items():
            if path in times:
                continue  # another one in every run
            token.update(f"{path}={self._digest(path, value)}".encode())
        return {
            "rows": changed.rows,
            "gone": changed.gone,
            "generators": {name: state for name, state in states.items() if self._seeded.get(name) != state},
            "digest": token.hexdigest(),
            "reason": self._refused or why_not(now) or changed.reason or born or _moved(self._around, around()),
        }

    def _digest(self, path: str, value: Any) -> int:
        """Returns a number that is the same in every process; that of a large value only when it is another one."""
        known = self._digests.get(path)
        if known is None or known[0] != value:
            known = self._digests[path] = (value, xxhash.xxh3_64_intdigest(repr(value).encode()))
        return known[1]


def named(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    """Returns what a worker has of a loader, under names that no name of the script can have."""
    return {"its dataset": dataset, "its collate_fn": collate_fn}


def tokens(look: Look) -> dict[str, object]:
    """Returns what a look found, by path."""
    found: dict[str, object] = {path: leaf.token for path, leaf in look.leaves.items()}
    found.update({f"fixed {path}": token for path, token in look.fixed.items()})
    found.update({f"order {path}": list(map(str, keys)) for path, keys in look.orders.items()})
    return found


def _is_time(leaf: Leaf) -> bool:
    is_float = isinstance(leaf.token, tuple) and leaf.token[:1] == (float,)
    return is_float and leaf.value() >= CLOCK


def _lasted(look: Look, path: str) -> bool:
    return path in look.leaves and look.leaves[path].lasts


def why_not(look: Look) -> str:
    """Returns what cannot be looked at; empty if all can."""
    for path, kind in (*look.unsure, *look.unknown):
        return f"{path!r}, a {kind} cannot be looked at"
    return ""


def settings() -> tuple[Any, ...]:
    """Returns what holds for a whole process in torch."""
    return (
        torch.get_default_dtype(), str(torch.get_default_device()), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
    )  # fmt: skip


def where_made() -> tuple[bool, ...]:
    """Returns what holds in the code that makes workers, and in them from there on."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def around() -> dict[str, object]:
    """Returns what holds for a whole process, and may be another after a restart: it must stay as it is, whatever it is."""
    environment = {f"the environment[{key!r}]": value for key, value in config.variables().items()}
    return {"torch's settings": settings(), "the working directory": os.getcwd(), **environment}


def _moved(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    path = other(before, now)
    return path and f"{path!r} changes in it"


def other(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Returns the path of something that is not as it was; empty if all is."""
    return next((path for path in (*before, *now) if before.get(path, before) != now.get(path, before)), "")
