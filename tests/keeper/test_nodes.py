"""Several nodes: replicas, coordination, the loss of a node, frozen peers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holdfast.base.errors import (
    CorruptError,
    HoldfastError,
    KeeperError,
    KeeperGone,
    KeeperLost,
    LevelNotReached,
    VersionNotFound,
)
from holdfast.core.model import BundleRef, Level, Seal, Version
from holdfast.core.rank_runs import spread
from holdfast.core.recovery.version_choice import Fetch, Source, choose_version, fetches
from holdfast.core.versions import writer_failover
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import Caller, dial
from holdfast.keeper.rpc.client import Inventory, KeeperClient
from holdfast.keeper.service import peer_requests
from holdfast.keeper.slots.slot_pool import SlotPool
from holdfast.tiers.format import image as image_format
from keeper.rig import Rig, Trainer, eventually, reached, save_all
from kit.inventories import packed
from kit.nodes import facts_of, reborn, restored
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("num_nodes", sampled([2, 3], 3))
def test_every_bundle_reaches_two_nodes_and_storage(make_rig: MakeRig, num_nodes: int) -> None:
    rig = make_rig(num_nodes=num_nodes, per_node=2)
    trainers = rig.start()

    for step in range(4):
        version = save_all(trainers, step, durable=step == 3)
        reached(trainers, version, Level.CAPTURED)
    reached(trainers, version, Level.DURABLE)

    manifest = rig.storage.manifest(version)
    bundles = {b.bundle_id for trainer in trainers for b in trainer.bundles}
    assert {b.ref.bundle_id for b in manifest.bundles} == bundles
    assert len(manifest.parts) == len(writer_failover.parts([b.ref for b in manifest.bundles], rig.topology))

    def held_twice() -> bool:
        copies = trainers[0].client.inventory().copies
        places = {(c.seal.bundle_id, node) for c in copies if c.version == version for node in spread(c.nodes)}
        return all(sum(name == bundle for name, _ in places) >= 2 for bundle in bundles)

    eventually(held_twice)


def test_a_version_is_replicated_only_when_the_bundles_of_one_node_have_a_replica(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    version = save_all(trainers, 1)

    reached(trainers, version, Level.REPLICATED)

    replicas = rig.status(0)["replicas"]
    assert [replica["version"] for replica in replicas if replica["version"]] == [str(version)]
    assert {replica["rank"] for replica in replicas} == {1}


def test_every_node_hears_that_a_newer_incarnation_forbids_its_commits(
    make_rig: MakeRig,
) -> None:
    """Only the coordinator's node commits and is refused; ranks of the others would wait for their time limit."""
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 1, durable=True), Level.DURABLE)
    rig.storage.incarnations.register()  # somebody else took over

    version = save_all(trainers, 2, durable=True)

    for trainer in trainers:
        with pytest.raises(LevelNotReached, match=r"a newer incarnation runs.*end this process") as raised:
            trainer.client.announced.wait(version, Level.DURABLE, 60)
        assert "waited" not in str(raised.value)
    assert rig.storage.versions() == [Version(1, 1)]


def test_a_lost_node_comes_back_from_the_memory_of_the_others(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2, per_node=2)
    trainers = rig.start()
    for step in range(3):
        version = save_all(trainers, step)
        reached(trainers, version, Level.REPLICATED)

    lost = [trainer for trainer in trainers if trainer.node == 1]
    os.kill(lost[0].client.welcome.pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)
    back = [reborn(rig, rank) for rank in range(4)]

    facts = facts_of(rig, back[3].client.inventory())
    for trainer in back:
        found, sources = restored(trainer, facts)
        assert found == version
        assert set(sources.values()) == ({Source.SLOT} if trainer.node == 0 else {Source.PEER})
    for trainer in back:
        trainer.client.resume(rig.incarnation, version)
    again = save_all(back, 3)
    reached(back, again, Level.REPLICATED)


def test_all_go_back_to_what_all_have_and_nothing_that_is_needed_is_removed(make_rig: MakeRig) -> None:
    """Rank 1 lacks the newest version that rank 0 sealed, and then has nothing at all."""
    rig = make_rig(num_nodes=2)
    first, second = trainers = rig.start()
    stored = save_all(trainers, 1, durable=True)
    reached(trainers, stored, Level.DURABLE)
    agreed = save_all(trainers, 2)
    reached(trainers, agreed, Level.REPLICATED)
    ahead = first.save(3)
    eventually(lambda: ahead in {copy.version for copy in first.client.inventory(wide=False).copies})

    for loses_all in (False, True):
        if loses_all:
            os.kill(second.client.welcome.pid, signal.SIGKILL)
        for trainer in trainers:
            trainer.client.close()
        rig.next_incarnation(agreed)
        first, second = trainers = [reborn(rig, rank) for rank in range(2)]
        facts = facts_of(rig, first.client.inventory(), with_storage=True)
        for trainer in trainers:
            found, sources = restored(trainer, facts)
            assert found == agreed, "the version that one rank alone had, or an older one than both had"
            assert set(sources.values()) == {Source.PEER if loses_all and trainer is second else Source.SLOT}
            trainer.client.resume(rig.incarnation, agreed)
        assert stored in rig.storage.versions()
        rig.storage.bundles.verify(stored, rig.storage.manifest(stored).bundles[0])


def test_a_replicated_version_is_kept_until_a_newer_one_is_replicated(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2, own_bytes=1 << 20)
    trainers = rig.start()
    for step in range(12):  # as fast as the guard allows; then a node dies at once
        version = save_all(trainers, step)
    reached(trainers, version, Level.CAPTURED)
    acknowledged = max(v for v in (Version(1, s) for s in range(12)) if trainers[0].client.announced.level(v)[0] >= 2)
    os.kill(trainers[1].client.welcome.pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(version)

    back = [reborn(rig, rank) for rank in range(2)]

    found, _ = restored(back[1], facts_of(rig, back[1].client.inventory()))
    assert found >= acknowledged


def with_storage_alone(make_rig: MakeRig) -> tuple[Rig, Version, list[Trainer]]:
    """Two nodes whose keepers were killed after a version was durable, and the ranks that come after."""
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    version = save_all(trainers, 7, durable=True)
    reached(trainers, version, Level.DURABLE)
    for trainer in trainers:
        os.kill(trainer.client.welcome.pid, signal.SIGKILL)
        trainer.client.close()
    rig.next_incarnation(version)
    return rig, version, [reborn(rig, rank) for rank in range(2)]


def test_storage_is_the_last_source(make_rig: MakeRig) -> None:
    rig, version, back = with_storage_alone(make_rig)

    facts = facts_of(rig, back[0].client.inventory(), with_storage=True)
    for trainer in back:
        found, sources = restored(trainer, facts)
        assert found == version
        assert set(sources.values()) <= {Source.STORAGE, Source.PEER}  # what one reads it hands on to the other
    # What was read once lies in memory again.
    found, sources = restored(back[0], facts_of(rig, back[0].client.inventory(), with_storage=True))
    assert set(sources.values()) == {Source.SLOT}


def test_what_comes_back_in_several_turns_leaves_a_slot_for_the_next_save(make_rig: MakeRig) -> None:
    """One bundle at a time, as after a bad copy: else both slots would hold parts of what was resumed from, for good."""
    rig, version, back = with_storage_alone(make_rig)
    facts = facts_of(rig, back[0].client.inventory(), with_storage=True)
    choice = choose_version(facts).value
    assert choice is not None
    for trainer in back:
        for fetch in fetches(choice, trainer.rank, facts):
            (item,) = trainer.client.obtain(version, [replace(fetch, via=None)], timeout_s=10)
            image_format.verify(item.view, item.seal, "it came back")
    for trainer in back:
        trainer.client.release()
        trainer.client.resume(rig.incarnation, version)

    following = save_all(back, 8)

    reached(back, following, Level.REPLICATED)
    assert {copy.version for copy in back[0].client.inventory().copies} == {version, following}


def test_a_damaged_file_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    version = trainer.save(1, durable=True)
    reached([trainer], version, Level.DURABLE)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    trainer.client.close()
    file = rig.storage.manifest(version).bundles[0]
    path = rig.base / "ck" / str(version) / file.file
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    rig.next_incarnation()

    back = reborn(rig, 0)

    with pytest.raises(CorruptError, match=file.ref.bundle_id):
        back.client.obtain(version, [Fetch(file.ref, file.seal, Source.STORAGE, None)], timeout_s=5)


def test_a_copy_that_is_gone_is_named(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    version = save_all(trainers, 1)
    reached(trainers, version, Level.CAPTURED)
    ref = trainers[1].layout.bundles[0]
    seal = next(c.seal for c in trainers[0].client.inventory().copies if c.seal.bundle_id == ref.bundle_id)

    with pytest.raises(VersionNotFound, match="node 1"):
        trainers[0].client.obtain(Version(1, 99), [Fetch(ref, seal, Source.PEER, 1)], timeout_s=5)


@pytest.mark.parametrize("chunks", [pytest.param(None, marks=MORE), ((0, 1),)], ids=["whole", "chunks"])
def test_a_copy_that_was_not_agreed_on_is_not_taken_for_it(
    make_rig: MakeRig, chunks: tuple[tuple[int, int], ...] | None
) -> None:
    """Neither that of the rank's own slot nor that of storage, which are the same: another one was agreed on."""
    rig = make_rig()
    (trainer,) = rig.start()
    version = trainer.save(1, durable=True)
    reached([trainer], version, Level.DURABLE)
    file = rig.storage.manifest(version).bundles[0]
    other = replace(file.seal, digest=image_format.chunk_digest(b"other"))

    with pytest.raises(CorruptError, match="agreed on"):
        trainer.client.obtain(version, [Fetch(file.ref, other, Source.STORAGE, None, chunks)], timeout_s=5)


def test_the_next_node_coordinates_when_the_lowest_keeper_is_killed(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 0), Level.REPLICATED)

    os.kill(trainers[0].client.welcome.pid, signal.SIGKILL)
    eventually(lambda: rig.status(1)["coordinator"] == 1)
    slots = trainers[0].client.detach()
    trainers[0].connect()
    client = trainers[0].client
    client.assemble(rig.assembly())
    client.register(trainers[0].layout)
    client.adopt(slots)
    client.resume(rig.incarnation, None)

    for step in range(1, 4):
        version = save_all(trainers, step, durable=True)
        reached(trainers, version, Level.REPLICATED)
        reached(trainers, version, Level.DURABLE)
    eventually(lambda: rig.status(1)["coordinator"] == 0)


def test_a_version_that_waits_for_a_new_coordinator_is_completed_by_it(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 0), Level.CAPTURED)
    os.kill(trainers[0].client.welcome.pid, signal.SIGKILL)
    for trainer in trainers[1:]:
        trainer.save(1)  # reported to nobody, or to the dead
    slots = trainers[0].client.detach()
    trainers[0].connect()
    client = trainers[0].client
    client.assemble(rig.assembly())
    client.register(trainers[0].layout)
    client.adopt(slots)
    client.resume(rig.incarnation, None)

    version = trainers[0].save(1)

    reached(trainers, version, Level.REPLICATED)


def test_a_frozen_peer_blocks_nobody_and_is_waited_for(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 0), Level.REPLICATED)
    frozen = trainers[1].client.welcome.pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        longest = 0.0
        for step in range(1, 5):
            started = time.monotonic()
            with contextlib.suppress(LevelNotReached):
                slot = trainers[0].begin(step, timeout_s=0.3)
                trainers[0].client.copied(trainers[0].version(step), trainers[0].write(slot, step))
            longest = max(longest, time.monotonic() - started)
        assert longest < 1.5
        assert trainers[0].client.status()["pid"] == trainers[0].client.welcome.pid
    finally:
        os.kill(frozen, signal.SIGCONT)

    for step in range(10, 13):
        for trainer in reversed(trainers):  # rank 1 passed the versions that wait for it, and says so
            trainer.save(step)
        reached(trainers, trainers[0].version(step), Level.CAPTURED)
    reached(trainers, trainers[0].version(12), Level.REPLICATED)


def test_inventory_names_the_nodes_that_do_not_answer(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3)
    trainers = rig.start()
    os.kill(trainers[2].client.welcome.pid, signal.SIGKILL)

    inventory = trainers[0].client.inventory()

    assert inventory.reachable == (0, 1)
    assert [node for node, _ in inventory.silent] == [2]


def test_what_another_keeper_holds_suspects_and_says_counts_in_a_restore() -> None:
    """One that did not answer is named, and whether it may answer later; a level counts as high as anybody knows it."""
    first, second = Version(1, 1), Version(1, 2)
    own = Inventory((), (), (), ((first, Level.CAPTURED),), (0,))
    other = Inventory((), packed({second: ()}), ((second, "twins differ"),), ((first, Level.REPLICATED),), (1,))
    errors = {2: KeeperLost("no answer"), 3: KeeperGone("nobody listens"), 4: KeeperError("it serves another job")}
    merged = peer_requests._merge(0, own, {1: other, **errors})
    assert dict(merged.suspects) == {second: "twins differ"}
    assert merged.tables == {second: ()}
    assert dict(merged.levels) == {first: Level.REPLICATED}
    assert sorted(merged.reachable) == [0, 1]
    assert merged.silent == tuple((node, error.what) for node, error in errors.items())
    assert merged.unheard == (2,)


def test_twins_that_differ_are_reported_and_the_version_is_suspect(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    trainers[0].save(1, durable=True)
    version = trainers[1].save(1, durable=True, salt=1)

    eventually(lambda: any("twins differ" in alarm for alarm in trainers[0].client.announced.alarms))
    with pytest.raises(LevelNotReached, match="suspect"):
        trainers[0].client.announced.wait(version, Level.CAPTURED, 5)

    (alarm,) = [text for text in trainers[0].client.announced.alarms if "twins differ" in text]
    assert str(version) in alarm
    assert "ranks 0 and 1" in alarm or "ranks 1 and 0" in alarm
    assert str(version) in rig.status(1)["suspects"]
    choice = choose_version(facts_of(rig, trainers[0].client.inventory()))
    assert choice.value is None
    later = save_all(trainers, 2, durable=True)
    reached(trainers, later, Level.DURABLE)
    assert rig.storage.versions() == [later]


def test_of_three_twins_the_minority_is_named_with_the_entry(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3)
    trainers = rig.start()
    verified = save_all(trainers, 0, durable=True)
    reached(trainers, verified, Level.DURABLE)

    for step in (1, 2, 3):  # the flipped bit stays: no later version takes the place of the verified one
        for trainer in trainers:
            trainer.save(step, durable=True, salt=trainer.rank == 1)
        version = trainers[0].version(step)
        said = "rank 1 differs from ranks 0 and 2 in weight"
        eventually(lambda version=version, said=said: said in rig.status(2)["suspects"].get(str(version), ""))

    assert any("rank 1 differs" in alarm for alarm in trainers[1].client.announced.alarms)
    choice = choose_version(facts_of(rig, trainers[0].client.inventory(), with_storage=True)).value
    assert choice is not None
    assert choice.version == verified
    assert all(choice.holders.values()), "the verified version is still in memory"
    assert rig.storage.versions() == [verified]


def of_rank_one(trainers: Sequence[Trainer]) -> tuple[BundleRef, dict[int, Seal], Trainer]:
    """What rank 1 of three alone has, in two nodes: its seals by node, and the trainer whose node has it not."""
    own = next(ref for ref in trainers[1].layout.bundles if ref.ranks == (1,))
    holders = {
        node: c.seal
        for c in trainers[0].client.inventory().copies
        if c.seal.bundle_id == own.bundle_id
        for node in spread(c.nodes)
    }
    (keeps,) = holders.keys() - {1}
    return own, holders, trainers[3 - 1 - keeps]


def test_a_quarantined_copy_is_not_offered_again(make_rig: MakeRig) -> None:
    """Neither named nor given: who was told of it before does not get it either."""
    rig = make_rig(num_nodes=3)
    trainers = rig.start()
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    own, holders, asker = of_rank_one(trainers)

    asker.client.quarantine(version, own.bundle_id, node=1, reason="test")

    copies = asker.client.inventory().copies
    assert {node for c in copies if c.seal.bundle_id == own.bundle_id for node in spread(c.nodes)} == holders.keys() - {
        1
    }
    with pytest.raises(VersionNotFound, match="node 1"):
        asker.client.obtain(version, [Fetch(own, holders[1], Source.PEER, 1)], timeout_s=5)


def test_of_copies_on_a_node_the_own_is_taken_first_and_a_replica_last() -> None:
    slot_pool, version, kept = SlotPool(SimpleNamespace()), Version(1, 4), []
    for number, (rank, is_replica) in enumerate(((7, True), (1, False), (0, False), (0, True)), 1):
        held = slot_pool.add(SimpleNamespace(slot_id=number), rank, replica=is_replica)
        held.state, held.version, held.images = SlotState.SEALED, version, {"shared": number}
        kept.append(held)

    def taken(rank: int) -> int:
        found = slot_pool.find(version, "shared", rank)
        return found[1] if found else 0

    assert [taken(rank) for rank in (0, 1, 7)] == [3, 2, 2]
    kept[1].condemned.add("shared")
    kept[2].condemned.add("shared")
    assert taken(0) == 1
    assert slot_pool.find(Version(1, 5), "shared", 0) is None


def test_appointments_reach_every_rank(make_rig: MakeRig) -> None:
    from holdfast.core.scheduling.step_agreement import Appointment, Proposal, Purpose

    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    heard: list[tuple[int, Appointment]] = []
    for trainer in trainers:
        trainer.client.announced.on_appointment(lambda a, rank=trainer.rank: heard.append((rank, a)))

    trainers[1].client.propose(Proposal(Purpose.STOP, 1, 10))

    eventually(lambda: {rank for rank, _ in heard} == {0, 1})
    assert len({appointment for _, appointment in heard}) == 1
    assert heard[0][1].step > 10


def test_messages_of_a_lower_incarnation_have_no_effect(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    old = rig.start()
    version = save_all(old, 5)
    reached(old, version, Level.REPLICATED)
    # Only node 0 enters the next incarnation; node 1 is cut off from the news and goes on.
    rig.next_incarnation(version)
    old[0].client.assemble(rig.assembly())
    old[0].client.register(old[0].layout)
    old[0].client.resume(rig.incarnation, version)

    stale = old[1].client
    slot = stale.begin(Version(1, 6), old[1].num_bytes, durable=True, timeout_s=1)
    stale.copied(Version(1, 6), old[1].write(slot, 6))

    with pytest.raises(LevelNotReached):
        stale.announced.wait(Version(1, 6), Level.CAPTURED, 1.5)
    inventory = old[0].client.inventory(wide=False)
    assert all(copy.version != Version(1, 6) for copy in inventory.copies)
    assert KeeperClient.connect(rig.keeper(0).socket, job=rig.keeper(0).job).welcome.incarnation == 2


@pytest.mark.slow
def test_a_version_whose_copy_has_to_go_is_no_longer_called_replicated(make_rig: MakeRig) -> None:
    """Node 1 gets no replicas any more. When patience ends the copies are given up, and everybody is told before."""
    rig = make_rig(num_nodes=2)
    rig.hurtable(1)
    trainers = rig.start()
    safe = save_all(trainers, 1)
    reached(trainers, safe, Level.REPLICATED)
    rig.hurt(1, "stall@receive")
    waits = save_all(trainers, 2)
    reached(trainers, waits, Level.CAPTURED)
    assert all(trainer.client.announced.level(safe)[0] is Level.REPLICATED for trainer in trainers)

    for trainer in trainers:
        trainer.client.copied(trainer.version(3), trainer.write(trainer.begin(3, timeout_s=20.0), 3))

    for trainer in trainers:  # a slot was free because the coordinator had said that it counts the copies no more
        assert trainer.client.announced.level(safe)[0] is Level.CAPTURED
    assert any("no second copy" in alarm["text"] for alarm in rig.status(0)["alarms"])
    rig.hurt(1, "")
    reached(trainers, trainers[0].version(3), Level.REPLICATED)


def test_messages_of_an_abandoned_connection_are_ignored(make_rig: MakeRig) -> None:
    """A frozen coordinator reads it late; the board would take it for newer than what it was told meanwhile."""
    rig = make_rig(num_nodes=2)
    rig.next_incarnation()
    rig.trainer(0).join(rig.assembly())  # the keeper of node 1 has not heard of the job: we speak for it
    eventually(lambda: rig.status(0)["coordinator"] == 0)
    hello = messages.Hello(
        job=rig.keeper(0).job, role=messages.KEEPER, node=1, incarnation=rig.incarnation, job_id=rig.job_id
    )

    def line() -> Caller:
        return dial(rig.address(0), hello, timeout_s=5, on_push=lambda _: None, on_lost=lambda _: None)

    def report(*, whole: bool) -> messages.Report:
        return messages.Report(node=1, incarnation=rig.incarnation, reports=Reports(), whole=whole)

    first, second = line(), line()
    try:
        first.call(report(whole=True), timeout_s=5)
        first.call(report(whole=False), timeout_s=5)
        second.call(report(whole=True), timeout_s=5)
        for whole in (False, True):
            with pytest.raises(KeeperError, match="on a newer connection by now"):
                first.call(report(whole=whole), timeout_s=5)
        second.call(report(whole=False), timeout_s=5)
    finally:
        first.close()
        second.close()


def test_what_is_fetched_for_a_connection_that_has_ended_is_let_go_of(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=3)
    trainers = rig.start()
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    own, holders, asker = of_rank_one(trainers)
    before, peer = asker.client, trainers[1].client.welcome.pid

    def obtain() -> None:
        with contextlib.suppress(HoldfastError):
            before.obtain(version, [Fetch(own, holders[1], Source.PEER, 1)], timeout_s=20)

    fetching = threading.Thread(target=obtain)
    os.kill(peer, signal.SIGSTOP)
    try:
        fetching.start()
        eventually(lambda: [a for a in rig.status(asker.node)["activities"] if a["what"] == "restoring"])
        asker.connect()
    finally:
        os.kill(peer, signal.SIGCONT)
    fetching.join()
    before.close()

    def needed() -> list[object]:
        facts = rig.status(asker.node)
        return [slot["pins"] for slot in facts["ranks"][str(asker.rank)]["slots"] if slot["pins"]] + facts["activities"]

    eventually(lambda: not needed())
