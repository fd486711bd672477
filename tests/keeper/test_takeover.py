"""Representatives that fail in every way while they write, and who finishes for them; real keepers, real files."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import CorruptError
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Topology, Version
from holdfast.core.rank_runs import spread
from holdfast.core.versions import writer_failover
from holdfast.core.versions.coordinator_board import Announcement, Kind, WriteFailure
from holdfast.core.versions.node_ledger import Reports, Standing
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.coordination.coordinator_client import ANSWER_TIMEOUT_S, DIAL_TIMEOUT_S
from holdfast.keeper.observe.metrics import render
from holdfast.keeper.rpc import announcements
from holdfast.keeper.rpc.messages import Assembly
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.keeper.storage import writer
from holdfast.keeper.storage.writer import SIGN_S
from holdfast.keeper.storage.writer_failover import WriteAttempt, WriterFailover
from holdfast.testing.checks.corrupt import damage_memory
from keeper.rig import Rig, Trainer, eventually, image_of, reached, save_all
from sample_kit import sampled

MakeRig = Callable[..., Rig]


def hurt_rig(make_rig: MakeRig, num_nodes: int, **options: object) -> tuple[Rig, list[Trainer]]:
    """A job whose keepers can be hurt, with one version captured everywhere."""
    rig = make_rig(num_nodes=num_nodes, **options)
    for node in range(num_nodes):
        rig.hurtable(node)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 0), Level.REPLICATED)
    return rig, trainers


def proven(rig: Rig, version: Version) -> None:
    """Exactly one commit, complete, and every byte of it right."""
    assert version in rig.storage.versions()
    manifest = rig.storage.manifest(version)
    for file in manifest.bundles:
        rig.storage.bundles.verify(version, file)
    expected = {b.bundle_id: b for rank in range(rig.topology.world_size) for b in rig.trainer_bundles(rank)}
    assert {file.ref.bundle_id for file in manifest.bundles} == set(expected)
    for file in manifest.bundles:
        path = rig.base / "ck" / str(version) / file.file
        assert path.read_bytes() == image_of(expected[file.ref.bundle_id], version.step)
    refs = [file.ref for file in manifest.bundles]
    assert len(manifest.parts) == len(writer_failover.parts(refs, rig.topology))
    names = {path.name for path in (rig.base / "ck" / str(version)).iterdir()}
    assert names == {"manifest.json", *manifest.parts, *(file.file for file in manifest.bundles)}


def takeovers(rig: Rig, nodes: tuple[int, ...]) -> float:
    return sum(rig.status(node)["counters"].get("takeovers", 0) for node in nodes)


@pytest.mark.parametrize("wrong", sampled(["ENOSPC@write", "EIO@fsync", "EIO@rename"], "ENOSPC@write"))
def test_a_successor_writes_what_its_representative_cannot(make_rig: MakeRig, wrong: str) -> None:
    rig, trainers = hurt_rig(make_rig, 2)
    rig.hurt(1, wrong)

    version = save_all(trainers, 1, durable=True)

    reached(trainers, version, Level.DURABLE)
    proven(rig, version)
    assert takeovers(rig, (0,)) >= 1
    (line,) = (line for line in render([rig.status(0) | {"job": "j"}]).splitlines() if "takeovers_total{" in line)
    assert float(line.split()[-1]) >= 1, "Prometheus reads it too"
    assert any(version_alarm["key"] == "storage" for version_alarm in rig.status(1)["alarms"])
    rig.hurt(1, "")
    again = save_all(trainers, 2, durable=True)
    reached(trainers, again, Level.DURABLE)
    proven(rig, again)


def test_a_copy_that_went_bad_is_written_from_another_node(make_rig: MakeRig) -> None:
    """A byte of its slot changes before it is written: no file gets the name, an alarm says so, the replica is written."""
    rig, trainers = hurt_rig(make_rig, 2)
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    assert damage_memory([trainers[1].client.welcome.pid]) == version

    trainers[0].client.persist(version)

    reached(trainers, version, Level.DURABLE)
    proven(rig, version)
    assert takeovers(rig, (0,)) >= 1
    alarms = {alarm["key"].split()[0]: alarm["text"] for alarm in rig.status(1)["alarms"]}
    assert "differs from its seal" in alarms["quarantine"]
    assert f"{version} is not durable" in alarms["storage"]
    bad = {ref.bundle_id for ref in trainers[1].layout.bundles if len(ref.ranks) == 1}
    held = {
        (node, copy.seal.bundle_id)
        for copy in trainers[0].client.inventory().copies
        if copy.version == version
        for node in spread(copy.nodes)
    }
    assert not {(1, name) for name in bad} & held, "nobody is offered the bad copy"
    assert {(0, name) for name in bad} <= held


def test_a_killed_representative_is_succeeded_and_the_second_one_too(make_rig: MakeRig) -> None:
    """Node 0 coordinates as well; node 1 fails when it takes over; node 2 finishes. Replicas make it possible."""
    rig, trainers = hurt_rig(make_rig, 3)
    shared = next(b for b in trainers[0].bundles if len(b.ranks) == 3)
    ref = trainers[0].layout.bundles[trainers[0].bundles.index(shared)]
    ((first, second, third),) = [part.line for part in writer_failover.parts([ref], rig.topology)]
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    rig.hurt(first, "kill@persist")
    rig.hurt(second, "ENOSPC@write")

    left = [trainer for trainer in trainers if trainer.node != first]
    left[0].client.persist(version)

    written = rig.base / "ck" / str(version)
    eventually(lambda: list(written.glob(f"{shared.bundle_id}-*")), timeout_s=20)  # only the third can have
    assert takeovers(rig, (third,)) >= 1
    rig.hurt(second, "")
    reached(left, version, Level.DURABLE, timeout_s=20)
    proven(rig, version)


def test_a_frozen_representative_is_succeeded_and_changes_nothing_when_it_wakes(make_rig: MakeRig) -> None:
    rig, trainers = hurt_rig(make_rig, 2)
    frozen = trainers[1].client.welcome.pid
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    rig.hurt(1, "stop@rename")
    trainers[0].client.persist(version)

    reached(trainers[:1], version, Level.DURABLE, timeout_s=20)
    proven(rig, version)
    before = {path: path.stat().st_mtime_ns for path in (rig.base / "ck" / str(version)).glob("manifest.json")}
    os.kill(frozen, signal.SIGCONT)
    reached(trainers, version, Level.DURABLE)
    again = save_all(trainers, 2, durable=True)
    reached(trainers, again, Level.DURABLE)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    proven(rig, version)
    proven(rig, again)


def test_nobody_gives_up_a_version_that_is_tried_again_behind_a_newer_one(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one waited for storage already when the write failed, and is durable first."""
    monkeypatch.setattr(announcements, "PASSED_S", 1.8)
    rig, trainers = hurt_rig(make_rig, 2)
    for node in (0, 1):
        rig.hurt(node, "stall@persist")
    older = save_all(trainers, 1, durable=True)
    reached(trainers, older, Level.CAPTURED)
    newer = save_all(trainers, 2, durable=True)
    reached(trainers, newer, Level.CAPTURED)
    in_the_way = rig.base / "ck" / str(older)
    in_the_way.write_text("")
    for node in (0, 1):
        rig.hurt(node, "")
    reached(trainers, newer, Level.DURABLE)
    threading.Timer(2.5, in_the_way.unlink).start()
    reached(trainers, older, Level.DURABLE)
    proven(rig, older)


def test_all_nodes_hear_that_work_goes_on_with_what_is_older_than_a_durable_version() -> None:
    """And its ranks with them; of other work only those in line hear, who would take it over."""
    told: dict[int, list[bytes]] = {node: [] for node in range(4)}
    topology = Topology(tuple("abcd"), (0, 1, 2, 3))

    def lead(before: Version | None) -> Coordinator:
        state: Any = SimpleNamespace(hear=lambda _: None, ledger=SimpleNamespace(newest=lambda _: before))
        coordinator = Coordinator(state, SimpleNamespace(), Assembly(1, "/ck", "job", topology, ()))  # type: ignore[arg-type]
        for node, bodies in told.items():
            coordinator.join(node, SimpleNamespace(send_encoded=bodies.append))  # type: ignore[arg-type]
        return coordinator

    def heard(coordinator: Coordinator, version: Version) -> int:
        before = sum(map(len, told.values()))
        coordinator._announce(Announcement(Kind.AT_WORK, version, "node 1 is writing", node=1))
        return sum(map(len, told.values())) - before

    first = lead(None)
    assert heard(first, Version(1, 1)) == 0
    first._announce(Announcement(Kind.DURABLE, Version(1, 2), "the manifest is committed"))
    assert heard(first, Version(1, 3)) == heard(first, Version(1, 2)) == 0
    assert heard(first, Version(1, 1)) == len(told)
    assert heard(first, Version(1, 1)) == 0, "once in a second"
    assert heard(lead(Version(1, 2)), Version(1, 1)) == len(told), "it led not yet when the newer one became durable"
    restarted = lead(None)
    restarted._announce(Announcement(Kind.CAPTURED, Version(1, 2), "all ranks sealed it"))
    assert heard(restarted, Version(1, 1)) == len(told), "others know that the newer one is durable"


def test_a_version_is_not_given_up_before_the_next_writer_in_line_begins() -> None:
    """A writer that freezes gives no sign; who waits hears nothing until another one has taken over, on any node."""
    found_s = ANSWER_TIMEOUT_S + DIAL_TIMEOUT_S + 2 * SIGN_S
    assert writer_failover.LEASE_S + found_s < announcements.PASSED_S


@pytest.mark.parametrize(
    "where", [*(pytest.param(where, marks=pytest.mark.slow) for where in ("announce", "part")), "commit"]
)
def test_commits_go_on_when_the_coordinator_is_killed(make_rig: MakeRig, where: str) -> None:
    """It dies with its node: nobody adopts its slots, and nobody repeats what its rank reported."""
    rig, trainers = hurt_rig(make_rig, 2)
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    rig.hurt(0, f"kill@{where}")
    trainers[1].client.persist(version)

    reached(trainers[1:], version, Level.DURABLE, timeout_s=20)

    proven(rig, version)


def test_storage_that_fails_for_everybody_is_an_alarm_and_the_newest_version_follows(make_rig: MakeRig) -> None:
    rig, trainers = hurt_rig(make_rig, 2)
    for node in (0, 1):
        rig.hurt(node, "EIO@write")
    for step in range(1, 8):
        version = save_all(trainers, step, durable=True)
        reached(trainers, version, Level.REPLICATED)
        eventually(lambda: all("storage" in {a["key"] for a in rig.status(n)["alarms"]} for n in (0, 1)))

    eventually(lambda: any("unserviceable" in alarm for alarm in trainers[0].client.announced.alarms))
    assert rig.storage.versions() == []
    for node in (0, 1):
        rig.hurt(node, "")

    reached(trainers, version, Level.DURABLE, timeout_s=40)
    proven(rig, version)
    # A node whose bytes another one wrote by now has not seen storage serve; it does with what it writes next.
    reached(trainers, save_all(trainers, 8, durable=True), Level.DURABLE)
    eventually(lambda: not any(a["key"] == "unserviceable" for n in (0, 1) for a in rig.status(n)["alarms"]))


@pytest.mark.parametrize(
    "state",
    sampled([{"per_node": 2, "own_bytes": 2 << 20}, {"shared_rows": 6 << 10}], {"shared_rows": 6 << 10}),
    ids=["of its own", "of what all hold"],
)
def test_every_node_writes_its_share_of_one_complete_copy(make_rig: MakeRig, state: dict[str, int]) -> None:
    rig = make_rig(num_nodes=3, **state)
    trainers = rig.start()
    version = save_all(trainers, 1, durable=True)
    reached(trainers, version, Level.DURABLE)

    written = [rig.status(node)["counters"]["storage_written_bytes"] for node in range(3)]

    proven(rig, version)
    assert sum(written) == rig.storage.manifest(version).num_bytes
    assert max(written) <= 1.1 * sum(written) / 3
    assert takeovers(rig, (0, 1, 2)) == 0


def test_parts_are_determined_by_the_table(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3, per_node=2)
    refs = [ref for rank in range(6) for ref in Trainer.layout_of(rig, rank).bundles]
    table = list({ref.bundle_id: ref for ref in refs}.values())

    parts = writer_failover.parts(table, rig.topology)

    assert parts == writer_failover.parts(reversed(table), rig.topology)
    assert Counter(ref.bundle_id for part in parts for ref in part.refs) == Counter(ref.bundle_id for ref in table)
    assert all(len(set(part.line)) == len(part.line) >= 2 for part in parts)


def test_who_cannot_write_says_so_and_the_next_in_line_begins_without_waiting_for_silence() -> None:
    version, told, queued = Version(1, 4), [], []
    parts = tuple(
        writer_failover.Part(index, (1, 0), (BundleRef(f"b{index}", (0, 1), 0, 1, 8, ""),)) for index in (0, 2)
    )
    ledger = SimpleNamespace(incarnation=1, bundles_of=lambda _: SimpleNamespace(parts=parts))

    def failover(node: int) -> WriterFailover:
        state = SimpleNamespace(
            node=node,
            ledger=ledger,
            need_ledger=lambda: ledger,
            slot_pool=_Found(),
            callbacks=SimpleNamespace(report=told.append),
        )
        made = WriterFailover(state, Events(), queued.append)
        made.begin()
        made.hear(Announcement(Kind.PERSIST, version, ""))
        return made

    first, second = failover(1), failover(0)
    (writing,) = queued
    first.failed(writing.order, "no space is left")
    assert told == [Reports(failures=(WriteFailure(version, (0, 2), "no space is left", gone=True),))]
    second.hear(Announcement(Kind.FAILED, version, "no space is left", node=1, parts=(0, 2)))
    (after,) = queued[1:]
    assert after.order == writer_failover.Order(version, parts, 1, "node 1 is out: no space is left")


def test_what_is_written_from_stays_until_every_order_that_needs_it_is_done() -> None:
    """One order of a version ends while another one of it still waits: its slots must not be given to a newer version."""
    version = Version(1, 4)
    queued: list[WriteAttempt] = []
    own, replica, other = (HeldSlot(None, rank, rank > 0) for rank in (0, 1, 2))
    for held, name in ((own, "mine"), (replica, "theirs"), (other, "nobody's")):
        held.state, held.version, held.images = SlotState.SEALED, version, {name: None}
    state = SimpleNamespace(
        slot_pool=_Found([own, replica, other]),
        ledger=SimpleNamespace(incarnation=1, standing=lambda _: Standing(frozenset(), "", abandoned=False, due=True)),
        unpin=lambda held, why: held.unpin(why),
    )
    failover = WriterFailover(state, Events(), queued.append)
    orders = [
        writer_failover.Order(
            version, (writer_failover.Part(index, (0,), (BundleRef(name, (0,), 0, 1, 8, ""),)),), term, ""
        )
        for index, (name, term) in enumerate((("mine", 0), ("theirs", 1)))
    ]
    for order in (*orders, orders[1]):
        failover.again(order)
    assert [writing.order for writing in queued] == [*orders, orders[1]]

    failover.done(queued[0])
    failover.done(queued[0])  # doing it twice is doing it once
    assert (own.pins.total(), replica.pins.total(), other.pins.total()) == (0, 2, 0)
    failover.done(queued[1])
    assert replica.pins.total() == 1
    failover.done(queued[2])
    assert replica.pins.total() == 0


def test_what_may_have_to_be_taken_over_stays_until_a_save_finds_no_other_slot() -> None:
    """Another node writes first; this one keeps its own copy meanwhile, and its replica is kept by other rules."""
    version, queued = Version(1, 4), []
    own, replica, newer = (HeldSlot(None, rank, rank == 1) for rank in (0, 1, 0))
    for held in (own, replica, newer):
        held.state, held.version, held.images = SlotState.SEALED, version, {"shared": None}
    newer.version = Version(1, 5)
    part = writer_failover.Part(0, (1, 0), (BundleRef("shared", (0, 1), 0, 1, 8, ""),))
    ledger = SimpleNamespace(incarnation=1, bundles_of=lambda _: SimpleNamespace(parts=(part,)))
    slot_pool = _Found([own, replica, newer])
    state = SimpleNamespace(
        node=0, slot_pool=slot_pool, need_ledger=lambda: ledger, unpin=lambda held, why: held.unpin(why)
    )
    failover = WriterFailover(state, Events(), queued.append)
    failover.begin()

    def pins() -> list[int]:
        return [held.pins.total() for held in (own, replica, newer)]

    failover.hear(Announcement(Kind.PERSIST, version, ""))
    assert (pins(), queued) == ([1, 0, 0], [])
    failover.hear(Announcement(Kind.DURABLE, version, ""))
    assert pins() == [0, 0, 0]

    failover.hear(Announcement(Kind.PERSIST, version, ""))
    assert failover.yield_slots(0), "a save waits"
    assert pins() == [0, 0, 0]
    assert not failover.yield_slots(0)


class _Found(list):
    def find(self, version: Version, bundle_id: str) -> object:
        return next(((held, held.images[bundle_id]) for held in self if bundle_id in held.images), None)

    def of_rank(self, rank: int) -> list[HeldSlot]:
        return [held for held in self if held.rank == rank and not held.replica]


def test_an_order_whose_replica_is_on_its_way_is_tried_until_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that keeps the replica takes over from one whose mount is broken, before the bytes have come."""
    version, clock = Version(1, 4), SimpleNamespace(now=100.0)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    held = HeldSlot(None, 0, True)
    held.state, held.version, held.images = SlotState.SEALED, version, {}
    standing = Standing(frozenset(), "", abandoned=False, due=True)
    state = SimpleNamespace(
        slot_pool=_Found([held]),
        ledger=SimpleNamespace(incarnation=1, standing=lambda _: standing),
        lock=threading.RLock(),
        changed=lambda: None,
        alarms=SimpleNamespace(warn=lambda *_: None),
        callbacks=SimpleNamespace(report=lambda _: None),
    )
    queued: list[WriteAttempt] = []
    persister = writer.Persister(state, SimpleNamespace(), Events(), SimpleNamespace(), None)  # type: ignore[arg-type]
    persister._failover = WriterFailover(state, Events(), queued.append)
    part = writer_failover.Part(0, (1, 0), (BundleRef("theirs", (0,), 0, 1, 8, ""),))
    order = writer_failover.Order(version, (part,), 1, "node 1 is out")
    try:
        persister._again.failed(order, CorruptError("no good copy of it is held here"))
        for _ in range(5):
            clock.now += writer.MAX_PAUSE_S
            persister.tick()
        assert not queued
        held.images = {"theirs": None}
        clock.now += writer.MAX_PAUSE_S
        persister.tick()
        assert [attempt.order for attempt in queued] == [order]
        held.images, standing = {}, replace(standing, passed=True)
        persister._again.failed(order, CorruptError("no good copy of it is held here"))
        clock.now += writer.MAX_PAUSE_S
        persister.tick()
        assert persister._again.pending is None, "a newer version is durable: those that wait are told so"
    finally:
        persister.stop()


@pytest.mark.parametrize("who", ["persister", "committer"])
def test_a_fault_that_is_not_of_storage_is_told_and_tried_again(who: str) -> None:
    """No thread can be started for a moment, as under a limit of processes."""
    version, told = Version(1, 4), []

    def fails(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    state = SimpleNamespace(
        lock=threading.RLock(), changed=lambda: None, assembly=None,
        alarms=SimpleNamespace(warn=lambda _, text: told.append(text), calm=lambda _: None),
    )  # fmt: skip
    failover = SimpleNamespace(failed=lambda *_: told.append("next in line"), done=lambda _: None)
    order = writer_failover.Order(version, (), 0, "")
    if who == "persister":
        made = writer.Persister(state, SimpleNamespace(), Events(), SimpleNamespace(), failover)  # type: ignore[arg-type]
        made._write = fails  # type: ignore[method-assign]
        made._persist(WriteAttempt(order))
        assert "next in line" in told
    else:
        made = writer.Committer(state, SimpleNamespace(open=fails), Events())  # type: ignore[arg-type,assignment]
        job = SimpleNamespace(order=order, done=lambda version, ok: told.append((version, ok)))
        made._commit(job)
        assert (version, False) in told, "the coordinator may order the commit again"
    made.stop()
    assert any("can't start new thread" in str(text) for text in told)
    assert made._again.pending == version
