"""Tells what a world of the model check consists of: a hashable value, and the changeable objects in it as numbers.

The real NodeLedger and Board change in place. `Cells` keeps one object per distinct content, copies it before a call
and remembers what became of it: worlds with equal ledgers share them, and no call is ever made twice on the same
content. It knows no field of them by name; whatever they keep is part of their content. Called by
testing.model_world.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from holdfast.core.model import Version
from holdfast.core.versions.coordinator_board import Announcement, Board
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.core.versions.slot_guard import SlotView


class Broken(Exception):
    """A promise does not hold in some world: its number in the protocol, and what was seen."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(what)
        self.invariant = invariant
        self.what = what


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds what is explored: every order of events, within these numbers.

    Attributes:
        node_of: node of each rank.
        num_slots: slots of each rank.
        max_step: last step that is saved.
        durable_every: versions of these steps go to storage, which may take any time; 0 for none.
        skips: how often a rank leaves a version out without a word.
        failures: how often a rank gives a version up in the middle of writing it.
        trainer_deaths: how often a trainer dies; all ranks then roll back into a new incarnation.
        keeper_deaths: how often a keeper dies; its trainers hand the slots to the next one.
        overlap: a rank may begin a version while its last one is still on the way to a seal.
        late_home: announcements reach even the coordinator's own node late.
        replicas: every rank's state is copied to the next node; what nodes say of copies reaches the coordinator late.
        impatience: how often a node stops waiting for second copies.
        repeats: how often a node copies once more what it has: a transfer of several ranks broke, or a restore asked again.
        takeovers: how often a node has to write to storage what it keeps a copy of; the order may come before the copy.
        parity: with `replicas`: all nodes keep parity of each other instead, each one piece of a version.
    """

    node_of: tuple[int, ...] = (0, 1)
    num_slots: int = 2
    max_step: int = 3
    durable_every: int = 0
    skips: int = 0
    failures: int = 0
    trainer_deaths: int = 0
    keeper_deaths: int = 0
    overlap: bool = False
    late_home: bool = False
    replicas: bool = False
    impatience: int = 0
    repeats: int = 0
    takeovers: int = 0
    parity: bool = False


class Left(NamedTuple):
    """The faults that may still happen; see Bounds."""

    skips: int
    failures: int
    trainer_deaths: int
    keeper_deaths: int
    impatience: int
    repeats: int
    takeovers: int


class Takeover(NamedTuple):
    """An order to write a replica to storage.

    Attributes:
        rank: whose bundle it is.
        begun: its turn has come: the replica was found, and its bytes are being written.
        pinned: it was found, and stays as it is.
    """

    rank: int
    version: Version
    begun: bool
    pinned: bool


class World(NamedTuple):
    """The job at one moment. Per node: ledgers, inboxes, joined, tables, copies, orders, untold, patient.
    Per rank: slots, steps, alive.

    Attributes:
        ledgers, board: numbers in `Cells`.
        joined: whether the node's keeper follows the present coordinator.
        history: what the coordinator announced, for keepers that join late.
        steps: the last step that the rank saved or let go.
        tables: versions whose list of bundles the keeper knows.
        resumed: incarnation and what it came back from, for each.
        copies: (rank, version) of the replicas that stand, each in a place of its own; sorted.
        orders: replicas that are to be written to storage, or are being written.
        untold: what was said of copies and has not reached the coordinator: ("replicated" or "dropped", version).
        patient: whether the node waits for second copies.
        safest: the newest version that is called replicated.
        complete: the newest version that all ranks held sealed at one moment.
        acked: the newest version that some trainer was told to be captured.
        living: versions that descend from no rolled-back step.
    """

    ledgers: tuple[int, ...]
    board: int
    slots: tuple[tuple[SlotView, ...], ...]
    inboxes: tuple[tuple[Announcement, ...], ...]
    joined: tuple[bool, ...]
    history: tuple[Announcement, ...]
    steps: tuple[int, ...]
    alive: tuple[bool, ...]
    tables: tuple[frozenset[Version], ...]
    resumed: tuple[tuple[int, Version | None], ...]
    copies: tuple[tuple[tuple[int, Version], ...], ...]
    orders: tuple[tuple[Takeover, ...], ...]
    untold: tuple[tuple[tuple[str, Version], ...], ...]
    patient: tuple[bool, ...]
    safest: Version | None
    complete: Version | None
    acked: Version | None
    living: frozenset[Version]
    left: Left


class Cells:
    """Objects that change in place, as numbers: one object per content, one execution per call and content."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._calls: dict[Any, tuple[int, Any]] = {}

    def add(self, thing: object) -> int:
        """The number of a thing with this content."""
        number = self._numbers.setdefault(_frozen(thing), len(self._objects))
        if number == len(self._objects):
            self._objects.append(thing)
        return number

    def call(self, number: int, method: str, *args: Any, **more: Any) -> tuple[int, Any]:
        """Return what the thing becomes by the call, and what the call returns."""
        key = (number, method, args, *more.values())
        if key not in self._calls:
            thing = _copy(self._objects[number])
            answer = getattr(thing, method)(*args, **more)
            self._calls[key] = self.add(thing), tuple(answer) if isinstance(answer, list) else answer
        return self._calls[key]


@functools.cache
def _inner(kind: Hashable) -> tuple[str, ...]:
    """Fields to look into: all of a record that is written in place or holds a mapping, for it has no hash."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return ()
    loose = not kind.__dataclass_params__.frozen or any("Mapping" in str(field.type) for field in fields(kind))  # type: ignore[attr-defined]
    return tuple(field.name for field in fields(kind)) if loose else ()


def _names(thing: Any) -> tuple[str, ...]:
    kind: Any = type(thing)
    return tuple(vars(thing)) if isinstance(thing, NodeLedger | Board) else _inner(kind)


def _copy(thing: Any) -> Any:
    """A deep copy of what may change; values are shared."""
    if isinstance(thing, dict):
        return {key: _copy(value) for key, value in thing.items()}
    if isinstance(thing, list | set):
        return type(thing)(thing)
    names = _names(thing)
    if not names:
        return thing
    twin = object.__new__(type(thing))
    for name in names:
        object.__setattr__(twin, name, _copy(getattr(thing, name)))
    return twin


def _frozen(thing: Any) -> Any:
    """The content as a hashable value."""
    if isinstance(thing, dict):
        return frozenset([(key, _frozen(value)) for key, value in thing.items()])
    if isinstance(thing, set):
        return frozenset(thing)
    names = _names(thing)
    return tuple([_frozen(getattr(thing, name)) for name in names]) if names else thing
