"""A keeper without descriptors: it says so, what it has open goes on, and the rest is done when there are some again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import KeeperLost
from holdfast.core.model import Level
from holdfast.keeper.coordination import coordinator_client
from holdfast.keeper.coordination.coordinator_client import CoordinatorClient
from keeper.rig import Rig, eventually, reached, save_all
from kit.replica_nodes import Node, without_descriptors

MakeRig = Callable[..., Rig]


def test_a_keeper_that_had_no_descriptors_left_makes_its_replica_when_it_has(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    pid = rig.pid_of(rig.keeper(1))
    with without_descriptors(pid):
        version = save_all(trainers, 1)
        reached(trainers, version, Level.CAPTURED)
        eventually(lambda: any("Too many open files" in alarm for alarm in trainers[1].client.announced.alarms))
    reached(trainers, version, Level.REPLICATED)
    reached(trainers, save_all(trainers, 2), Level.REPLICATED)


def test_a_keeper_that_had_no_descriptors_left_reports_again_when_it_has(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=2)
    trainers = rig.start()
    place = rig.keeper(1)
    version = save_all(trainers, 1)
    reached(trainers, version, Level.REPLICATED)
    rig.next_incarnation(version)
    assembly = rig.assembly()
    with without_descriptors(rig.pid_of(place)):
        for trainer in trainers:
            trainer.join(assembly, prepare=False)  # the line to the coordinator is of the past now
        eventually(lambda: "Too many open files" in place.log.read_text())
    for trainer in trainers:
        trainer.client.resume(rig.incarnation, version)
    reached(trainers, save_all(trainers, 2), Level.REPLICATED)


def test_a_line_that_the_system_refuses_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else reports for this node: the thread of its line ends for no error that may pass."""
    node, calm = Node(tmp_path), threading.Event()
    node.assemble(1)
    tried: list[str] = []

    def dial(address: str, *_: object, **__: object) -> None:
        tried.append(address)
        if not calm.is_set():
            raise OSError(24, "Too many open files")
        raise KeeperLost("nobody is there")

    monkeypatch.setattr(coordinator_client, "dial", dial)
    leading: Any = SimpleNamespace(report=lambda *_: None, close=lambda: None)
    line = CoordinatorClient(node.state, lambda _: leading)
    with node.state.lock:
        assert node.state.assembly is not None
        line.follow(node.state.assembly, 1)
    eventually(lambda: len(tried) > 2)
    assert (
        node.state.alarms.raised["uplink"].text == "no line to the coordinator: Too many open files; it is tried again"
    )
    assert line.leader == -1
    calm.set()
    eventually(lambda: line.leader == 1)
    eventually(lambda: not node.state.alarms.raised)
    line.stop()
    node.state.slot_pool.close()
