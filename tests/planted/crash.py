"""Bugs planted on purpose, which the crash drill has to find.

Each is a monkeypatch in a forked child of the drill: one line of a real bug of ours or of another library, the
invariants that it breaks, and a trial that suits it. A bug counts as found only if one of those invariants is reported
broken. Without these pages the drill could be blind and nobody would know.

Here are the list, the trials, and what is planted in keepers; what is planted in trainers is in crash_trainer.py,
because it needs PyTorch.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.model import Decision, Version
from holdfast.core.versions import slot_guard
from holdfast.core.versions.coordinator_board import Announcement, Board, CommitOrder, Kind
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.keeper.service.keeper import Keeper
from holdfast.keeper.storage import retention
from holdfast.keeper.storage.writer_failover import WriteAttempt
from holdfast.testing.drill import trial_plan
from holdfast.testing.drill.crash_points import RECORD
from holdfast.testing.drill.trial_plan import LAST_LIFE, PAIR, SOLO, TWINS, Aim, LifePlan, Trial, script
from holdfast.tiers.backends import posix_io
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import slots
from holdfast.tiers.storage import bundle_files
from holdfast.tiers.storage.incarnations import Incarnations
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.stored_bundles import StoredBundles
from holdfast.tiers.storage.version_store import LATEST, Storage

MAX_TRIALS = 40
# How long a planted bug keeps a window open that would otherwise be microseconds.
WINDOW_S = 0.02

# Scripts longer than those by which passes are counted, so that the strike never comes too late.
DURABLE = "D1 D1 D1 D1 D1 D1 D1 D1"
UNEVEN = "C2 C1 C2 C1 C1 C2 C1 C2 C1 C1"
EVEN = "C2 C2 C2 C2 C2 C2 C2 C2 C2 C2"

Dice = random.Random


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug.

    Attributes:
        what: what it does, in a few words.
        invariants: at least one of these is reported broken.
        trial: gives the trial that suits it, from dice.
    """

    what: str
    invariants: tuple[str, ...]
    trial: Callable[[Dice], Trial]


def trials(name: str, seed: int) -> Iterator[Trial]:
    """Trials that suit the bug, at most MAX_TRIALS."""
    for number in range(MAX_TRIALS):
        trial = BUGS[name].trial(random.Random(f"{seed}/{name}/{number}"))
        yield replace(trial, number=number, seed=seed, plant=name)


def put(owner: Any, name: str, value: Any) -> None:
    """Replaces a function.

    Raises:
        AttributeError: there is none of that name any more, and a bug planted there would never be found.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def always(answer: Any) -> Callable[..., Any]:
    """A function that does nothing but answer."""
    return lambda *_, **__: answer


# --- trials -------------------------------------------------------------------------------------------------------


def _struck(
    phase: str, victim: str, saves: str, *, stepped: bool | None = None, depth: float = 1.0
) -> Callable[[Dice], Trial]:
    """A strike at a random place in the later passes of this phase.

    It is stepped if `stepped`, by the dice if that is None. It falls up to `depth` of the phase's usual length after its
    beginning: above 1 for a bug that makes it longer.
    """

    def trial(dice: Dice) -> Trial:
        actor = "t0" if phase in {"save", "restore"} else "k0"
        drawn = dice.random() < 0.5
        turn = 0.7 + 0.29 * dice.random()
        aim = Aim(phase, actor, victim, turn, drawn if stepped is None else stepped, depth * dice.random())
        return Trial(0, 0, SOLO, ((phase, victim),), (LifePlan(script(saves), aim), LAST_LIFE))

    return trial


def _calm(*lives: LifePlan, shape: str = SOLO, mode: str = "") -> Callable[[Dice], Trial]:
    """No strike but the ends of lives: what is wrong shows without one."""

    def trial(dice: Dice) -> Trial:
        del dice
        course = lives or (LifePlan(script("D1 D2 D1 D3")), LAST_LIFE)
        return Trial(0, 0, shape, trial_plan.NO_STRIKE, course, mode=mode)

    return trial


_BACK = (
    LifePlan(script("D1 D1 D1"), ends="kill all"),
    LifePlan(script("D1"), roll_back=True, ends="kill all"),
    LAST_LIFE,
)
_FLIP = (LifePlan(script("D1 C1")), replace(LAST_LIFE, damage="memory"))
_APART = (LifePlan(script("C1 C1 c1 c1 c1"), skew=2), LAST_LIFE)
_TWIST = (LifePlan(script("C1 D1 D1 D1"), twist=3), LAST_LIFE)
_ALONE = (LifePlan(script("C1 C1 C1 C1"), skew=2), LAST_LIFE)
_AGAIN = (LifePlan(script("D1 D1"), ends="kill all"), LAST_LIFE)
_STRANGER = (LifePlan(script("D1 D1")), replace(trial_plan.LAST_LIFE_RETIRING, stranger=True))
_LATE = (LifePlan(script("D1 D1"), ends="kill all"), replace(LAST_LIFE, late_writer=True))
_LONG = LifePlan(script("C1 C1 C1 C1 c1 c1 c1 c1 C1"))


# --- memory -------------------------------------------------------------------------------------------------------


def _header_stays() -> None:
    put(slots, "invalidate", always(None))


def _slot_by_counting() -> None:
    original = NodeLedger.begin

    def begin(
        self: NodeLedger, rank: int, version: Version, own_slots: Sequence[slot_guard.SlotView], **more: Any
    ) -> Any:
        decision = original(self, rank, version, own_slots, **more)
        if decision.value is None:
            return decision
        return Decision(own_slots[version.step % len(own_slots)].index, "counted")

    put(NodeLedger, "begin", begin)


def _guard_off() -> None:
    put(slot_guard, "reusable", always(Decision(True, "the guard is off")))


def _pins_ignored() -> None:
    write = StoredBundles.write

    def write_bundle(self: StoredBundles, *args: Any, **kwargs: Any) -> BundleFile:
        time.sleep(WINDOW_S)
        return write(self, *args, **kwargs)

    put(WriteAttempt, "_pin", always(None))
    put(StoredBundles, "write", write_bundle)
    unproved_writes()


def _keeper_stays() -> None:
    put(Keeper, "_is_over", always(False))


# --- levels and commit ----------------------------------------------------------------------------------------------


def _durable_too_early() -> None:
    original = Board._try_captured

    def try_captured(self: Board, version: Version, entry: Any) -> list[Any]:
        actions: list[Any] = list(original(self, version, entry))
        if any(isinstance(a, Announcement) and a.kind is Kind.CAPTURED for a in actions):
            actions.append(Announcement(Kind.DURABLE, version, "it will be"))
        return actions

    put(Board, "_try_captured", try_captured)


def _captured_by_one() -> None:
    original = Board._try_captured

    def try_captured(self: Board, version: Version, entry: Any) -> list[Any]:
        actions: list[Any] = list(original(self, version, entry))
        if not actions and entry.sealed and not entry.abandoned:
            actions.append(Announcement(Kind.CAPTURED, version, "one rank sealed it"))
        return actions

    put(Board, "_try_captured", try_captured)


def _commit_without_all_nodes() -> None:
    def try_commit(self: Board, version: Version, entry: Any) -> list[Any]:
        del self
        if entry.commit_ordered or not entry.durable_due or not entry.parts:
            return []
        entry.commit_ordered = True
        return [CommitOrder(version, entry.layout, tuple(entry.parts[node] for node in sorted(entry.parts)))]

    put(Board, "_try_commit", try_commit)


def _twins_not_compared() -> None:
    put(Board, "_compare_twins", always([]))


def _manifest_before_bundles() -> None:
    commit, write = Storage.commit, StoredBundles.write
    waiting: list[tuple[Any, Any]] = []

    def write_bundle(self: StoredBundles, *args: Any, **kwargs: Any) -> BundleFile:
        waiting.append(((self, *args), kwargs))
        return BundleFile.of(args[1], args[2])

    def commit_first(self: Storage, *args: Any, **kwargs: Any) -> None:
        commit(self, *args, **kwargs)
        while waiting:
            arguments, named = waiting.pop()
            write(*arguments, **named)

    put(StoredBundles, "write", write_bundle)
    put(Storage, "commit", commit_first)
    put(Storage, "_missing", always([]))


def _dead_writer_commits() -> None:
    put(Storage, "_require_newest", always(None))


def _manifest_replaced() -> None:
    def create(self: LocalBackend, name: str, data: bytes, *, stamp: str) -> bool:
        self.put(name, [memoryview(data)], stamp=stamp)
        return True

    put(LocalBackend, "create", create)
    _dead_writer_commits()


# --- files --------------------------------------------------------------------------------------------------------


def _written_in_place() -> None:
    def put_in_place(
        self: LocalBackend, name: str, chunks: Sequence[memoryview], *, stamp: str, progress: Any = None
    ) -> None:
        del stamp, progress
        path = self._root / name
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        at = 0
        for chunk in chunks:
            for start in range(0, len(chunk), 16 << 10):
                at += os.pwrite(fd, chunk[start : start + (16 << 10)], at)
        os.fsync(fd)
        os.close(fd)

    put(LocalBackend, "put", put_in_place)


class _Os:
    """The module `os` with another fsync."""

    def __init__(self, fsync: Callable[[int], None]) -> None:
        self.fsync = fsync

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _is_directory(fd: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fd}")


def _no_file_sync() -> None:
    put(posix_io, "os", _Os(lambda fd: os.fsync(fd) if _is_directory(fd) else None))


def _no_directory_sync() -> None:
    put(posix_io, "os", _Os(lambda fd: None if _is_directory(fd) else os.fsync(fd)))


def _commit_not_synced() -> None:
    """On file systems with one journal any later fsync hides this; the hint `latest` is written right after."""
    put_file = LocalBackend.put

    def put_all_but_the_hint(self: LocalBackend, name: str, *args: Any, **kwargs: Any) -> None:
        if name != LATEST:
            put_file(self, name, *args, **kwargs)

    put(LocalBackend, "put", put_all_but_the_hint)
    put(posix_io, "sync", always(None))


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

    put(os, "fsync", broken)
    put(posix_io, "os", _Os(stubborn))


def _temporaries_stay() -> None:
    put(Incarnations, "sweep", always([]))


# --- retention ------------------------------------------------------------------------------------------------------


def _retired_before_commit() -> None:
    original = Storage.commit

    def commit_last(self: Storage, *args: Any, **kwargs: Any) -> None:
        for version in self.versions()[:-1]:
            self.retire(version)
        original(self, *args, **kwargs)

    put(Storage, "commit", commit_last)


def _newest_retired() -> None:
    put(retention, "to_retire", lambda durable, **_: tuple(sorted(durable)[2:]))


def _strangers_deleted() -> None:
    def remove(self: Storage, version: Version, *names: Any) -> None:
        del names
        shutil.rmtree(Path(self.where) / str(version))

    put(Storage, "_remove", remove)


def _files_before_manifest() -> None:
    def retention(self: Storage, version: Version, **_: Any) -> None:
        manifest = self.manifest(version)
        names = [*(bundle.file for bundle in manifest.bundles), *manifest.parts, "manifest.json"]
        self._backend.delete(*(f"{version}/{name}" for name in names), f"{version}/")

    put(Storage, "retire", retention)


# --- coming back ----------------------------------------------------------------------------------------------------


def unproved_writes() -> None:
    """Takes out the second line behind pins: what is written is not compared with its seal."""
    put(bundle_files._Proof, "take", always(None))
    put(bundle_files._Proof, "end", always(None))


def unverified() -> None:
    """Digests are computed and not compared; in keepers and trainers."""
    put(image_format, "check_chunk", always(None))
    put(image_format, "check_digest", always(None))
    put(image_format, "verify", always(None))


IN_KEEPERS: dict[str, Callable[[], None]] = {
    "header-stays-valid": _header_stays,
    "slot-by-counting": _slot_by_counting,
    "overwrite-guard-off": _guard_off,
    "overwritten-while-persisted": _pins_ignored,
    "keeper-stays": _keeper_stays,
    "durable-before-manifest": _durable_too_early,
    "captured-by-one-rank": _captured_by_one,
    "commit-without-all-nodes": _commit_without_all_nodes,
    "twins-not-compared": _twins_not_compared,
    "manifest-before-bundles": _manifest_before_bundles,
    "dead-writer-commits": _dead_writer_commits,
    "manifest-replaced": _manifest_replaced,
    "written-in-place": _written_in_place,
    "no-fsync-of-files": _no_file_sync,
    "no-fsync-of-directories": _no_directory_sync,
    "commit-not-synced": _commit_not_synced,
    "fsync-tried-again": _sync_tried_again,
    "temporaries-stay": _temporaries_stay,
    "retired-before-commit": _retired_before_commit,
    "newest-retired": _newest_retired,
    "strangers-deleted": _strangers_deleted,
    "files-before-manifest": _files_before_manifest,
    "digest-not-compared": unverified,
}

BUGS: dict[str, Planted] = {
    "header-stays-valid": Planted(
        "the header is not invalidated before the first byte",
        ("S5",),
        _struck("save", "t0", UNEVEN, stepped=False, depth=4.0),
    ),
    "sealed-before-copied": Planted("the keeper is told before the copy is complete", ("S5", "S12"), _calm()),
    "slot-by-counting": Planted("the slot is step % 2", ("S1", "S5", "S6"), _struck("save", "t0", EVEN, stepped=False)),
    "overwrite-guard-off": Planted("the oldest slot is always free", ("S1", "S6"), _calm(*_APART, shape=PAIR)),
    "overwritten-while-persisted": Planted(
        "a slot is reused while it is written, and what was written is not proved",
        ("S2", "S12"),
        _calm(LifePlan(script("d1 c1 C1")), LAST_LIFE),
    ),
    "stale-snapshot": Planted("every save writes the bytes of the first", ("S5", "S12"), _calm()),
    "fence-removed": Planted("the optimizer does not wait for the copy", ("S5", "S12"), _calm(_LONG, LAST_LIFE)),
    "durable-before-manifest": Planted(
        "durable is named when the version is captured", ("S1", "S13"), _struck("persist", "k0", DURABLE)
    ),
    "captured-by-one-rank": Planted(
        "captured is named when one rank sealed", ("S1", "S6", "S13"), _calm(*_ALONE, shape=PAIR)
    ),
    "commit-without-all-nodes": Planted(
        "the first part is enough for a commit", ("S2",), _calm(LifePlan(script("D1 D1 D1")), LAST_LIFE, shape=PAIR)
    ),
    "twins-not-compared": Planted("differing twins go unnoticed", ("S16",), _calm(*_TWIST, shape=TWINS)),
    "manifest-before-bundles": Planted(
        "the manifest is written first", ("S2",), _struck("commit", "k0", DURABLE, stepped=True)
    ),
    "dead-writer-commits": Planted("nobody looks whether a newer incarnation runs", ("S7",), _calm(*_LATE)),
    "manifest-replaced": Planted("the manifest is renamed over an older one", ("S7",), _calm(*_LATE)),
    "written-in-place": Planted(
        "files are written at their final name", ("S2",), _struck("persist", "k0", DURABLE, stepped=True)
    ),
    "no-fsync-of-files": Planted("no fsync of files", ("S2", "S13"), _calm(mode=RECORD)),
    "no-fsync-of-directories": Planted("no fsync of directories", ("S2", "S13"), _calm(mode=RECORD)),
    "commit-not-synced": Planted(
        "durable is named before the fsync of the directory", ("S1", "S2", "S8", "S11", "S13"), _calm(mode=RECORD)
    ),
    "fsync-tried-again": Planted("a failed fsync is repeated on the same file", ("S14",), _calm(mode=RECORD)),
    "temporaries-stay": Planted(
        "nobody removes what a dead writer left", ("V5",), _struck("persist", "k0", DURABLE, stepped=True)
    ),
    "retired-before-commit": Planted(
        "old versions go before the new one is committed",
        ("S11",),
        _struck("commit", "k0", DURABLE, stepped=True),
    ),
    "newest-retired": Planted("retention sorts the wrong way", ("S1", "S8", "S11", "S13"), _calm()),
    "strangers-deleted": Planted("retention removes the whole directory", ("S17",), _calm(*_STRANGER)),
    "files-before-manifest": Planted("files go before their manifest", ("S2", "S11"), _calm(mode=RECORD)),
    "digest-not-compared": Planted("a restore takes what it gets", ("S5",), _calm(*_FLIP)),
    "newest-step": Planted("the highest step wins, of whatever lineage", ("S4",), _calm(*_BACK)),
    "each-rank-for-itself": Planted(
        "every rank takes the newest it holds", ("S3", "S10"), _calm(_APART[0], LifePlan(()), shape=PAIR)
    ),
    "values-forgotten": Planted("only tensors come back", ("S5",), _calm()),
    "incarnation-again": Planted("a new start takes the old number", ("S7",), _calm(*_AGAIN)),
    "keeper-stays": Planted("the keeper outlives the job", ("V5",), _calm()),
}
