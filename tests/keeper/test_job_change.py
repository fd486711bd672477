"""A keeper that outlived its job, whose directory was removed, and the job that begins anew in its place."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.base.errors import Fenced, InUse, KeeperError, LevelNotReached
from holdfast.core.model import Level
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import dial
from holdfast.keeper.rpc.client import KeeperClient
from keeper.rig import Rig, Trainer, eventually, reached, save_all
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]


def leave_and_remove(rig: Rig) -> None:
    """The trainers go without a goodbye, the keepers stay, the user removes the directory."""
    for trainer in rig.trainers:
        trainer.client.close()
    shutil.rmtree(rig.root)


@pytest.mark.parametrize("num_nodes", sampled([1, 2], 2))
def test_a_job_that_begins_anew_finds_nothing_of_the_old_one(make_rig: MakeRig, num_nodes: int) -> None:
    old = make_rig(num_nodes=num_nodes)
    trainers = old.start()
    for _ in range(2):  # the old job's incarnation is higher than the new one's will be
        old.next_incarnation()
    assembly = old.assembly()
    for trainer in trainers:
        trainer.join(assembly, prepare=False)
    for trainer in trainers:
        trainer.client.resume(old.incarnation, None)
    version = save_all(trainers, 5, durable=True)
    reached(trainers, version, Level.DURABLE)
    keepers = {old.pid_of(old.keeper(node)) for node in range(num_nodes)}
    leave_and_remove(old)

    new = make_rig(num_nodes=num_nodes)
    started = time.monotonic()
    trainers = new.start()

    assert time.monotonic() - started < 8  # within a second on a quiet machine
    assert new.job_id != old.job_id
    assert new.incarnation == 1
    assert {new.pid_of(new.keeper(node)) for node in range(num_nodes)} == keepers, "they are the same keepers"
    inventory = trainers[-1].client.inventory()
    assert (inventory.held, inventory.packed, inventory.levels) == ((), (), ())
    assert inventory.reachable == tuple(range(num_nodes))
    for node in range(num_nodes):
        status = new.status(node)
        assert status["alarms"] == []
        assert all(slot["version"] is None for rank in status["ranks"].values() for slot in rank["slots"])
    level = Level.REPLICATED if num_nodes > 1 else Level.CAPTURED
    reached(trainers, save_all(trainers, 0), level)
    last = save_all(trainers, 1, durable=True)
    reached(trainers, last, Level.DURABLE)
    assert new.storage.versions() == [last]
    for file in new.storage.manifest(last).bundles:
        new.storage.bundles.verify(last, file)


def test_versions_of_the_same_name_are_not_taken_for_those_of_the_old_job(make_rig: MakeRig) -> None:
    old = make_rig()
    (trainer,) = old.start()
    version = trainer.save(7, durable=True)
    reached([trainer], version, Level.DURABLE)
    leave_and_remove(old)

    (trainer,) = make_rig().start()

    assert trainer.client.announced.level(version) == (Level.NONE, "nothing was announced yet")
    slot = trainer.begin(7)
    with pytest.raises(LevelNotReached, match="none, not captured"):
        trainer.client.announced.wait(version, Level.CAPTURED, 0.3)
    trainer.client.copied(version, trainer.write(slot, 7, salt=1))
    reached([trainer], version, Level.CAPTURED)


@MORE
def test_a_job_that_still_trains_is_not_forgotten(make_rig: MakeRig) -> None:
    old = make_rig()
    (trainer,) = old.start()
    version = trainer.save(1)
    reached([trainer], version, Level.CAPTURED)
    shutil.rmtree(old.root)
    new = make_rig(per_node=2)
    new.next_incarnation()
    place = new.keeper(0)
    stranger = KeeperClient.connect(place.socket, job=place.job, rank=1)
    try:
        with pytest.raises(InUse, match=r"still trains: process \d+ \(rank 0\)") as caught:
            stranger.assemble(new.assembly())
    finally:
        stranger.close()
    assert "another path" in caught.value.remedy
    assert trainer.client.alive
    assert {copy.version for copy in trainer.client.inventory().copies} == {version}
    reached([trainer], trainer.save(2), Level.CAPTURED)


def test_ranks_that_go_on_under_another_id_let_each_other_in(make_rig: MakeRig) -> None:
    """The same processes: each is a trainer of the old job until it said otherwise."""
    old = make_rig(per_node=2)
    trainers = old.start()
    reached(trainers, save_all(trainers, 1), Level.CAPTURED)
    shutil.rmtree(old.root)
    new = make_rig(per_node=2)
    new.next_incarnation()
    assembly = new.assembly()
    faults: list[Exception] = []

    def assemble(trainer: Trainer) -> None:
        try:
            trainer.client.assemble(assembly)
        except Exception as error:  # noqa: BLE001 - told to the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=assemble, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
    assert trainers[0].client.inventory().copies == ()


def test_a_keeper_that_still_serves_the_old_job_is_not_listened_to(make_rig: MakeRig) -> None:
    old = make_rig(num_nodes=2)
    trainers = old.start()
    version = save_all(trainers, 3)
    reached(trainers, version, Level.REPLICATED)
    leave_and_remove(old)
    new = make_rig(num_nodes=2)
    new.next_incarnation()
    assembly = new.assembly()
    first, second = new.trainer(0), new.trainer(1)
    first.join(assembly)

    inventory = first.client.inventory()
    assert inventory.copies == ()
    assert inventory.reachable == (0,)
    assert f"serves job {old.job_id}" in dict(inventory.silent)[1]
    hello = messages.Hello(job=new.keeper(0).job, role=messages.KEEPER, node=1, incarnation=1, job_id=old.job_id)
    with pytest.raises(KeeperError, match=f"serves job {new.job_id}, the other one job {old.job_id}"):
        dial(new.keeper(0).address, hello, timeout_s=2, on_push=lambda _: None, on_lost=lambda _: None)

    second.join(assembly)
    for trainer in (first, second):
        trainer.client.resume(1, None)
    reached([first, second], save_all([first, second], 3), Level.REPLICATED)


def test_within_a_job_a_lower_incarnation_is_still_fenced(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    before = rig.assembly()
    rig.next_incarnation()
    trainer.client.assemble(rig.assembly())
    with pytest.raises(Fenced, match="incarnation 1 is over; 2 has begun"):
        trainer.client.assemble(before)


def test_a_directory_that_is_removed_while_training_costs_the_durable_level_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    shutil.rmtree(rig.root)
    lost = trainer.save(1, durable=True)
    reached([trainer], lost, Level.CAPTURED)
    eventually(lambda: any("vanished" in text for text in trainer.client.announced.alarms))
    assert not Path(rig.root).exists(), "what the user removed is not made again"
    reached([trainer], trainer.save(2), Level.CAPTURED)

    Path(rig.root).mkdir()  # somebody puts something else there
    (Path(rig.root) / "notes.txt").write_text("mine")
    reached([trainer], trainer.save(3, durable=True), Level.CAPTURED)
    eventually(lambda: rig.status(0)["alarms"][0]["count"] > 1)
    assert [path.name for path in Path(rig.root).iterdir()] == ["notes.txt"]


def test_another_job_in_the_same_directory_gets_none_of_the_old_jobs_files(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    shutil.rmtree(rig.root)
    other = Rig(rig.base, run_id="other")  # a keeper of its own, the same directory
    reached([trainer], trainer.save(1, durable=True), Level.CAPTURED)
    eventually(lambda: any(f"belongs to job {other.job_id}" in text for text in trainer.client.announced.alarms))
    assert other.storage.unfinished() == []
    assert other.storage.versions() == []
