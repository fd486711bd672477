"""What does not change lies in two files in turns, with real keepers: those that lie side by side never share one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.core.model import Level, Version
from keeper.rig import Rig, Trainer, eventually, reached

OWN_BYTES = 2 << 20


def save_the_same(trainers: Sequence[Trainer], step: int) -> Version:
    """All ranks save, for storage, the bytes that they saved before."""
    for trainer in trainers:
        slot = trainer.begin(step, durable=True, timeout_s=10)
        trainer.client.copied(trainer.version(step), trainer.write(slot, 0))
    return trainers[0].version(step)


def files_of_node_0(rig: Rig, version: Version) -> set[int]:
    """Return the numbers of the files that hold what node 0 alone has."""
    return {file.stat().st_ino for file in (Path(rig.root) / str(version)).glob("g0x1-*.safetensors")}


def test_a_version_that_another_node_could_not_write_leaves_its_neighbours_apart(
    make_rig: Callable[..., Rig],
) -> None:
    """Nobody holds that node's bytes besides, and when its storage works again the next version is due."""
    rig = make_rig(num_nodes=2, redundancy="none", own_bytes=OWN_BYTES)
    rig.hurtable(1)
    trainers = rig.start()
    for step in (1, 2):
        reached(trainers, save_the_same(trainers, step), Level.DURABLE)
    files = {Version(1, 2): files_of_node_0(rig, Version(1, 2))}
    rig.hurt(1, "EIO@write")
    for step in (3, 4):
        version = save_the_same(trainers, step)
        reached(trainers, version, Level.CAPTURED)
        eventually(lambda version=version: files_of_node_0(rig, version))  # type: ignore[misc]
        files[version] = files_of_node_0(rig, version)
    rig.hurt(1, "")
    reached(trainers, version, Level.DURABLE)
    durable = [version for version in rig.storage.versions() if version in files]
    assert durable[-1] == version
    assert not any(files[one] & files[next_one] for one, next_one in itertools.pairwise(durable))
