"""Versions of which each has a layout of its own, as of values that grow. Real keepers, trainers without torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.model import Level
from keeper.rig import TIMEOUT_S, Rig, reached

NUM_VERSIONS = 40
OWN_BYTES = 256 << 10


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "level"),
    [(1, 1, Level.CAPTURED), (1, 2, Level.CAPTURED), (2, 1, Level.REPLICATED)],
    ids=["one rank", "two ranks of a node", "two nodes"],
)
def test_a_layout_that_is_registered_before_the_seal_of_a_version_takes_nothing_from_it(
    make_rig: Callable[..., Rig], num_nodes: int, per_node: int, level: Level
) -> None:
    rig = make_rig(num_nodes=num_nodes, per_node=per_node, own_bytes=OWN_BYTES + 1024 * NUM_VERSIONS)
    trainers = rig.start()  # with room for the largest
    for step in range(NUM_VERSIONS):
        rig.own_bytes = OWN_BYTES + 1024 * step
        for trainer in trainers:
            trainer.bundles = rig.trainer_bundles(trainer.rank)
            trainer.layout = trainer.layout_of(rig, trainer.rank)
            trainer.client.register(trainer.layout)
        for trainer in trainers:
            slot, version = trainer.begin(step, timeout_s=TIMEOUT_S), trainer.version(step)
            trainer.client.copied(version, trainer.write(slot, step))
    reached(trainers, version, level)
