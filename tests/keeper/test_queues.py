"""What waits in a keeper: so much and no more, of versions the newest, of failed writes with growing pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, LevelNotReached, StorageFull
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Version
from holdfast.core.versions.slot_guard import Knowledge, SlotState, SlotView, choose_slot
from holdfast.core.versions.writer_failover import Order
from holdfast.keeper.replication import replicator as replicate
from holdfast.keeper.replication.replicator import Replicator
from holdfast.keeper.rpc.announcements import Announced, VersionLevel
from holdfast.keeper.slots.job_queue import Worker
from holdfast.keeper.storage import writer
from keeper.rig import eventually


class Gate:
    """Work that begins, and goes on when it is told to."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, job: int) -> None:
        self.begun.set()
        assert self.open.wait(30)
        self.done.append(job)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def test_a_full_queue_refuses_and_drops_nothing(gate: Gate) -> None:
    worker = Worker("test", gate, lambda _: None, bound=3)
    assert worker.put(0)
    assert gate.begun.wait(60)  # it is in hand, and waits no more
    assert [worker.put(job) for job in (1, 2, 3, 4, 5)] == [True, True, True, False, False]
    gate.open.set()
    eventually(lambda: worker.idle)
    assert gate.done == [0, 1, 2, 3]
    assert worker.stop()
    assert not worker.put(6)


def test_storage_does_not_stand_for_a_second_node() -> None:
    """A version may be durable without being replicated; who waits for the one is not told of the other."""
    announced, version = Announced(0, lambda: True), Version(1, 4)
    announced._levels[version] = VersionLevel(frozenset({Level.CAPTURED, Level.DURABLE}), "the manifest is committed")
    assert announced.wait(version, Level.CAPTURED, 0.0) == announced.wait(version, Level.DURABLE, 0.0) == Level.DURABLE
    with pytest.raises(LevelNotReached, match="not replicated"):
        announced.wait(version, Level.REPLICATED, 0.0)


# --- replicas


REF = BundleRef("lonely", (1,), 0, 1, 100, "f")


def replicator(reached: dict[Level, Version]) -> Replicator:
    """Of node 0, which keeps what lives on node 1 only."""
    ledger = SimpleNamespace(
        bundles_of=lambda _: SimpleNamespace(to_replicate=[(1, 1, REF)], unique_bytes=0),
        newest=reached.get,
    )
    state = SimpleNamespace(
        lock=threading.RLock(),
        ledger=ledger,
        need_ledger=lambda: ledger,
        alarms=SimpleNamespace(warn=lambda *_: None),
        assembly=None,
    )
    return Replicator(state, Events(), lambda: None)


def test_of_versions_that_wait_the_newest_alone_is_pulled(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicator, "_pull", lambda _, home, pull: gate((home, pull.version.step)))
    pulls = replicator({})
    pulls.put(Version(1, 1))
    assert gate.begun.wait(60)
    for step in (2, 3, 4):
        pulls.put(Version(1, step))
    gate.open.set()
    eventually(lambda: pulls.idle)
    pulls.stop()
    assert gate.done == [(1, 1), (1, 4)]


def test_the_lag_is_the_age_of_what_nothing_in_two_nodes_has_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(replicate.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(Replicator, "_pull", lambda *_: None)
    reached: dict[Level, Version] = {}
    pulls = replicator(reached)

    def told() -> tuple[float, float]:
        facts = pulls.facts()
        return facts["behind_versions"], facts["lag_s"]

    assert told() == (0, 0.0)
    for step in (1, 2, 3):
        pulls.put(Version(1, step))
        now.s += 10.0
    assert told() == (3, 30.0)
    reached[Level.REPLICATED] = Version(1, 2)
    assert told() == (1, 10.0)
    reached[Level.REPLICATED] = Version(1, 3)
    assert told() == (0, 0.0)
    pulls.stop()


# --- storage that fails


def test_what_failed_is_tried_again_after_pauses_that_double_and_five_failures_are_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(writer.time, "monotonic", lambda: now.s)
    again, order = writer._RetryState(), Order(Version(1, 4), (), 0, "")
    pauses, hopeless = [], []
    for _ in range(8):
        hopeless.append(again.failed(order, StorageFull("no space is left")))
        before = now.s
        while not (due := again.due()):
            now.s += 0.25
            assert now.s - before <= writer.MAX_PAUSE_S
        assert due == (order,)
        assert again.due() == (), "each is named once"
        pauses.append(now.s - before)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert hopeless == [False] * 4 + [True] * 4
    again.succeeded()
    assert not again.failed(order, StorageFull("no space is left")), "counted in a row"


def test_a_newer_version_takes_the_place_of_one_that_failed() -> None:
    again = writer._RetryState()
    older, newer = (Order(Version(1, step), (), 0, "") for step in (4, 5))
    again.failed(older, StorageFull("no space is left"))
    again.forget(before=newer.version)
    again._at_s = 0.0
    assert again.due() == ()
    again.failed(newer, StorageFull("no space is left"))
    again.failed(older, StorageFull("no space is left"))
    again._at_s = 0.0
    assert again.due() == (newer,)
    for _ in range(9):
        assert not again.failed(newer, CorruptError("it is not held here any more")), "storage is not to blame"


def test_a_commit_for_which_the_queue_has_no_room_is_tried_again() -> None:
    """Storage was behind by so many commits, and nothing newer came: the last version of a job never became durable."""
    repeated: list[Version] = []
    state = SimpleNamespace(lock=threading.RLock(), repeat_part=repeated.append, changed=None, alarms=None, ledger=None)
    committer = writer.Committer(state, None, Events())  # type: ignore[arg-type]
    committer._worker._bound = 0
    jobs = [SimpleNamespace(order=SimpleNamespace(version=Version(1, step))) for step in (4, 5)]
    assert [committer.put(job) for job in jobs] == [False, False]  # type: ignore[arg-type]
    committer.tick()
    assert not repeated, "not at once"
    committer._again._at_s = 0.0
    committer.tick()
    assert repeated == [Version(1, 5)]
    committer.stop()


@pytest.mark.parametrize("failed", [True, False])
def test_what_waits_behind_other_work_is_told_of_where_a_newer_version_is_durable(failed: bool) -> None:
    """Ranks would wait for it no more, though it is made durable."""
    told: list[Version] = []
    older, newest = Version(1, 3), Version(1, 5)
    standing = lambda version: SimpleNamespace(passed=version < newest)  # noqa: E731
    state: Any = SimpleNamespace(
        lock=threading.RLock(),
        changed=None,
        alarms=None,
        ledger=SimpleNamespace(incarnation=1, standing=standing),
        callbacks=SimpleNamespace(report=lambda reports: told.extend(reports.at_work)),
        repeat_part=lambda _: None,
    )
    failover: Any = SimpleNamespace(at_work=told.append, again=lambda _: None)
    persister = writer.Persister(state, None, Events(), None, failover)  # type: ignore[arg-type]
    committer = writer.Committer(state, None, Events())  # type: ignore[arg-type]
    for worker in (persister, committer):
        worker._told_s = -writer.SIGN_S
        if failed:
            worker._again.failed(Order(older, (), 0, "failed"), StorageFull("no space is left"))
        else:
            worker._worker._jobs += [SimpleNamespace(order=Order(version, (), 0, "")) for version in (older, newest)]
    persister._writing, persister._moved_s, persister._allowance_s = (
        SimpleNamespace(order=Order(newest, (), 0, "")),
        time.monotonic(),
        9.0,
    )  # type: ignore[assignment]
    persister.tick()
    assert told == [newest, older]
    committer.tick()
    assert told == [newest, older, older]


@pytest.mark.parametrize("replicated_first", [True, False])
def test_the_replica_of_the_newest_replicated_version_is_not_written_over(replicated_first: bool) -> None:
    """A newer one that is whole on this node alone must not take its place: others may lack theirs."""
    safe, newer = Version(1, 4), Version(1, 5)
    views = [SlotView(0, SlotState.SEALED, safe), SlotView(1, SlotState.SEALED, newer)]
    if not replicated_first:
        views = [SlotView(0, SlotState.SEALED, newer), SlotView(1, SlotState.SEALED, safe)]
    ledger = SimpleNamespace(newest={Level.REPLICATED: safe}.get, knowledge=Knowledge())
    replicator = SimpleNamespace(
        _state=SimpleNamespace(need_ledger=lambda: ledger, resumed=None), _counted=lambda _: False
    )
    chosen = choose_slot(views, Replicator._protection(replicator, views)).value
    assert chosen is not None
    assert views[chosen].version == newer
