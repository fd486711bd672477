"""Bugs planted on purpose, which the crash drill has to find; never part of production code.

Each is a monkeypatch in a forked child of the drill: one line of a real bug of ours or of another library, the
invariants that it breaks, and the trials that suit it. A bug counts as found only if one of those invariants is
reported broken. Without this page the drill could be blind and nobody would know.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.core import commit, recovery, slots
from holdfast.core.commit import Announcement, Board, CommitOrder, Kind
from holdfast.core.ledger import NodeLedger
from holdfast.core.lineage import Lineage
from holdfast.core.model import Decision, Level, Version
from holdfast.node import persist
from holdfast.node.daemon import Keeper
from holdfast.testing import drill_plan
from holdfast.testing.drill_plan import PAIR, SOLO, TWINS, Aim, LifePlan, Save, Trial
from holdfast.tiers import files, memory, registry
from holdfast.tiers import format as image_format
from holdfast.tiers.local import LocalBackend
from holdfast.tiers.manifest import BundleFile
from holdfast.tiers.storage import Storage
from holdfast.train import capture, verdict
from holdfast.train.fence import Fence
from holdfast.train.restore import Restorer

MAX_TRIALS = 12
# How long a planted bug keeps a window open that would otherwise be microseconds.
WINDOW_S = 0.004

TRAINER, KEEPER = "trainer", "keeper"


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug.

    Attributes:
        what: what it does, in a few words.
        invariants: at least one of these is reported broken.
        role: in which processes it is planted; `""` in all.
        plant: applies it to this process.
        trials: gives the trial that suits it, from dice.
    """

    what: str
    invariants: tuple[str, ...]
    role: str
    plant: Callable[[], None]
    trial: Callable[[random.Random], Trial]


def apply(name: str, role: str) -> None:
    """Plants the bug in this process, if it belongs there; nothing if `name` is empty."""
    if name and BUGS[name].role in {"", role}:
        BUGS[name].plant()


def trials(name: str, seed: int) -> Iterator[Trial]:
    """Trials that suit the bug, at most MAX_TRIALS."""
    for number in range(MAX_TRIALS):
        trial = BUGS[name].trial(random.Random(f"{seed}/{name}/{number}"))
        yield replace(trial, number=number, seed=seed, plant=name)


# --- trials -------------------------------------------------------------------------------------------------------


def _struck(phase: str, victim: str, *, shape: str = SOLO, **changes: Any) -> Callable[[random.Random], Trial]:
    """A strike in this phase, at a random place in it."""

    def trial(dice: random.Random) -> Trial:
        actor = "t0" if phase in {"save", "restore"} else "k0"
        stepped = changes.get("stepped", dice.random() < 0.5)
        aim = Aim(phase, actor, victim, 0.3 + 0.7 * dice.random(), stepped, dice.random())
        first = LifePlan(drill_plan.saves(dice, 6), aim)
        return Trial(0, 0, shape, phase, victim, (first, drill_plan.LAST_LIFE), overlap=changes.get("overlap", True))

    return trial


def _calm(*lives: LifePlan, shape: str = SOLO, **changes: Any) -> Callable[[random.Random], Trial]:
    """No strike: what is wrong shows without one."""

    def trial(dice: random.Random) -> Trial:
        del dice
        return Trial(0, 0, shape, "none", "nobody", lives or (_SAVES, drill_plan.LAST_LIFE), **changes)

    return trial


def _script(text: str) -> tuple[Save, ...]:
    """`C2` is a captured save after two steps, `d1` a durable one that nobody waits for, and so on."""
    levels = {"c": "captured", "d": "durable", "r": "replicated"}
    return tuple(Save(int(word[1:]), levels[word[0].lower()], word[0].isupper()) for word in text.split())


_SAVES = LifePlan(_script("D1 D2 D1 D3"))
_EVEN = LifePlan(_script("C2 C2 C2 C2 C2"), Aim("save", "t0", "t0", 0.9, False, 0.5))


def _mid_save(script: str, **changes: Any) -> Callable[[random.Random], Trial]:
    """The trainer dies in the copy of a late save."""

    def trial(dice: random.Random) -> Trial:
        aim = Aim("save", "t0", "t0", 0.5 + 0.5 * dice.random(), False, dice.random())
        life = LifePlan(_script(script), aim)
        return Trial(0, 0, SOLO, "save", "trainer", (life, drill_plan.LAST_LIFE), **changes)

    return trial


# --- memory -------------------------------------------------------------------------------------------------------


def _slow_copy() -> None:
    """Not a bug: a copy that takes long enough to be interrupted."""
    original = capture.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            original([target], [source])
            time.sleep(WINDOW_S / 8)

    capture.copy = copy


def _header_stays() -> None:
    _slow_copy()
    memory.invalidate = lambda slot: None


def _sealed_before_copied() -> None:
    original = capture.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        threading.Timer(WINDOW_S, original, (targets, [source.clone() for source in sources])).start()

    capture.copy = copy


def _slot_by_counting() -> None:
    _slow_copy()
    original = NodeLedger.begin

    def begin(self: NodeLedger, rank: int, version: Version, own_slots: Sequence[slots.SlotView]) -> Decision[int | None]:
        decision = original(self, rank, version, own_slots)
        if decision.value is None:
            return decision
        return Decision(own_slots[version.step % len(own_slots)].index, "counted")

    NodeLedger.begin = begin


def _guard_off() -> None:
    slots.reusable = lambda slot, knowledge: Decision(True, "the guard is off")


def _pins_ignored() -> None:
    original, write = slots.reusable, Storage.write_bundle
    slots.reusable = lambda slot, knowledge: original(replace(slot, pins=0), knowledge)

    def write_bundle(self: Storage, *args: Any, **kwargs: Any) -> BundleFile:
        time.sleep(5 * WINDOW_S)
        return write(self, *args, **kwargs)

    Storage.write_bundle = write_bundle


def _stale_snapshot() -> None:
    original = capture.copy
    first: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        key = tuple(source.data_ptr() for source in sources)
        original(targets, first.setdefault(key, [source.clone() for source in sources]))

    capture.copy = copy


def _fence_removed() -> None:
    _slow_copy()
    Fence._before_step = lambda self, *args: None


# --- levels and commit ----------------------------------------------------------------------------------------------


def _durable_too_early() -> None:
    original = Board._try_captured

    def try_captured(self: Board, version: Version, entry: Any) -> list[Any]:
        actions = original(self, version, entry)
        if any(isinstance(a, Announcement) and a.kind is Kind.CAPTURED for a in actions) and entry.durable_due:
            actions.append(Announcement(Kind.DURABLE, version, "all will be well"))
        return actions

    Board._try_captured = try_captured


def _captured_by_one() -> None:
    original = Board._try_captured

    def try_captured(self: Board, version: Version, entry: Any) -> list[Any]:
        actions = original(self, version, entry)
        if not actions and entry.level is Level.NONE and entry.sealed:
            return [Announcement(Kind.CAPTURED, version, "one rank sealed it")]
        return actions

    Board._try_captured = try_captured


def _commit_without_all_nodes() -> None:
    def try_commit(self: Board, version: Version, entry: Any) -> list[Any]:
        if entry.level is Level.NONE or entry.commit_ordered or not entry.durable_due or not entry.parts:
            return []
        entry.commit_ordered = True
        return [CommitOrder(version, entry.layout, tuple(entry.parts[node] for node in sorted(entry.parts)))]

    Board._try_commit = try_commit


def _manifest_before_bundles() -> None:
    commit_now, write = Storage.commit, Storage.write_bundle
    waiting: list[tuple[Any, Any]] = []

    def write_bundle(self: Storage, version: Version, ref: Any, seal: Any, view: memoryview, *, stamp: str) -> BundleFile:
        waiting.append(((self, version, ref, seal, view), {"stamp": stamp}))
        return BundleFile.of(ref, seal)

    def commit_first(self: Storage, *args: Any, **kwargs: Any) -> None:
        commit_now(self, *args, **kwargs)
        while waiting:
            arguments, named = waiting.pop()
            write(*arguments, **named)

    Storage.write_bundle, Storage.commit = write_bundle, commit_first
    Storage._check_complete = lambda self, manifest: None


def _manifest_replaced() -> None:
    def create(self: LocalBackend, name: str, data: bytes, *, stamp: str) -> bool:
        self.put(name, [memoryview(data)], stamp=stamp)
        return True

    LocalBackend.create = create


def _dead_writer_commits() -> None:
    registry.highest = lambda backend: 0
    Storage.highest_incarnation = lambda self: 0


def _incarnation_again() -> None:
    Storage.register_incarnation = lambda self: max(1, self.highest_incarnation()) if self.highest_incarnation() else _first(self)


def _first(storage: Storage) -> int:
    return registry.register(storage._backend)


# --- files --------------------------------------------------------------------------------------------------------


def _written_in_place() -> None:
    def put(self: LocalBackend, name: str, chunks: Sequence[memoryview], *, stamp: str) -> None:
        path = self._root / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        at = 0
        for chunk in chunks:
            for start in range(0, len(chunk), 16 << 10):
                at += os.pwrite(fd, chunk[start : start + (16 << 10)], at)
        os.fsync(fd)
        os.close(fd)

    LocalBackend.put = put


class _Os:
    """The module `os` with another fsync."""

    def __init__(self, fsync: Callable[[int], None]) -> None:
        self.fsync = fsync

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _is_directory(fd: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fd}")


def _no_file_sync() -> None:
    files.os = _Os(lambda fd: os.fsync(fd) if _is_directory(fd) else None)


def _no_directory_sync() -> None:
    files.os = _Os(lambda fd: None if _is_directory(fd) else os.fsync(fd))


def _sync_tried_again() -> None:
    original, count = os.fsync, [0]

    def broken(fd: int) -> None:  # the device: every fifth fsync of a file reports an error, once
        if not _is_directory(fd):
            count[0] += 1
            if count[0] % 5 == 0:
                raise OSError(errno.EIO, "planted")
        original(fd)

    def stubborn(fd: int) -> None:  # the bug: fsync says yes when it is asked twice
        try:
            os.fsync(fd)
        except OSError:
            os.fsync(fd)

    os.fsync = broken
    files.os = _Os(stubborn)


def _temporaries_stay() -> None:
    registry.sweep = lambda backend, incarnation, *, is_alive: []
    Storage.sweep = lambda self, *args, **kwargs: []


# --- retention ------------------------------------------------------------------------------------------------------


def _retired_before_commit() -> None:
    original = Storage.commit

    def commit_last(self: Storage, *args: Any, **kwargs: Any) -> None:
        for version in self.versions()[:-1]:
            self.retire(version)
        original(self, *args, **kwargs)

    Storage.commit = commit_last


def _newest_retired() -> None:
    persist.to_retire = lambda durable, **kept: tuple(sorted(durable)[2:])


def _strangers_deleted() -> None:
    def remove(self: Storage, version: Version, *names: Any) -> None:
        del names
        shutil.rmtree(Path(self.where) / str(version))

    Storage._remove = remove


def _files_before_manifest() -> None:
    def retire(self: Storage, version: Version) -> None:
        manifest = self.manifest(version)
        self._remove(version, [bundle.file for bundle in manifest.bundles], manifest.parts)
        self._backend.delete(f"{version}/manifest.json", f"{version}/")

    Storage.retire = retire


# --- coming back ----------------------------------------------------------------------------------------------------


def _unverified() -> None:
    image_format.check_chunk = lambda index, digest, seal, where: None
    image_format.check_digest = lambda digests, seal, where: None
    image_format.verify = lambda view, seal, where: None


def _newest_step() -> None:
    original = recovery.choose_version

    def choose(facts: recovery.Facts, *, wanted: Version | None = None) -> Decision[recovery.Choice | None]:
        found = sorted({copy.version for copy in facts.memory} | set(facts.stored), key=lambda v: v.step, reverse=True)
        for version in found if wanted is None else ():
            decision = original(replace(facts, lineage=Lineage()), wanted=version)
            if decision.value is not None:
                return decision
        return original(facts, wanted=wanted)

    recovery.choose_version = choose


def _each_its_own() -> None:
    """No agreement: every rank takes the newest version of its own node."""

    def newest(self: Restorer, wanted: Version | None) -> Any:
        found = verdict.find(self._client, self._storage)
        rank = self._job.group.rank
        for copy in sorted(found.inventory.copies, key=lambda c: c.version, reverse=True):
            if copy.rank == rank and not self._attempts[copy.version]:
                return self._own(copy)
        raise AssertionError("unreachable")

    Restorer._newest = newest


def _values_forgotten() -> None:
    """Tensors come back, everything else is left as it was built."""


def _twins_not_compared() -> None:
    Board._compare_twins = lambda self, version, entry, report: []


def _keeper_stays() -> None:
    Keeper._is_over = lambda self: False


BUGS: dict[str, Planted] = {}
