"""Several nodes: replicas, coordination, the loss of a node, frozen peers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.model import Level
from node.rig import Rig, eventually, reached, save_all


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_every_bundle_reaches_two_nodes_and_storage(make_rig: Callable[..., Rig], num_nodes: int) -> None:
    rig = make_rig(num_nodes=num_nodes, per_node=2)
    trainers = rig.start()

    for step in range(4):
        version = save_all(trainers, step, durable=step == 3)
        reached(trainers, version, Level.CAPTURED)
    reached(trainers, version, Level.DURABLE)

    manifest = rig.storage.manifest(version)
    assert {b.ref.bundle_id for b in manifest.bundles} == {b.bundle_id for t in trainers for b in t.bundles}
    copies = trainers[0].client.inventory().copies
    nodes = {}
    for copy in copies:
        if copy.version == version:
            nodes.setdefault(copy.seal.bundle_id, set()).add(copy.node)
    eventually(lambda: trainers[0].client.level(version)[0] == Level.DURABLE)
    assert set(nodes) == {b.ref.bundle_id for b in manifest.bundles}
    assert all(len(where) >= 2 for where in nodes.values())
