"""One node: saving, the guard, who may be a rank, memory, storage that fails, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import Fenced, InUse, KeeperError, KeeperLost, LevelNotReached, MemoryRefused, UsageError
from holdfast.core.model import Level, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.rpc import client
from holdfast.keeper.rpc.client import Assembly, KeeperClient, NoSlotYet
from holdfast.tiers.memory import slots as memory
from holdfast.tiers.memory.processes import start_time
from keeper.rig import Rig, Trainer, eventually, image_of, reached, save_all
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]


def own_copies(trainer: Trainer) -> set[tuple[Version, str]]:
    return {(copy.version, copy.seal.bundle_id) for copy in trainer.client.inventory(wide=False).copies}


# --- saving


def test_a_version_is_captured_when_all_ranks_sealed_it_and_durable_when_committed(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start()
    version = first.save(3, durable=True)
    with pytest.raises(LevelNotReached, match="none, not captured"):
        first.client.announced.wait(version, Level.CAPTURED, 0.3)

    second.save(3, durable=True)

    reached([first, second], version, Level.DURABLE)
    assert first.client.announced.level(version) == (Level.DURABLE, "the manifest is committed")
    with pytest.raises(LevelNotReached, match="durable, not replicated"):  # one does not stand for the other
        first.client.announced.wait(version, Level.REPLICATED, 0.1)
    for file in rig.storage.manifest(version).bundles:
        rig.storage.bundles.verify(version, file)
    by_id = {bundle.bundle_id: bundle for t in (first, second) for bundle in t.bundles}
    for file in rig.storage.manifest(version).bundles:
        stored = (rig.base / "ck" / str(version) / file.file).read_bytes()
        assert stored == image_of(by_id[file.ref.bundle_id], 3)


def test_a_version_can_become_durable_after_it_was_captured(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    version = trainer.save(1)
    reached([trainer], version, Level.CAPTURED)
    assert rig.storage.versions() == []

    trainer.client.persist(version)

    reached([trainer], version, Level.DURABLE)


def test_retention_keeps_the_newest_durable_versions(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in range(5):
        version = trainer.save(step, durable=True)
        reached([trainer], version, Level.DURABLE)

    eventually(lambda: rig.storage.versions() == [Version(1, 3), Version(1, 4)])


def test_the_guard_never_gives_the_newest_complete_version_away(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start()
    reached([first, second], save_all([first, second], 0), Level.CAPTURED)
    first.save(1)  # the second rank never saves this one

    with pytest.raises(LevelNotReached, match="not yet known to be captured on all ranks"):
        first.begin(2, timeout_s=0.2)

    assert {version.step for version, _ in own_copies(first)} == {0, 1}
    with pytest.raises(LevelNotReached, match="abandoned"):
        second.begin(2, timeout_s=0.2)
    reached([first, second], save_all([second, first], 3), Level.CAPTURED)


def test_an_abandoned_version_is_announced_and_its_slot_is_free(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start()
    first.begin(1)
    second.save(1)

    first.client.abandon(Version(1, 1), "the fence waited too long")

    with pytest.raises(LevelNotReached, match="the fence waited too long"):
        second.client.announced.wait(Version(1, 1), Level.CAPTURED, 5)
    for step in (2, 3, 4):
        reached([first, second], save_all([first, second], step), Level.CAPTURED)


def test_a_waiting_save_gets_its_slot_when_the_others_catch_up(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start()
    first.save(0)
    first.save(1)
    second.save(0)
    eventually(lambda: first.client.announced.level(Version(1, 0))[0] is Level.CAPTURED)

    started = time.monotonic()
    second.save(1)
    slot = first.begin(2, timeout_s=5)

    assert slot.num_bytes >= first.num_bytes
    assert time.monotonic() - started < 8  # within a second on a quiet machine


def test_a_rank_may_come_back_to_what_it_found_no_slot_for(
    make_rig: MakeRig,
) -> None:
    """Until it begins another version, or some seconds are over: then all hear that it is abandoned."""
    rig = make_rig(per_node=2)
    first, second = rig.start()
    reached([first, second], save_all([first, second], 0), Level.CAPTURED)
    first.save(1)
    with pytest.raises(NoSlotYet, match=r"within 0\.1 s: .*not yet known to be captured"):
        first.client.begin(Version(1, 2), first.num_bytes, durable=False, timeout_s=0.1, comes_back=True)
    second.save(1)
    reached([first, second], Version(1, 1), Level.CAPTURED)
    reached([first, second], save_all([first, second], 2), Level.CAPTURED)

    first.save(3)
    for step in (4, 5):
        with pytest.raises(NoSlotYet):
            first.client.begin(Version(1, step), first.num_bytes, durable=False, timeout_s=0.1, comes_back=True)
    with pytest.raises(LevelNotReached, match=r"no slot became free within 0\.1 s"):  # the one that it went on from
        second.client.announced.wait(Version(1, 4), Level.CAPTURED, 3)
    with pytest.raises(LevelNotReached, match=r"no slot became free within 0\.1 s"):  # the other after some seconds
        second.client.announced.wait(Version(1, 5), Level.CAPTURED, 30)
    with pytest.raises(LevelNotReached, match="abandoned"):
        first.client.begin(Version(1, 5), first.num_bytes, durable=False, timeout_s=0.1)


def test_what_a_rank_left_out_is_abandoned_when_it_goes(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start()
    reached([first, second], save_all([first, second], 0), Level.CAPTURED)
    first.save(1)
    with pytest.raises(NoSlotYet):
        first.client.begin(Version(1, 2), first.num_bytes, durable=False, timeout_s=0.1, comes_back=True)
    first.client.close()
    with pytest.raises(LevelNotReached, match="no slot became free"):
        second.client.announced.wait(Version(1, 2), Level.CAPTURED, 3)


def test_a_save_that_waits_for_a_slot_says_so_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "SAY_S", 0.05)
    rig = make_rig(per_node=2)
    first, second = rig.start()
    reached([first, second], save_all([first, second], 0), Level.CAPTURED)
    first.save(1)  # the second rank never saves this one
    with pytest.raises(LevelNotReached, match=r"within 0\.3 s: .*not yet known to be captured"):
        first.begin(2, timeout_s=0.3)
    (told,) = (text for record in caplog.records if "has waited for a free slot" in (text := record.getMessage()))
    assert "not yet known to be captured on all ranks" in told
    assert "num_slots = 3" in told


def test_what_cannot_be_right_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.next_incarnation()
    trainer = rig.trainer(0)
    with pytest.raises(UsageError, match="has not come together"):
        trainer.client.register(trainer.layout)
    trainer.client.assemble(rig.assembly())
    with pytest.raises(UsageError, match="registered"):
        trainer.begin(1)
    trainer.client.register(trainer.layout)
    trainer.slots = trainer.client.prepare(trainer.num_bytes, 2)
    with pytest.raises(LevelNotReached, match="agreed yet on what to resume from"):
        trainer.begin(1, timeout_s=0.1)
    trainer.client.resume(1, None)
    with pytest.raises(Fenced):
        trainer.client.begin(Version(7, 1), 4096, durable=False, timeout_s=1)
    with pytest.raises(LevelNotReached):
        trainer.client.begin(Version(1, 2), 1 << 30, durable=False, timeout_s=0.1)
    reached([trainer], trainer.save(3), Level.CAPTURED)


def test_images_that_overlap_or_are_unknown_are_not_sealed(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    slot = trainer.begin(1)
    spans = trainer.write(slot, 1)

    trainer.client.copied(Version(1, 1), [spans[0], spans[0]])

    with pytest.raises(LevelNotReached, match="overlaps"):
        trainer.client.announced.wait(Version(1, 1), Level.CAPTURED, 5)
    assert own_copies(trainer) == set()


# --- who is a rank


TRAINER = textwrap.dedent(
    """
    import sys, time
    sys.path[:0] = {paths!r}
    from pathlib import Path
    from holdfast.base.events import Events
    from holdfast.core.model import Topology
    from holdfast.tiers.storage.version_store import open_storage
    from keeper.rig import Rig
    rig = Rig.__new__(Rig)
    rig.__dict__.update(base=Path({base!r}), root={root!r}, labels=("n0",), topology=Topology(("n0",), (0,)),
        per_node=1, own_bytes=4096, shared_rows=1, config={config!r}, pids=set(), trainers=[], incarnation=1, resumed=None,
        storage=open_storage({root!r}, Events()), job_id={job_id!r})
    trainer = rig.trainer(0)
    trainer.join(rig.assembly())
    trainer.client.resume(1, None)
    slot = trainer.begin({step})
    trainer.write(slot, {step})
    print("writing", flush=True)
    time.sleep(60)
    """
)


@contextlib.contextmanager
def other_process(rig: Rig, step: int):
    code = TRAINER.format(
        paths=[str(Path(memory.__file__).parents[3]), str(Path(__file__).parents[1])],
        base=str(rig.base),
        root=rig.root,
        config=rig.config,
        job_id=rig.job_id,
        step=step,
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "writing\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_trainer_leaves_what_it_sealed_and_its_slots_go_to_the_next_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    sealed = trainer.save(1)
    reached([trainer], sealed, Level.CAPTURED)
    before = {slot["slot"] for slot in rig.status(0)["ranks"]["0"]["slots"]}
    trainer.client.close()
    with other_process(rig, 2) as process:
        process.kill()
        process.wait()
        eventually(lambda: rig.status(0)["ranks"]["0"]["pid"] is None)

        follower = rig.trainer(0)

        follower.join(rig.assembly())
        assert {slot.slot_id for slot in follower.slots} == before
        assert {version for version, _ in own_copies(follower)} == {sealed}
        assert {slot["state"] for slot in rig.status(0)["ranks"]["0"]["slots"]} == {"sealed", "empty"}
        eventually(lambda: "process ended" in follower.client.announced.level(Version(1, 2))[1])


@MORE
def test_a_second_living_process_of_a_rank_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    trainer.client.close()
    with other_process(rig, 2) as process:
        with pytest.raises(InUse, match=f"process {process.pid} is rank 0"):
            rig.trainer(0)
        process.kill()
        process.wait()
        rig.trainer(0)


@MORE
def test_a_frozen_trainer_holds_up_nobody(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    trainer.client.close()
    with other_process(rig, 2) as process:
        process.send_signal(signal.SIGSTOP)
        viewer = rig.keeper(0)
        started = time.monotonic()
        for _ in range(20):
            rig.status(0)
        assert time.monotonic() - started < 5
        assert KeeperClient.connect(viewer.socket, job=viewer.job).alive


# --- the keeper dies


def test_a_killed_keeper_is_noticed_at_once_and_the_next_one_adopts_the_slots(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2):
        version = trainer.save(step)
        reached([trainer], version, Level.CAPTURED)
    lost: list[str] = []
    trainer.client.on_lost(lost.append)

    os.kill(trainer.client.welcome.pid, signal.SIGKILL)

    eventually(lambda: not trainer.client.alive, 2)
    started = time.monotonic()
    with pytest.raises(KeeperLost):
        trainer.begin(3)
    with pytest.raises(LevelNotReached, match="lost"):
        trainer.client.announced.wait(Version(1, 9), Level.CAPTURED, 30)
    assert time.monotonic() - started < 5  # within a second on a quiet machine
    eventually(lambda: len(lost) == 1)
    slots = trainer.client.detach()
    assert bytes(slots[0].view[:8]) != bytes(8)  # the memory is still there

    trainer.connect()
    trainer.client.assemble(rig.assembly())
    trainer.client.register(trainer.layout)
    trainer.client.adopt(slots)
    trainer.client.resume(1, None)

    assert {found.step for found, _ in own_copies(trainer)} == {1, 2}
    eventually(lambda: trainer.client.announced.level(Version(1, 2))[0] is Level.CAPTURED)
    slot = trainer.begin(3)
    assert slot in slots
    trainer.client.copied(Version(1, 3), trainer.write(slot, 3))
    reached([trainer], Version(1, 3), Level.CAPTURED)
    assert {found.step for found, _ in own_copies(trainer)} == {2, 3}


def test_a_changed_byte_is_found_when_a_slot_is_adopted(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2):
        reached([trainer], trainer.save(step), Level.CAPTURED)
    damaged = next(slot for slot in trainer.slots if memory.read_header(slot).version.step == 2)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    eventually(lambda: not trainer.client.alive, 2)
    slots = trainer.client.detach()
    damaged.view[5000] ^= 1

    trainer.connect()
    trainer.client.assemble(rig.assembly())
    trainer.client.adopt(slots)

    assert {found.step for found, _ in own_copies(trainer)} == {1}
    assert any("differs from its seal" in alarm["text"] for alarm in rig.status(0)["alarms"])


@pytest.mark.parametrize(
    "other",
    sampled([{"job": "0" * 16}, {"rank": 1}, {"replica": True}], {"rank": 1}),
    ids=lambda other: next(iter(other)),
)
def test_a_sealed_slot_that_is_not_this_ranks_own_is_not_adopted(make_rig: MakeRig, other: dict[str, Any]) -> None:
    """Of another job, of another rank, or a copy that was kept for another node: its bytes are right, and not ours."""
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2):
        reached([trainer], trainer.save(step), Level.CAPTURED)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    eventually(lambda: not trainer.client.alive, 2)
    slots = trainer.client.detach()
    for slot in slots:
        memory.write_header(slot, replace(memory.read_header(slot), **other))

    trainer.connect()
    trainer.client.assemble(rig.assembly())
    trainer.client.adopt(slots)

    assert own_copies(trainer) == set()


def test_a_slot_that_is_given_out_is_sealed_no_more(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2):
        reached([trainer], trainer.save(step), Level.CAPTURED)

    slot = trainer.begin(3)

    assert memory.read_header(slot) is None, "before the first byte of the next version"
    trainer.client.copied(Version(1, 3), trainer.write(slot, 3))
    reached([trainer], Version(1, 3), Level.CAPTURED)
    assert memory.read_header(slot).version == Version(1, 3)


def test_a_slot_of_another_job_or_no_slot_at_all_is_not_adopted(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    foreign = memory.Slot.create(4096)
    nothing = memory.Slot.create(4096)
    nothing.window(0, 8)[:] = b"notaslot"
    try:
        with pytest.raises(KeeperError, match="not a slot"):
            trainer.client.adopt([nothing])
        trainer.client.adopt([foreign])
        assert own_copies(trainer) == set()
    finally:
        nothing.close()


# --- memory


def test_too_little_memory_is_refused_with_numbers(make_rig: MakeRig) -> None:
    rig = make_rig(memory_budget="16MiB")
    (trainer,) = rig.start()

    with pytest.raises(MemoryRefused, match="of 16777216 allowed") as caught:
        trainer.client.prepare(32 << 20, 2)

    assert "HOLDFAST_MEMORY_BUDGET" in caught.value.remedy
    assert trainer.client.alive
    reached([trainer], trainer.save(1), Level.CAPTURED)
    assert rig.status(0)["memory"]["used_bytes"] < 16 << 20


def test_what_one_rank_took_is_not_there_for_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2, memory_budget="16MiB")
    first, second = rig.start()
    first.client.prepare(6 << 20, 2)

    with pytest.raises(MemoryRefused, match=r"of 16777216 allowed, 1\d{7} are used here"):
        second.client.prepare(6 << 20, 2)

    assert 12 << 20 < rig.status(0)["memory"]["used_bytes"] < 16 << 20
    reached([first, second], save_all([first, second], 1), Level.CAPTURED)


def test_growth_takes_new_slots_and_keeps_the_newest_version_until_it_is_replaced(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2):
        reached([trainer], trainer.save(step), Level.CAPTURED)

    slots = trainer.client.prepare(1 << 20, 2)

    assert [slot.num_bytes for slot in slots] == [1 << 20, 1 << 20]
    assert {found.step for found, _ in own_copies(trainer)} >= {2}
    reached([trainer], trainer.save(3), Level.CAPTURED)
    eventually(lambda: {found.step for found, _ in own_copies(trainer)} == {3})
    assert len(rig.status(0)["ranks"]["0"]["slots"]) == 2
    assert trainer.client.prepare(1 << 20, 2) == slots


def test_memory_is_given_back_to_the_budget_when_the_keeper_dies(make_rig: MakeRig) -> None:
    rig = make_rig(memory_budget="8MiB")
    (trainer,) = rig.start()
    trainer.client.prepare(3 << 20, 2)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    trainer.client.close()
    rig.next_incarnation()

    trainer.connect()
    trainer.client.assemble(rig.assembly())

    assert len(trainer.client.prepare(3 << 20, 2)) == 2


# --- storage fails


def test_storage_that_fails_costs_the_durable_level_only_and_says_so(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    root = Path(rig.root)
    root.rename(rig.base / "away")
    root.write_text("in the way")

    version = trainer.save(1, durable=True)

    reached([trainer], version, Level.CAPTURED)
    eventually(lambda: any("is not durable" in alarm for alarm in trainer.client.announced.alarms))
    with pytest.raises(LevelNotReached, match="not durable"):
        trainer.client.announced.wait(version, Level.DURABLE, 0.2)
    root.unlink()
    (rig.base / "away").rename(root)
    reached([trainer], version, Level.DURABLE)  # it is written again from memory
    reached([trainer], trainer.save(2, durable=True), Level.DURABLE)
    eventually(lambda: rig.status(0)["alarms"] == [])


def test_a_commit_that_fails_is_tried_again_and_nothing_goes_before_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    root = Path(rig.root)
    half = root / str(Version(0, 7))  # of an incarnation before: the next commit removes it
    half.mkdir()
    in_the_way = root / str(Version(1, 1)) / "manifest.json"
    in_the_way.parent.mkdir()
    in_the_way.mkdir()  # bundles and parts can be written beside it

    version = trainer.save(1, durable=True)

    eventually(lambda: any("is not durable" in alarm for alarm in trainer.client.announced.alarms))
    assert trainer.client.announced.level(version)[0] is Level.CAPTURED
    assert half.exists(), "it went before there was anything newer"
    in_the_way.rmdir()
    reached([trainer], version, Level.DURABLE)
    rig.storage.manifest(version)
    eventually(lambda: not half.exists())


def test_a_higher_incarnation_fences_the_commit_of_a_lower_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    reached([trainer], trainer.save(1, durable=True), Level.DURABLE)
    rig.storage.incarnations.register()  # somebody else took over

    version = trainer.save(2, durable=True)

    with pytest.raises(LevelNotReached, match=r"a newer incarnation runs.*end this process") as raised:
        trainer.client.announced.wait(version, Level.DURABLE, 60)
    assert "waited" not in str(raised.value)  # the keeper refused for good: no time has to pass
    assert trainer.client.announced.superseded(version)
    assert not trainer.client.announced.superseded(Version(2, 2))
    assert trainer.client.announced.level(version)[0] < Level.DURABLE
    assert rig.storage.versions() == [Version(1, 1)]


# --- incarnations


def test_a_new_incarnation_keeps_sealed_slots_and_fences_the_old_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    for step in (1, 2, 3):
        reached([trainer], trainer.save(step), Level.CAPTURED)
    old = rig.assembly()
    rig.next_incarnation(Version(1, 2))
    new = rig.assembly()

    trainer.client.assemble(new)

    with pytest.raises(Fenced):
        trainer.client.assemble(old)
    with pytest.raises(KeeperError, match="disagree"):
        trainer.client.assemble(Assembly(2, rig.root, rig.job_id, rig.topology, ("unix:/other",)))
    assert {found.step for found, _ in own_copies(trainer)} == {2, 3}
    trainer.client.register(trainer.layout)
    with pytest.raises(Fenced):
        trainer.client.begin(Version(1, 4), trainer.num_bytes, durable=False, timeout_s=1)
    trainer.client.resume(2, Version(1, 2))
    # Step 3 of incarnation 1 is dead lineage and goes first; what was resumed from stays.
    reached([trainer], trainer.save(3), Level.CAPTURED)
    assert {version for version, _ in own_copies(trainer)} == {Version(1, 2), Version(2, 3)}


def test_restored_memory_is_not_overwritten_while_it_is_read(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    trainers = rig.start()
    for step in (1, 2):
        version = save_all(trainers, step)
        reached(trainers, version, Level.CAPTURED)
    first, second = trainers
    foreign = second.layout.captures[0]
    ref = next(ref for ref in second.layout.bundles if ref.bundle_id == foreign)
    seal = next(c.seal for c in first.client.inventory().copies if c.version == version and c.seal.bundle_id == foreign)

    (located,) = first.client.obtain(version, [Fetch(ref, seal, Source.NODE, 0)], timeout_s=5)

    assert located.source is Source.NODE
    assert located.view.readonly
    image = image_of(next(b for b in second.bundles if b.bundle_id == foreign), 2)
    assert bytes(located.view) == image
    reached(trainers, save_all([second, first], 3), Level.CAPTURED)  # the other slot is free
    assert rig.status(0)["alarms"] == []


def test_a_save_waits_for_others_as_long_as_its_rank_says(make_rig: MakeRig) -> None:
    """Rank 0 is two versions ahead of rank 1, whose device has not copied them."""
    rig = make_rig(per_node=2)
    ahead, behind = rig.start()
    for step in (1, 2):
        ahead.save(step)
    asked = []

    def ask_again() -> bool:
        asked.append(len(asked))
        if len(asked) == 3:
            for step in (1, 2):
                behind.save(step)
        return len(asked) < 100

    slot = ahead.client.begin(Version(1, 3), ahead.num_bytes, durable=False, timeout_s=0.1, ask_again=ask_again)
    assert len(asked) >= 3
    ahead.client.copied(Version(1, 3), ahead.write(slot, 3))
    reached([ahead, behind], behind.save(3), Level.CAPTURED)


def test_a_save_that_another_rank_gave_up_waits_for_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    late, gone = rig.start()
    for step in (1, 2):
        late.save(step)
    gone.client.abandon(Version(1, 3), "its device failed")
    with pytest.raises(LevelNotReached, match="abandoned: rank 1: its device failed"):
        late.begin(3, timeout_s=600.0)


# --- the end


def test_nothing_is_left_when_all_ranks_finished(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    trainers = rig.start()
    version = save_all(trainers, 1, durable=True)
    pid = trainers[0].client.welcome.pid
    trainers[0].client.goodbye(finished=True)
    trainers[0].client.close()
    assert start_time(pid) is not None
    trainers[1].client.goodbye(finished=True)

    eventually(lambda: start_time(pid) is None)

    assert version in rig.storage.versions()  # what was due was finished first
    assert not (rig.base / "rt").exists()


def test_a_keeper_that_nobody_visits_ends(make_rig: MakeRig) -> None:
    rig = make_rig(linger_s=0.5)
    (trainer,) = rig.start()
    pid = trainer.client.welcome.pid
    reached([trainer], trainer.save(1), Level.CAPTURED)
    time.sleep(0.8)
    assert start_time(pid) is not None  # a trainer is there
    trainer.client.close()

    eventually(lambda: start_time(pid) is None)

    assert not (rig.base / "rt").exists()


def test_a_terminated_keeper_cleans_up(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    pid = trainer.client.welcome.pid

    os.kill(pid, signal.SIGTERM)

    eventually(lambda: start_time(pid) is None)
    assert not (rig.base / "rt").exists()


def test_descriptors_and_threads_do_not_grow(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    pid = trainer.client.welcome.pid

    def counts() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    for step in range(5):
        reached([trainer], trainer.save(step, durable=True), Level.DURABLE)
        rig.status(0)
    before = counts()
    for step in range(5, 60):
        reached([trainer], trainer.save(step, durable=step % 5 == 0), Level.CAPTURED)
        rig.status(0)
    # A thread of the pool, or a connection that is about to end, may come and go; what grows does so with every step.
    eventually(lambda: all(now < then + 5 for now, then in zip(counts(), before, strict=True)))
