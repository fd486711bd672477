"""Parity instead of replicas, with real keepers: any one node of a group may go, in any phase."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from holdfast.base.errors import CorruptError, HoldfastError, LevelNotReached
from holdfast.core.layout.bundles import plan_bundles
from holdfast.core.model import Bundle, Extent, Level, Shard, Version
from holdfast.core.rank_runs import spread
from holdfast.core.recovery.parity_choice import REBUILT
from holdfast.core.recovery.version_choice import Choice, Quarantine, Source, choose_version, fetches
from holdfast.testing.checks.evidence import slot_descriptors, slot_header
from holdfast.testing.faults import rig as rig_module
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.memory.processes import start_time
from keeper.rig import Rig, Trainer, eventually, image_of, reached, save_all
from kit.nodes import facts_of, reborn, restored
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]
MIB = 1 << 20
NUM_NODES = 4
FOUR = {"num_nodes": NUM_NODES, "redundancy": f"parity:{NUM_NODES}"}
PARITY_RANK = -1


def replicate(trainers: Sequence[Trainer], steps: Sequence[int]) -> Version:
    for step in steps:
        version = save_all(trainers, step)
        reached(trainers, version, Level.REPLICATED)
    return version


def pid_of(trainers: Sequence[Trainer], node: int) -> int:
    return next(trainer for trainer in trainers if trainer.node == node).client.welcome.pid


def lose(trainers: Sequence[Trainer], *nodes: int) -> None:
    """The nodes' keepers are killed, and all trainers leave."""
    for node in nodes:
        os.kill(pid_of(trainers, node), signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()


def come_back(rig: Rig, newest: Version) -> list[Trainer]:
    rig.next_incarnation(newest)
    return [reborn(rig, rank) for rank in range(rig.topology.world_size)]


def go_on(rig: Rig, back: Sequence[Trainer], version: Version, step: int) -> None:
    """What came back saves and is protected again."""
    for trainer in back:
        trainer.client.resume(rig.incarnation, version)
    replicate(back, [step])


@pytest.mark.parametrize("lost", sampled(range(NUM_NODES), 3))
def test_any_one_of_four_nodes_comes_back_from_parity(make_rig: MakeRig, lost: int) -> None:
    rig = make_rig(**FOUR, per_node=2, own_bytes=3 * 4096 + 1024 * lost)
    trainers = rig.start()
    version = replicate(trainers, range(3))
    lose(trainers, lost)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    for trainer in back:
        found, sources = restored(trainer, facts)
        assert found == version
        assert set(sources.values()) == ({Source.PEER, Source.PARITY} if trainer.node == lost else {Source.SLOT})
    go_on(rig, back, version, 3)


PHASES = {
    "before it is captured": "begin",
    "while it seals": "seal",
    "while it makes parity": "parity",
    "while others pull": "send",
}


@pytest.mark.parametrize(
    ("lost", "phase"),
    sampled(product(range(NUM_NODES), PHASES), (0, "while it makes parity"), (2, "while it seals")),
)
def test_a_node_lost_in_any_phase_costs_nothing_that_was_replicated(make_rig: MakeRig, phase: str, lost: int) -> None:
    rig = make_rig(**FOUR, own_bytes=1 << 16)
    victim = rig.hurtable(lost)
    trainers = rig.start()
    replicate(trainers, range(2))
    rig.hurt(lost, f"kill@{PHASES[phase]}")
    for step in (2, 3):  # the slots of the version before are overwritten meanwhile
        for trainer in trainers:
            with contextlib.suppress(HoldfastError):
                trainer.save(step)
        with contextlib.suppress(HoldfastError, AssertionError):
            reached([t for t in trainers if t.node != lost], Version(1, step), Level.REPLICATED, timeout_s=0.5)
    eventually(lambda: start_time(victim) is None or rig.hurt_keepers[0].poll() is not None)
    told = [Version(1, step) for step in range(4)]
    living = trainers[(lost + 1) % NUM_NODES].client.announced
    acknowledged = max(version for version in told if living.level(version)[0] >= Level.REPLICATED)
    for trainer in trainers:
        trainer.client.close()
    rig.hurt(lost, "")

    back = come_back(rig, told[-1])
    facts = facts_of(rig, back[lost].client.inventory())
    found = {restored(trainer, facts)[0] for trainer in back}
    assert len(found) == 1
    assert min(found) >= acknowledged
    go_on(rig, back, *found, 10)


@MORE
def test_a_node_lost_while_all_restore_comes_back_from_parity(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    victim = rig.hurtable(1)
    trainers = rig.start()
    version = replicate(trainers, range(2))
    for trainer in trainers:
        trainer.client.close()
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    rig.hurt(1, "kill@obtain")
    with pytest.raises(HoldfastError):
        restored(back[1], facts)
    eventually(lambda: start_time(victim) is None or rig.hurt_keepers[0].poll() is not None)
    for trainer in back:
        trainer.client.close()
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    assert {restored(trainer, facts)[0] for trainer in back} == {version}
    go_on(rig, back, version, 5)


def test_a_node_that_came_back_gets_its_parity_again_and_another_may_go(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    trainers = rig.start()
    version = replicate(trainers, range(2))
    for lost in (2, 0, 3):  # no save in between: what was resumed from is made whole again
        lose(trainers, lost)
        trainers = come_back(rig, version)
        facts = facts_of(rig, trainers[0].client.inventory())
        assert {restored(trainer, facts)[0] for trainer in trainers} == {version}
        for trainer in trainers:
            trainer.client.resume(rig.incarnation, version, facts.tables[version])
        eventually(partial(_has_all_pieces, trainers[0], version))
    replicate(trainers, [7])


@MORE
@pytest.mark.parametrize(("own_kib", "lost"), sampled([((4, 0, 0, 0), 0), ((0, 4, 4, 0, 0), 2)], ((0, 4, 4, 0, 0), 2)))
def test_a_node_comes_back_though_others_have_nothing_to_keep_parity_of(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, own_kib: tuple[int, ...], lost: int
) -> None:
    """What is called replicated comes back: an empty piece of parity counts as one that is there."""
    monkeypatch.setattr(rig_module, "bundles_of", partial(_uneven, own_kib))
    rig = make_rig(num_nodes=len(own_kib), redundancy="parity:4")
    version = replicate(rig.start(), range(2))
    lose(rig.trainers, lost)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    decision = choose_version(facts)
    assert isinstance(decision.value, Choice), decision.reason
    assert decision.value.version == version
    plan = fetches(decision.value, lost, facts)
    found = {item.ref.bundle_id: item for item in back[lost].client.obtain(version, plan, timeout_s=10)}
    expected = {bundle.bundle_id: image_of(bundle, version.step) for bundle in _uneven(own_kib, rig, lost)}
    assert {name: bytes(item.view) for name, item in found.items()} == expected
    assert {item.source for item in found.values()} == {Source.PEER, Source.PARITY}


def _uneven(own_kib: tuple[int, ...], rig: Rig, rank: int) -> tuple[Bundle, ...]:
    """The bundles of a rank: what all hold, and as much of its own as is said."""
    shards = [Shard("weight", "F32", (1, 512), Extent((0, 0), (1, 512)), tuple(range(len(own_kib))))]
    if rows := own_kib[rank]:
        shards.append(Shard(f"rank{rank}/own", "F32", (rows, 256), Extent((0, 0), (rows, 256)), (rank,)))
    return plan_bundles(shards, values_of=[], topology=rig.topology)


@MORE
def test_pieces_that_were_made_in_another_group_are_not_mixed_with_those_of_now(make_rig: MakeRig) -> None:
    """The job resumes with smaller groups: each node has two pieces of the version, until it saves again."""
    rig = make_rig(num_nodes=6, redundancy="parity:6")
    version = replicate(rig.start(), range(2))
    lose(rig.trainers)
    rig.topology = replace(rig.topology, redundancy="parity:3")
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    for trainer in back:
        trainer.client.resume(rig.incarnation, version, facts.tables[version])
    eventually(lambda: _sizes(back[0], version) == [3] * 6 + [6] * 6)
    lose(back, 1)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    assert {restored(trainer, facts)[0] for trainer in back} == {version}


def _sizes(trainer: Trainer, version: Version) -> list[int]:
    return sorted(copy.size for copy in trainer.client.inventory().parity if copy.version == version)


def _has_all_pieces(trainer: Trainer, version: Version) -> bool:
    pieces = trainer.client.inventory().parity
    return {copy.node for copy in pieces if copy.version == version} == set(range(NUM_NODES))


def test_two_lost_nodes_come_back_from_storage_with_the_reason(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    trainers = rig.start()
    stored = save_all(trainers, 0, durable=True)
    reached(trainers, stored, Level.DURABLE)
    version = replicate(trainers, [1])
    lose(trainers, 1, 2)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory(), with_storage=True)
    decision = choose_version(facts)
    assert isinstance(decision.value, Choice)
    assert decision.value.version == stored
    assert "2 of the 4 nodes of its parity group lack what they had" in decision.reason
    assert {restored(trainer, facts)[0] for trainer in back} == {stored}


@MORE
def test_what_storage_alone_has_raises_no_alarm_for_want_of_parity(make_rig: MakeRig) -> None:
    """Each rank reads its own past its keeper, so that no node has anything to make parity of."""
    rig = make_rig(**FOUR)
    trainers = rig.start()
    stored = save_all(trainers, 0, durable=True)
    reached(trainers, stored, Level.DURABLE)
    lose(trainers, *range(NUM_NODES))
    back = come_back(rig, stored)
    table = tuple(file.ref for file in rig.storage.manifest(stored).bundles)
    for trainer in back:
        trainer.client.resume(rig.incarnation, stored, table)
    for node in range(NUM_NODES):
        log = rig.keeper(node).log
        eventually(lambda log=log: f"no parity of {stored}, from which all resumed" in log.read_text())  # type: ignore[misc]
        assert not rig.status(node)["alarms"]
    replicate(back, [1])


@pytest.mark.slow
def test_the_memory_of_parity_is_a_third_of_that_of_replicas(make_rig: MakeRig) -> None:
    own = 3 * CHUNK_BYTES
    rig = make_rig(**FOUR, own_bytes=own, memory_budget="2GiB")
    trainers = rig.start()
    replicate(trainers, range(3))
    for node in range(NUM_NODES):
        status = rig.status(node)
        kept = [slot["sealed_bytes"] for slot in status["replicas"]]
        assert len(kept) == 2
        image = own + 4096
        assert all(size == image / 3 + 2 / 3 * 4096 for size in kept), (
            "a third of what a node alone holds, and one short row"
        )
        slots = sum(slot["bytes"] for rank in status["ranks"].values() for slot in rank["slots"])
        held = slots + sum(slot["bytes"] for slot in status["replicas"])
        assert held < 2.75 * own, "2 slots and 2/3 of one: 2.67 bytes per byte of state, where replicas take 4"
        assert status["parity"]["members"] == NUM_NODES
        assert status["parity"]["held_bytes"] == sum(slot["bytes"] for slot in status["replicas"])
    lose(trainers, 3)
    back = come_back(rig, Version(1, 2))
    facts = facts_of(rig, back[0].client.inventory())
    _, sources = restored(back[3], facts)  # every chunk of several, over all three others
    assert Source.PARITY in sources.values()


def damage_parity(pid: int, version: Version) -> None:
    """Flips one byte in the middle of the piece of a version that this keeper has."""
    damaged = 0
    for fd in slot_descriptors(pid, set(), flags=os.O_RDWR):
        try:
            with mmap.mmap(fd, 0) as memory:
                header, _ = slot_header(memory)
                if header is None or header["rank"] != PARITY_RANK or header["version"]["step"] != version.step:
                    continue
                at = struct.unpack_from("<8sQQ", memory)[1] + header["images"][0]["seal"]["length"] // 2
                memory[at] ^= 0x10
                damaged += 1
        finally:
            os.close(fd)
    assert damaged == 1


def test_damaged_parity_is_refused_and_storage_serves(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    trainers = rig.start()
    version = save_all(trainers, 0, durable=True)
    reached(trainers, version, Level.REPLICATED)
    reached(trainers, version, Level.DURABLE)
    for node in (0, 1, 3):
        damage_parity(pid_of(trainers, node), version)
    lose(trainers, 2)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory(), with_storage=True)
    choice = choose_version(facts).value
    assert isinstance(choice, Choice)
    plan = fetches(choice, 2, facts)
    (made,) = [fetch for fetch in plan if fetch.source is Source.PARITY]
    with pytest.raises(CorruptError, match=f"parity, bundle {made.ref.bundle_id}: .*differs from its seal"):
        back[2].client.obtain(version, plan, timeout_s=10)
    bad = Quarantine(frozenset({(version, made.ref.bundle_id, REBUILT)}))
    found, sources = restored(back[2], replace(facts, quarantine=bad))
    assert (found, sources[made.ref.bundle_id]) == (version, Source.STORAGE)
    back[2].client.quarantine(version, made.ref.bundle_id, node=REBUILT, reason="it differs")
    assert any("parity" in alarm["text"] for alarm in rig.status(2)["alarms"])


def test_bytes_that_were_flipped_on_the_way_get_into_no_parity(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    rig.hurtable(1)
    trainers = rig.start()
    replicate(trainers, [0])
    rig.hurt(1, "flip@wire")
    version = save_all(trainers, 1)
    reached(trainers, version, Level.CAPTURED)
    eventually(lambda: any("differs from its seal" in alarm["text"] for alarm in rig.status(2)["alarms"]))
    assert trainers[0].client.announced.level(version)[0] == Level.CAPTURED
    rig.hurt(1, "")
    reached(trainers, version, Level.REPLICATED)
    lose(trainers, 0)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    assert {restored(trainer, facts)[0] for trainer in back} == {version}


def test_no_member_overwrites_what_nothing_newer_replaces(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    rig.hurtable(1)
    trainers = rig.start()
    version = replicate(trainers, [0])
    rig.hurt(1, "stall@parity")  # node 1 makes no parity, so nothing newer is replicated
    captured = save_all(trainers, 1)
    reached(trainers, captured, Level.CAPTURED)
    for trainer in trainers:
        with pytest.raises(LevelNotReached, match="has a second copy yet"):
            trainer.begin(2, timeout_s=0.2)
    held = {(c.version, rank) for c in trainers[0].client.inventory().copies for rank in spread(c.ranks)}
    assert {(version, rank) for rank in range(NUM_NODES)} <= held
    rig.hurt(1, "")
    reached(trainers, captured, Level.REPLICATED)
    replicate(trainers, [3])


@MORE
def test_a_job_that_starts_again_with_another_redundancy_keeps_nothing_of_the_old_one(make_rig: MakeRig) -> None:
    rig = make_rig(**FOUR)
    trainers = rig.start()
    version = replicate(trainers, range(2))
    for step, way in enumerate(("replica", "parity:3"), 2):
        for trainer in trainers:
            trainer.client.close()
        rig.topology = replace(rig.topology, redundancy=way)
        trainers = come_back(rig, version)
        facts = facts_of(rig, trainers[0].client.inventory())
        assert {restored(trainer, facts)[0] for trainer in trainers} == {version}
        for trainer in trainers:
            trainer.client.resume(rig.incarnation, version, facts.tables[version])
        version = replicate(trainers, [10 * step, 10 * step + 1, 10 * step + 2])
        for node in range(NUM_NODES):
            kept = {slot["rank"] for slot in rig.status(node)["replicas"] if slot["version"] == str(version)}
            assert kept == ({PARITY_RANK} if way != "replica" else {(node - 1) % NUM_NODES})
            assert (rig.status(node)["parity"]["held_bytes"] > 0) == (way != "replica")


def test_without_redundancy_nothing_is_pulled_awaited_or_called_replicated(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3, redundancy="none")
    trainers = rig.start()
    for step in range(6):
        version = save_all(trainers, step, durable=step == 5)
        reached(trainers, version, Level.CAPTURED)
    reached(trainers, version, Level.DURABLE)
    for trainer in trainers:
        assert {trainer.client.announced.level(Version(1, step))[0] for step in range(5)} == {Level.CAPTURED}
    for node in range(3):
        status = rig.status(node)
        assert status["replicas"] == []
        assert status["replication"]["pulled_bytes"] == status["parity"]["made_bytes"] == 0
        assert not status["alarms"]
    lose(trainers, 1)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory(), with_storage=True)
    found, sources = restored(back[1], facts)
    assert (found, set(sources.values())) == (version, {Source.STORAGE, Source.PEER})


def test_two_nodes_that_were_asked_for_parity_keep_replicas(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2, redundancy="parity:3")
    trainers = rig.start()
    version = replicate(trainers, range(2))
    assert {slot["rank"] for slot in rig.status(0)["replicas"]} == {1}
    lose(trainers, 1)
    back = come_back(rig, version)
    found, sources = restored(back[1], facts_of(rig, back[0].client.inventory()))
    assert (found, set(sources.values())) == (version, {Source.PEER})
