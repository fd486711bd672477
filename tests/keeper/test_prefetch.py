"""A keeper fetches what its trainers will restore while they still start: real keepers, storage counted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.model import Level, Version
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.fetch import prefetch
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import dial
from keeper.rig import Rig, Trainer, eventually, reached, save_all
from kit.nodes import facts_of, reborn, restored
from sample_kit import sampled

MakeRig = Callable[..., Rig]


def killed(rig: Rig, trainers: list[Trainer]) -> None:
    """The processes of these trainers' nodes are gone."""
    for trainer in trainers:
        os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()


def saved(make_rig: MakeRig, **options: Any) -> tuple[Rig, Version]:
    """A job that made a version durable and was lost with all its keepers."""
    rig = make_rig(**options)
    trainers = rig.start()
    version = save_all(trainers, 7, durable=True)
    reached(trainers, version, Level.DURABLE)
    for node in range(len(rig.labels)):
        os.kill(rig.pid_of(rig.keeper(node)), signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    return rig, version


def starts(rig: Rig, node: int, *, world_size: int | None = None, addresses: tuple[str, ...] | None = None) -> None:
    """What the launcher of a node says."""
    place = rig.keeper(node)
    node_of = rig.topology.node_of if world_size is None else (0,) * world_size
    if addresses is None:
        addresses = tuple(rig.address(node) for node in range(len(rig.labels)))
    hello = messages.Hello(job=place.job, role=messages.OPERATOR)
    caller = dial(place.address, hello, timeout_s=5, on_push=lambda _: None, on_lost=lambda _: None)
    try:
        caller.call(
            messages.Preload(node=node, node_of=node_of, addresses=addresses, ranks_per_reader=512), timeout_s=5
        )
    finally:
        caller.close()


def preloaded(rig: Rig, node: int) -> dict[str, Any]:
    """What a node's keeper says once it has done."""
    found: dict[str, Any] = {}

    def is_done() -> bool:
        status = rig.status(node)
        found.update(status["preloaded"])
        return bool(found["reason"]) and not status["activities"] and (not found["version"] or found["seconds"] > 0)

    eventually(is_done)
    return found


def read_bytes(rig: Rig) -> int:
    return sum(rig.status(node)["counters"].get("storage_read_bytes", 0) for node in range(len(rig.labels)))


def back(rig: Rig, version: Version) -> list[Trainer]:
    rig.next_incarnation(version)
    return [reborn(rig, rank) for rank in range(rig.topology.world_size)]


def test_what_is_preloaded_is_read_once_and_restored_from_memory(make_rig: MakeRig) -> None:
    rig, version = saved(make_rig, num_nodes=2, per_node=2, own_bytes=64 << 10)
    for node in range(2):
        starts(rig, node)
    told = [preloaded(rig, node) for node in range(2)]
    files = rig.storage.manifest(version).bundles
    assert {row["version"] for row in told} == {str(version)}
    assert sum(row["bytes"]["storage"] for row in told) == sum(file.length for file in files) == read_bytes(rig)
    before = read_bytes(rig)

    trainers = back(rig, version)

    facts = facts_of(rig, trainers[0].client.inventory(), with_storage=True)
    for trainer in trainers:
        found, sources = restored(trainer, facts)
        assert found == version
        # Its own bundle came with its node's part; what two nodes share was read by one of them.
        assert set(sources.values()) <= {Source.PRELOADED, Source.PEER}
        assert Source.PRELOADED in sources.values()
    assert read_bytes(rig) == before
    assert rig.status(0)["ranks"]["0"]["restored"]["bytes"]["preloaded"] >= 64 << 10


def test_who_starts_later_reads_its_own_part_of_storage_all_the_same(make_rig: MakeRig) -> None:
    """What the first one has preloaded is its own part; else the later one would read nothing and the first one all."""
    rig, _ = saved(make_rig, num_nodes=2, per_node=2, own_bytes=64 << 10)
    told = []
    for node in range(2):
        starts(rig, node)
        told.append(preloaded(rig, node))
    assert [set(row["bytes"]) for row in told] == [{"storage"}, {"storage"}]


def test_dead_lineage_is_not_preloaded(make_rig: MakeRig) -> None:
    """The job went back to an older version before it was lost: the newer one is no part of it any more."""
    rig = make_rig()
    trainers = rig.start()
    older, newer = (save_all(trainers, step, durable=True) for step in (3, 7))
    for version in (older, newer):
        reached(trainers, version, Level.DURABLE)
    killed(rig, trainers)
    rig.next_incarnation(older)
    starts(rig, 0)
    assert preloaded(rig, 0)["version"] == str(older)


def test_a_new_node_gets_what_another_one_holds_in_memory(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    version = save_all(trainers, 7)
    reached(trainers, version, Level.REPLICATED)
    killed(rig, trainers[1:])

    starts(rig, 1)

    files = sum(len(image) for image in restored_images(rig, trainers[0], version))
    assert preloaded(rig, 1)["bytes"] == {"peer": files}
    assert read_bytes(rig) == 0
    trainers[0].client.close()
    rig.next_incarnation(version)
    reborn_trainers = [reborn(rig, rank) for rank in range(2)]
    _, sources = restored(reborn_trainers[1], facts_of(rig, reborn_trainers[0].client.inventory()))
    assert set(sources.values()) == {Source.PRELOADED}


def restored_images(rig: Rig, trainer: Trainer, version: Version) -> list[bytes]:
    """The images that rank 1 needs, as rank 0's keeper holds them."""
    copies = trainer.client.inventory(wide=False).copies
    wanted = {bundle.bundle_id for bundle in rig.trainer_bundles(1)}
    return [bytes(c.seal.length) for c in copies if c.version == version and c.seal.bundle_id in wanted]


def test_memory_that_is_needed_comes_back(make_rig: MakeRig) -> None:
    """The budget holds two slots and not what was preloaded beside them."""
    rig, version = saved(make_rig, own_bytes=3 << 20, memory_budget="16MiB")
    starts(rig, 0)
    assert preloaded(rig, 0)["held_bytes"] > 3 << 20
    rig.next_incarnation(version)
    trainer = rig.trainer(0)
    trainer.join(rig.assembly(), prepare=False)

    slots = trainer.client.prepare(7 << 20, 2)

    assert len(slots) == 2
    assert rig.status(0)["preloaded"]["held_bytes"] == 0
    restored(trainer, facts_of(rig, trainer.client.inventory(), with_storage=True))


def test_what_does_not_fit_beside_the_slots_is_left(make_rig: MakeRig) -> None:
    rig, _ = saved(make_rig, own_bytes=3 << 20, memory_budget="8MiB")
    starts(rig, 0)
    told = preloaded(rig, 0)
    assert not told["bytes"]
    assert told["wanted_bytes"] > 3 << 20
    assert "0 of 1 bundles fit" in told["reason"]


@pytest.mark.parametrize("resumed", sampled([None, "another"], "another"))
def test_a_restore_of_another_version_finds_it_gone(make_rig: MakeRig, resumed: str | None) -> None:
    rig = make_rig()
    trainers = rig.start()
    older, newer = save_all(trainers, 3, durable=True), None
    reached(trainers, older, Level.DURABLE)
    newer = save_all(trainers, 7, durable=True)
    reached(trainers, newer, Level.DURABLE)
    killed(rig, trainers)
    starts(rig, 0)
    assert preloaded(rig, 0)["version"] == str(newer)

    (trainer,) = back(rig, older)
    assert rig.status(0)["preloaded"]["held_bytes"] > 0
    trainer.client.resume(rig.incarnation, older if resumed else None)

    assert rig.status(0)["preloaded"]["held_bytes"] == 0


def test_it_goes_with_the_next_version_captured(make_rig: MakeRig) -> None:
    rig, version = saved(make_rig)
    starts(rig, 0)
    preloaded(rig, 0)
    (trainer,) = back(rig, version)
    restored(trainer, facts_of(rig, trainer.client.inventory(), with_storage=True))
    trainer.client.resume(rig.incarnation, version)
    assert rig.status(0)["preloaded"]["held_bytes"] > 0  # until then it is the copy nearest to the next crash

    reached([trainer], trainer.save(8), Level.CAPTURED)

    assert rig.status(0)["preloaded"]["held_bytes"] == 0


def test_a_damaged_file_is_never_preloaded(make_rig: MakeRig) -> None:
    rig, version = saved(make_rig)
    file = min(rig.storage.manifest(version).bundles, key=lambda file: file.ref.bundle_id)
    path = rig.base / "ck" / str(version) / file.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    starts(rig, 0)

    told = preloaded(rig, 0)
    assert "it ended" in told["reason"]
    (trainer,) = back(rig, version)
    held = {copy.seal.bundle_id for copy in trainer.client.inventory().copies}
    assert file.ref.bundle_id not in held


def test_another_number_of_ranks_and_an_empty_root_preload_nothing(make_rig: MakeRig) -> None:
    rig, version = saved(make_rig)
    starts(rig, 0, world_size=2, addresses=("",))
    told = preloaded(rig, 0)
    assert (told["bytes"], told["version"]) == ({}, str(version))
    assert "was saved by 1 ranks, and 2 come" in told["reason"]


def test_storage_that_hangs_holds_up_no_rank(make_rig: MakeRig) -> None:
    rig, version = saved(make_rig)
    rig.hurtable(0)
    rig.hurt(0, "stall@preload")
    starts(rig, 0)
    rig.next_incarnation(version)
    assembly = rig.assembly()
    trainer = rig.trainer(0)
    started = time.monotonic()

    trainer.join(assembly)

    assert time.monotonic() - started < 2 * prefetch.PATIENCE_S + 2.0
    rig.hurt(0, "")
    found, sources = restored(trainer, facts_of(rig, trainer.client.inventory(), with_storage=True))
    assert (found, set(sources.values())) == (version, {Source.STORAGE})


def test_a_keeper_that_holds_versions_preloads_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    trainers = rig.start()
    version = save_all(trainers, 7, durable=True)
    reached(trainers, version, Level.DURABLE)
    starts(rig, 0)
    assert rig.status(0)["preloaded"]["reason"] == ""
    assert read_bytes(rig) == 0


def test_the_newest_version_stays_in_memory_after_it_is_durable(make_rig: MakeRig) -> None:
    rig = make_rig()
    trainers = rig.start()
    version = save_all(trainers, 7, durable=True)
    reached(trainers, version, Level.DURABLE)
    newest = save_all(trainers, 8, durable=True)
    reached(trainers, newest, Level.DURABLE)
    trainers[0].client.close()

    (trainer,) = back(rig, newest)

    found, sources = restored(trainer, facts_of(rig, trainer.client.inventory(), with_storage=True))
    assert (found, set(sources.values())) == (newest, {Source.SLOT})
    assert read_bytes(rig) == 0


@pytest.mark.parametrize("how", ["damaged", "out of reach"])
def test_a_damaged_manifest_leaves_the_version_before_and_one_out_of_reach_none(make_rig: MakeRig, how: str) -> None:
    """A restore will wait for what refuses, and take nothing older."""
    rig = make_rig()
    trainers = rig.start()
    older = save_all(trainers, 3, durable=True)
    reached(trainers, older, Level.DURABLE)
    newer = save_all(trainers, 7, durable=True)
    reached(trainers, newer, Level.DURABLE)
    killed(rig, trainers)
    manifest = rig.base / "ck" / str(newer) / "manifest.json"
    manifest.unlink()
    if how == "damaged":
        manifest.write_text("{}")
    else:
        manifest.symlink_to("nowhere")
    starts(rig, 0)
    told = preloaded(rig, 0)
    assert told["version"] == (str(older) if how == "damaged" else None)
    assert how == "damaged" or "the path refuses" in told["reason"]
