"""Pulls that are repeated: a version is never brought twice, takes one slot of a rank, and never bars what is newer.

The keeper's own Replicator, state and slot pool of node 1 of 2; only the reader of the peer and the news are stand-ins.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from holdfast.base.errors import Fenced, HoldfastError, KeeperLost
from holdfast.core.model import Level, Seal, Version
from holdfast.core.versions.coordinator_board import Kind
from holdfast.core.versions.replication_lag import FIRST_PATIENCE_S
from holdfast.keeper.replication import replicator as replicate
from holdfast.keeper.slots import overwrite_guard
from keeper.rig import Rig, eventually, reached, save_all
from kit.replica_nodes import RESUMED, TICKS, Node, seal_of, without_descriptors

NEXT = Version(2, 100)


class Peer:
    """The reader of another keeper, which holds everything; `meet` may hold a step of it up, or break it."""

    meet: ClassVar[Callable[[str, str], None]]
    pulled: ClassVar[list[tuple[Version, str]]]

    def __init__(self, *_: object, **__: object) -> None:
        self.meet("hello", "")

    def seals(self, _: Version, bundle_ids: tuple[str, ...]) -> dict[str, Seal]:
        for bundle_id in bundle_ids:
            self.meet("seals", bundle_id)
        return {bundle_id: seal_of(bundle_id) for bundle_id in bundle_ids}

    def read_into(self, version: Version, seal: Seal, view: memoryview) -> None:
        self.meet("read", seal.bundle_id)
        assert len(view) == seal.length
        self.pulled.append((version, seal.bundle_id))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Peer.meet = staticmethod(lambda *_: None)
    Peer.pulled = []
    monkeypatch.setattr(replicate, "PeerReader", Peer)
    yield
    Peer.meet = staticmethod(lambda *_: None)  # an error that was raised keeps the memory that was read into


@dataclass
class Stop:
    """A step of the peer that is held up the first time it is taken, until it goes on or breaks."""

    what: str
    error: HoldfastError | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, what: str, _: str) -> None:
        if what == self.what and not self.begun.is_set():
            self.begun.set()
            assert self.on.wait(30)
            if self.error is not None:
                raise self.error


def held_up(what: str, error: HoldfastError | None = None) -> Stop:
    stop = Stop(what, error)
    Peer.meet = staticmethod(stop)
    return stop


def broken_once(what: str, bundle_id: str, error: Exception) -> None:
    left = [error]

    def meet(step: str, name: str) -> None:
        if (step, name) == (what, bundle_id) and left:
            raise left.pop()

    Peer.meet = staticmethod(meet)


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[Node] = []

    def make(**more: Any) -> Node:
        made.append(Node(tmp_path, **more))
        return made[-1]

    yield make
    for node in made:
        node.replicator.stop()
        node.state.slot_pool.close()


# --- the same once more


@pytest.mark.parametrize("is_first", [True, False], ids=["the first version", "after a restore"])
def test_a_pull_that_broke_at_its_second_rank_brings_the_first_one_once(make_node: MakeNode, is_first: bool) -> None:
    node = make_node(ranks=2)
    broken_once("seals", "g1-0", KeeperLost("the connection broke"))
    if is_first:
        node.assemble(1)
        node.state.resume(1, None)
        node.hear(Kind.CAPTURED, RESUMED)
    else:
        node.come_back()
        node.replicator.refill(RESUMED)
    node.tick()
    assert Peer.pulled == [(RESUMED, "g0-0"), (RESUMED, "g1-0")]
    assert [node.slots(rank) for rank in (0, 1)] == [[(RESUMED, ["g0-0"])], [(RESUMED, ["g1-0"])]]
    if is_first:
        assert dict(node.state.need_ledger().reports().replicas) == {RESUMED: ("g0-0", "g1-0")}
        node.hear(Kind.REPLICATED, RESUMED)
        node.goes_on(Version(1, 5), Version(1, 6))
    else:
        node.goes_on(NEXT, Version(2, 101))


def test_a_refill_that_is_asked_again_while_its_pull_is_under_way_brings_nothing_twice(make_node: MakeNode) -> None:
    node = make_node()
    node.come_back()
    slow = held_up("read")
    node.silent = ((2, "did not answer in time"),)
    node.replicator.refill(RESUMED)
    assert slow.begun.wait(60)
    asked = threading.Event()
    eventually(lambda: node.replicator._unfilled == RESUMED)
    node.silent, node.asked = (), [asked.set]
    node.replicator.tick()  # this node's replica does not stand yet, so the survey misses it
    assert asked.wait(30)
    eventually(lambda: node.replicator._filler.idle)
    slow.on.set()
    node.rest()
    assert Peer.pulled == [(RESUMED, "g0-0")]
    assert node.slots() == [(RESUMED, ["g0-0"])]
    node.goes_on(NEXT, Version(2, 101))


def test_a_pull_of_the_past_that_was_refused_and_the_refill_bring_one_copy(make_node: MakeNode) -> None:
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    for step in (2, 3):
        node.replicate(Version(1, step))
    past = held_up("hello", Fenced("incarnation 1 is over; 2 has begun"))
    node.hear(Kind.CAPTURED, RESUMED)
    assert past.begun.wait(60)
    node.assemble(2)
    node.replicator.tick()  # nothing has failed yet
    past.on.set()
    node.rest()
    again, asked = held_up("read"), threading.Event()
    node.asked = [asked.set]
    node.state.resume(2, RESUMED)
    node.replicator.tick()  # what was refused is of use again, for all resumed from it
    assert again.begun.wait(60)
    node.replicator.refill(RESUMED)
    assert asked.wait(30)
    eventually(lambda: node.replicator._filler.idle)
    again.on.set()
    node.rest()
    assert Peer.pulled.count((RESUMED, "g0-0")) == 1
    assert sorted(node.slots()) == [(Version(1, 3), ["g0-0"]), (RESUMED, ["g0-0"])]
    node.goes_on(NEXT, Version(2, 101))


# --- part of it


def test_a_bad_image_is_brought_again_beside_the_good_one(make_node: MakeNode) -> None:
    node = make_node(parts=2)
    node.assemble(1)
    node.state.resume(1, None)
    node.replicate(RESUMED)
    used = node.state.slot_pool.budget.used
    node.replicas()[0].condemned.add("g0-0")
    node.come_back()
    node.replicator.refill(RESUMED)
    node.rest()
    assert Peer.pulled.count((RESUMED, "g0-0")) == 2
    assert Peer.pulled.count((RESUMED, "g0-1")) == 1, "it is good, and not brought again"
    assert node.slots() == [(RESUMED, ["g0-0", "g0-1"]), (RESUMED, ["g0-0"])]
    node.goes_on(NEXT, Version(2, 101))
    assert node.state.slot_pool.budget.used == 2 * used


def test_a_copy_that_went_bad_altogether_gives_its_slot_back(make_node: MakeNode) -> None:
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    node.replicate(RESUMED)
    node.replicas()[0].condemned.add("g0-0")
    node.come_back()
    node.replicator.refill(RESUMED)
    node.rest()
    assert node.slots() == [(RESUMED, ["g0-0"])]
    assert not node.replicas()[0].condemned
    node.goes_on(NEXT, Version(2, 101))


def test_parts_of_a_version_from_two_nodes_at_once_take_one_slot(make_node: MakeNode) -> None:
    node = make_node(parts=2)
    node.come_back()
    meeting = threading.Barrier(2, timeout=30)
    allocate = node.state.slot_pool.allocate

    def together(*args: Any) -> Any:
        slot = allocate(*args)
        meeting.wait()  # neither has a slot yet that the other could see
        return slot

    node.state.slot_pool.allocate = together  # type: ignore[method-assign]
    first, second = (ref for ref in node.table if ref.ranks == (0,))
    with node.state.lock:
        node.replicator._queue(0, RESUMED, {0: [first]})
        node.replicator._queue(1, RESUMED, {0: [second]})
    node.rest()
    node.state.slot_pool.allocate = allocate  # type: ignore[method-assign]
    assert sorted(node.slots()) == [(RESUMED, ["g0-0"]), (RESUMED, ["g0-1"])]
    assert [held.outgrown for held in node.replicas()] == [False, True]
    node.goes_on(NEXT, Version(2, 101))


def test_another_content_under_the_same_name_is_not_taken_for_a_copy(make_node: MakeNode) -> None:
    node = make_node()
    node.come_back()
    node.replicator.refill(RESUMED)
    node.rest()
    (held,) = node.replicas()
    (place,) = held.images.values()
    held.images["g0-0"] = replace(place, seal=replace(place.seal, digest="another"))
    with node.state.lock:
        node.replicator._queue(0, RESUMED, {0: [node.table[0]]})
    node.rest()
    assert Peer.pulled == [(RESUMED, "g0-0")] * 2


# --- what cannot be had


def test_a_pull_that_waits_too_long_is_an_alarm_and_one_line_of_the_log(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(replicate, "time", SimpleNamespace(monotonic=lambda: now.s, perf_counter=time.perf_counter))
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    for step in (1, 2):
        node.replicate(Version(1, step))
    for held in node.replicas():
        held.pins["sending"] += 1
    node.hear(Kind.CAPTURED, Version(1, 3))
    for _ in range(TICKS):
        node.tick()
        now.s += FIRST_PATIENCE_S / TICKS
    assert not node.state.alarms.raised
    (said,) = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert said.startswith(f"{Version(1, 3)} waits: no replica slot of rank 0 is free")
    for _ in range(TICKS):
        now.s += 1.0
        node.tick()
    assert node.state.alarms.raised["replica of node 0"].text.startswith(f"no replica of {Version(1, 3)}, which waits")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    node.hear(Kind.CAPTURED, Version(1, 4))
    node.rest()
    assert node.state.alarms.raised["replica of node 0"].text.startswith(f"no replica of {Version(1, 4)}, which waits")
    for held in node.replicas():
        held.unpin("sending")
    node.tick()
    assert not node.state.alarms.raised
    node.hear(Kind.REPLICATED, Version(1, 4))
    node.goes_on(Version(1, 5))


def test_a_replica_is_kept_while_another_node_is_still_sent_its_own(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow line nodes are done seconds apart, and a whole transfer would have been in vain."""
    monkeypatch.setattr(replicate, "GRACE_S", 0.0)
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    node.replicate(Version(1, 0))
    stands, newer = Version(1, 1), Version(1, 2)
    node.hear(Kind.CAPTURED, stands)
    node.rest()
    node.hear(Kind.SENDING, stands)
    node.hear(Kind.CAPTURED, newer)
    for _ in range(TICKS):
        node.tick()
    assert not node.state.need_ledger().reports().dropped
    monkeypatch.setattr(overwrite_guard, "SIGN_S", 0.0)
    node.tick()
    assert node.state.need_ledger().reports().dropped == (stands,)


def test_a_pull_that_the_system_refuses_is_told_and_tried_again(make_node: MakeNode) -> None:
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    broken_once("hello", "", OSError(24, "Too many open files"))
    node.hear(Kind.CAPTURED, RESUMED)
    node.rest()
    assert "Too many open files" in node.state.alarms.raised["replica of node 0"].text
    node.tick()
    assert node.slots() == [(RESUMED, ["g0-0"])]
    assert not node.state.alarms.raised


def test_a_replica_for_which_no_descriptor_is_left_is_told_and_tried_again(make_node: MakeNode) -> None:
    node = make_node()
    node.assemble(1)
    node.state.resume(1, None)
    broken_once("read", "g0-0", KeeperLost("the connection broke"))
    node.hear(Kind.CAPTURED, Version(1, 3))
    node.rest()  # the puller's thread has begun, and opened what it needs
    for held in node.replicas():
        node.state.slot_pool.drop(held)
    with without_descriptors(os.getpid()):
        node.replicator.tick()
        eventually(lambda: node.replicator.idle)
    assert "open files" in node.state.alarms.raised["replica of node 0"].text
    node.tick()
    assert node.slots() == [(Version(1, 3), ["g0-0"])]
    assert not node.state.alarms.raised


# --- real keepers


def test_a_restore_in_the_middle_of_a_pull_costs_no_later_replica(make_rig: Callable[..., Rig]) -> None:
    """The pull of the past is refused, the clock repeats it, and the refill asks before it has ended."""
    rig = make_rig(num_nodes=2)
    rig.hurtable(1)
    trainers = rig.start()
    for step in (1, 2):
        reached(trainers, save_all(trainers, step), Level.REPLICATED)
    rig.hurt(1, "stall@receive")
    version = save_all(trainers, 3)
    reached(trainers, version, Level.CAPTURED)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)
    back = [rig.trainer(rank) for rank in range(2)]
    assembly = rig.assembly()
    for trainer in back:
        trainer.join(assembly)
    time.sleep(0.6)
    rig.hurt(1, "")
    time.sleep(0.05)
    rig.hurt(1, "stall@receive")
    back[1].client.resume(rig.incarnation, version)
    time.sleep(0.3)
    rig.hurt(1, "")
    back[0].client.resume(rig.incarnation, version)
    time.sleep(0.5)
    newer = save_all(back, 100)
    reached(back, newer, Level.REPLICATED, 4.0)
