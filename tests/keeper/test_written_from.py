"""What is written to storage stays as it is from the moment it is found; the parts of a keeper, in one process."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Topology, Version
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.slot_guard import SlotState, reusable
from holdfast.core.versions.writer_failover import Order
from holdfast.keeper.replication.replicator import NotYet, Replicator
from holdfast.keeper.rpc.messages import ImageSpan
from holdfast.keeper.slots import sealer as sealer_module
from holdfast.keeper.slots.idle_windows import Windows
from holdfast.keeper.slots.job_queue import Worker
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import Activities
from holdfast.keeper.slots.sealer import Sealer
from holdfast.keeper.slots.slot_pool import HeldSlot, SlotPool
from holdfast.keeper.slots.twin_diff import TwinExaminer
from holdfast.keeper.storage.writer import Persister
from holdfast.keeper.storage.writer_failover import WriteAttempt, WriterFailover
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.slots import ImagePlace
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import Storage, open_storage

NUM_BYTES = 3 * image_format.CHUNK_BYTES
REFS = tuple(BundleRef(f"r{rank}", (rank,), 0, 1, NUM_BYTES, "f") for rank in (0, 1))
V, V1, V2 = (Version(1, step) for step in (4, 5, 6))


def nothing(*_: object, **__: object) -> None:
    return None


@dataclass
class Node:
    """Node 1 of two, one rank on each: it represents bundle r1 and is the backup of r0."""

    storage: Storage
    queue: list[WriteAttempt] = field(default_factory=list)
    reports: list[Reports] = field(default_factory=list)

    def __post_init__(self) -> None:
        budget = SimpleNamespace(reserve=nothing, came=nothing, release=nothing, close=nothing)
        self.slot_pool = SlotPool(budget)
        self.state = NodeState(SimpleNamespace(node="b", job="j"), self.slot_pool)
        self.ledger = NodeLedger(node=1, topology=Topology(("a", "b"), (0, 1)), incarnation=1, lineage=Lineage())
        self.ledger.resume(None)
        self.ledger.tables.learn("L", REFS)
        self.state.node, self.state.ledger = 1, self.ledger
        self.state.assembly = SimpleNamespace(job_id=self.storage.job_id(), incarnation=1)
        callbacks = ("push", "replicate", "writing", "began", "examine", "follow", "changed")
        self.state.callbacks = SimpleNamespace(report=self.reports.append, **dict.fromkeys(callbacks, nothing))
        events, lazy_storage = Events(), SimpleNamespace(open=lambda: self.storage, events=Events())
        self.failover = WriterFailover(self.state, events, self.queue.append)
        self.failover.begin()
        self.persister = Persister(self.state, lazy_storage, events, Activities(self.state), self.failover)
        self.replicator = Replicator(self.state, events, nothing)

    def hold(self, version: Version, rank: int, byte: int, *, replica: bool = False) -> HeldSlot:
        """A slot into which a bundle is being written; `arrive` seals it."""
        held = self.slot_pool.add(self.slot_pool.allocate(NUM_BYTES, "a test"), rank, replica=replica)
        held.start(version, layout="L", durable=True)
        held.slot.view[:NUM_BYTES] = bytes([byte]) * NUM_BYTES
        return held

    def arrive(self, held: HeldSlot) -> ImagePlace:
        ref = REFS[held.rank]
        place = ImagePlace(ref, 0, image_format.seal(ref.bundle_id, held.slot.view[:NUM_BYTES]))
        held.images, held.state = {ref.bundle_id: place}, SlotState.SEALED
        return place

    def tell(self, version: Version, *kinds: Kind) -> None:
        for kind in kinds:
            news = Announcement(kind, version, "", "L")
            self.ledger.told(news)
            if kind is Kind.PERSIST:
                self.failover.hear(news)

    @property
    def written(self) -> set[str]:
        return {name for report in self.reports for part in report.parts for name in part.bundle_ids}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    storage = open_storage(tmp_path / "root", Events())
    storage.claim()
    storage.incarnations.register()
    made = Node(storage)
    yield made
    made.persister.stop()
    made.slot_pool.close()


def takes_over(node: Node) -> tuple[HeldSlot, ImagePlace]:
    """Node 0 fails at once, so the order to write r0 waits before the replica is here; then it arrives."""
    node.arrive(node.hold(V, 1, 1))
    theirs = node.hold(V, 0, 2, replica=True)
    node.tell(V, Kind.CAPTURED, Kind.PERSIST)
    (part,) = (part for part in node.ledger.bundles_of(V).parts if part.line[0] == 0)
    node.failover.hear(Announcement(Kind.FAILED, V, "read-only file system", node=0, parts=(part.index,)))
    assert [writing.order.term for writing in node.queue] == [0, 1]
    place = node.arrive(theirs)
    node.ledger.replicated(V, ["r0"])
    node.tell(V, Kind.REPLICATED)
    # A newer version is replicated meanwhile, so that nothing but a pin keeps the older one.
    newer = node.hold(V1, 0, 3, replica=True)
    node.arrive(newer)
    node.tell(V1, Kind.CAPTURED, Kind.REPLICATED)
    return theirs, place


def while_written(node: Node, bundle_id: str, act: Callable[[], None]) -> None:
    """Does `act` once, in the middle of the write of a bundle's file."""
    real, acted = node.storage._backend.put, []

    def put(name: str, chunks: Any, *, stamp: str, progress: Callable[[int], None] = nothing) -> None:
        def moved(num_bytes: int) -> None:
            progress(num_bytes)
            if f"/{bundle_id}-" in name and not acted:
                acted.append(name)
                act()

        real(name, chunks, stamp=stamp, progress=moved)

    node.storage._backend.put = put  # type: ignore[method-assign]


def test_a_replica_that_arrives_late_is_pinned_while_written(node: Node) -> None:
    """Its order was queued before it was here. The next pull asks for a slot in the middle of the write."""
    theirs, place = takes_over(node)
    refused: list[str] = []

    def pull() -> None:
        with node.state.lock, pytest.raises(NotYet) as caught:
            node.replicator._reuse(0, V2, NUM_BYTES)
        refused.append(caught.value.what)

    while_written(node, "r0", pull)
    for writing in node.queue:
        node.persister._persist(writing)

    assert len(refused) == 1
    assert f"is in use ({V})" in refused[0]
    assert node.written == {"r0", "r1"}
    node.storage.bundles.verify(V, BundleFile.of(REFS[0], place.seal))
    assert theirs.pins.total() == 0, "it is free again"
    assert node.replicator._reuse(0, V2, NUM_BYTES) is theirs


def test_bytes_that_change_in_a_pinned_slot_are_not_reported(node: Node) -> None:
    """The second line: whatever changed them. The file gets no name, and the copy is offered to nobody any more."""
    theirs, place = takes_over(node)

    def spoil() -> None:
        theirs.slot.view[NUM_BYTES - 1] ^= 1

    while_written(node, "r0", spoil)
    for writing in node.queue:
        node.persister._persist(writing)

    assert node.written == {"r1"}
    (failure,) = (failure for report in node.reports for failure in report.failures)
    assert failure.gone
    assert "chunk 2 of image r0" in failure.reason
    root = Path(node.storage.where)
    assert [path.name for path in root.rglob("*") if "r0" in path.name] == []
    assert list((root / ".tmp").iterdir()) == []
    keys = set(node.state.alarms.raised)
    assert keys == {"storage", f"quarantine {V} r0 node b"}
    assert node.slot_pool.find(V, "r0") is None
    assert node.slot_pool.find(V1, "r0") is not None, "the same bundle of another version is as good as before"
    assert place.seal.bundle_id == "r0"


def test_what_waits_for_a_job_that_is_over_is_unpinned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper takes up another job only when nothing is pinned any more; who does what was dropped would never unpin."""
    monkeypatch.setattr(Worker, "_add", lambda worker, job: worker._jobs.append(job))  # all wait, nobody works
    node.state.layouts = {1: SimpleNamespace(bundles=(REFS[1],))}
    sealer, examiner = Sealer(node.state, Events(), SimpleNamespace()), TwinExaminer(node.state)
    own, copied = node.hold(V, 1, 1), node.hold(V1, 1, 1)
    node.arrive(own)
    with node.state.lock:
        node.tell(V, Kind.CAPTURED, Kind.PERSIST)
        node.persister.put(node.queue[0])
        sealer.put(copied, V1, [ImageSpan(REFS[1], 0, NUM_BYTES)])
        examiner.put(V, "r1")
    assert set(own.pins) == {"persisting", "examined"}
    assert set(copied.pins) == {"sealing"}

    with node.state.lock:
        for part in (node.persister, sealer, examiner):
            part.leave()

    assert not own.pins
    assert not copied.pins


@pytest.mark.parametrize(("num_threads", "num_allowed"), [(1, 0), (3, 3), (3, 0), (3, 1)])
def test_a_version_that_several_threads_hash_gets_the_seal_of_one(
    node: Node, num_threads: int, num_allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a container may start no more threads than it has."""
    start, num_started = threading.Thread.start, itertools.count()

    def bounded(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast hashes") and next(num_started) >= num_allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", bounded)
    monkeypatch.setattr(sealer_module, "share_of_cores", lambda **_: num_threads)
    sealed = threading.Event()
    node.state.layouts = {1: SimpleNamespace(bundles=(REFS[1],))}
    node.state.callbacks.changed = sealed.set
    windows = Windows(shown=lambda _: None, listen=nothing, wanted=lambda _: False, stay=nothing)
    sealer, held = Sealer(node.state, Events(), windows), node.hold(V, 1, 0)
    held.slot.view[:NUM_BYTES] = random.Random(7).randbytes(NUM_BYTES)
    try:
        with node.state.lock:
            sealer.put(held, V, [ImageSpan(REFS[1], 0, NUM_BYTES)])
        assert sealed.wait(60)
    finally:
        sealer.stop()
    assert held.state is SlotState.SEALED
    assert held.images["r1"].seal == image_format.seal("r1", held.slot.view[:NUM_BYTES])
    assert len(held.images["r1"].seal.chunk_digests) == 3


def test_a_version_that_cannot_be_sealed_is_abandoned(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: the other ranks would wait for it, and the slot would never be free again."""
    ended = threading.Event()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(image_format, "seal", fail)
    node.state.layouts = {1: SimpleNamespace(bundles=(REFS[1],))}
    windows = Windows(shown=lambda _: None, listen=nothing, wanted=lambda _: False, stay=nothing)
    sealer, held = Sealer(node.state, Events(), windows), node.hold(V, 1, 0)
    monkeypatch.setattr(sealer._worker, "_on_fault", lambda _: ended.set())
    try:
        with node.state.lock:
            sealer.put(held, V, [ImageSpan(REFS[1], 0, NUM_BYTES)])
        assert ended.wait(60)
    finally:
        sealer.stop()
    assert held.state is SlotState.EMPTY
    assert not held.pins


def test_an_order_pins_each_slot_once(node: Node) -> None:
    own = node.hold(V, 1, 1)
    node.arrive(own)
    writing = WriteAttempt(Order(V, (), 0, ""))
    for _ in range(3):
        writing.find(node.slot_pool, REFS[1])
    assert own.pins.total() == 1
    assert not reusable(own.view, node.ledger.knowledge).value
    node.failover.done(writing)
    assert own.pins.total() == 0


def test_a_directory_that_is_replaced_during_a_write_gets_no_part(node: Node, tmp_path: Path) -> None:
    """Another job began anew at the path while a bundle was written, which took minutes."""
    node.arrive(node.hold(V, 1, 1))
    node.tell(V, Kind.CAPTURED, Kind.PERSIST)

    def replaced() -> None:
        (tmp_path / "root").rename(tmp_path / "away")
        open_storage(tmp_path / "root", Events()).claim()

    while_written(node, "r1", replaced)
    node.persister._persist(node.queue[0])

    assert node.written == set()
    assert "belongs to job" in node.state.alarms.raised["storage"].text
    assert list((tmp_path / "root").glob("*/manifest-*.json")) == []
