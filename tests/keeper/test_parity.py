"""Parity instead of replicas, with real keepers: any one node of a group may go, in any phase."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import pytest

from holdfast.core.model import Level, Version
from holdfast.core.recovery.version_choice import Source
from keeper.rig import Rig, Trainer, reached, save_all
from kit.nodes import facts_of, reborn, restored

MakeRig = Callable[..., Rig]
MIB = 1 << 20


def lose(rig: Rig, trainers: Sequence[Trainer], node: int) -> None:
    """The node's keeper is killed, and all its trainers leave."""
    os.kill(next(t for t in trainers if t.node == node).client.welcome.pid, signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()


def come_back(rig: Rig, version: Version | None) -> list[Trainer]:
    rig.next_incarnation(version)
    return [reborn(rig, rank) for rank in range(rig.topology.world_size)]


@pytest.mark.parametrize("lost", range(4))
def test_any_one_of_four_nodes_comes_back_from_parity(make_rig: MakeRig, lost: int) -> None:
    rig = make_rig(num_nodes=4, per_node=2, redundancy="parity:4", own_bytes=3 * 4096 + 1024 * lost)
    trainers = rig.start()
    for step in range(3):
        version = save_all(trainers, step)
        reached(trainers, version, Level.REPLICATED)
    lose(rig, trainers, lost)
    back = come_back(rig, version)
    facts = facts_of(rig, back[0].client.inventory())
    for trainer in back:
        found, sources = restored(trainer, facts)
        assert found == version
        expected = {Source.PEER, Source.PARITY} if trainer.node == lost else {Source.SLOT}
        assert set(sources.values()) == expected
    for trainer in back:
        trainer.client.resume(rig.incarnation, version)
    again = save_all(back, 3)
    reached(back, again, Level.REPLICATED)
