"""Nodes in network namespaces of their own: links that are unplugged, deaf on one side, or slow. Needs root.

Every node is a namespace with one end of a veth pair, the other ends stand in a bridge. A link is unplugged at the
bridge, so that the node itself notices nothing; it is made deaf by a wrong hardware address of one peer, which drops
what goes there and nothing else. Trainers reach their keepers by Unix sockets, which know no network.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached
from holdfast.core.model import Level
from holdfast.core.recovery.version_choice import choose_version
from holdfast.keeper.rpc.paths import RuntimePaths
from keeper.rig import Rig, Trainer, eventually, reached, save_all
from kit.nodes import facts_of

pytestmark = [
    pytest.mark.slow,  # 15 s
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the ip command of iproute2"),
]

CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    answer = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if answer.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {answer.stderr.strip()}")


class Net:
    """One namespace per node, and one with the bridge between them."""

    def __init__(self, num_nodes: int) -> None:
        self.mark = f"hf{os.getpid() % 100_000}"
        self.num_nodes = num_nodes
        self.made: list[str] = []

    def name(self, node: int | str) -> str:
        return f"{self.mark}-{node}"

    def host(self, node: int) -> str:
        return f"10.211.7.{node + 1}"

    def make(self) -> None:
        for node in ("hub", *range(self.num_nodes)):
            ip("netns", "add", self.name(node))
            self.made.append(self.name(node))
        hub = self.name("hub")
        ip("-n", hub, "link", "add", "br0", "type", "bridge")
        ip("-n", hub, "link", "set", "br0", "up")
        for node in range(self.num_nodes):
            own = self.name(node)
            ip("link", "add", "eth0", "netns", own, "type", "veth", "peer", "name", f"p{node}", "netns", hub)
            ip("-n", own, "addr", "add", f"{self.host(node)}/24", "dev", "eth0")
            ip("-n", own, "link", "set", "eth0", "up")
            ip("-n", own, "link", "set", "lo", "up")
            ip("-n", hub, "link", "set", f"p{node}", "master", "br0")
            ip("-n", hub, "link", "set", f"p{node}", "up")

    def unplug(self, node: int) -> None:
        ip("-n", self.name("hub"), "link", "set", f"p{node}", "nomaster")

    def plug(self, node: int) -> None:
        ip("-n", self.name("hub"), "link", "set", f"p{node}", "master", "br0")

    def deafen(self, node: int, peer: int) -> None:
        """What `node` sends to `peer` gets lost; the other direction works."""
        where = (self.host(peer), "dev", "eth0")
        ip("-n", self.name(node), "neigh", "replace", *where, "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def heal(self, node: int, peer: int) -> None:
        ip("-n", self.name(node), "neigh", "del", self.host(peer), "dev", "eth0")

    def slow(self, node: int, rate: str) -> None:
        """What arrives at `node` comes at this rate."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "500ms"]
        answer = subprocess.run(
            ["tc", "-n", self.name("hub"), "qdisc", "add", "dev", f"p{node}", "root", *shape], capture_output=True
        )
        if answer.returncode:
            pytest.skip(f"no slow links here: {answer.stderr.decode().strip()}")

    def fast(self, node: int) -> None:
        subprocess.run(["tc", "-n", self.name("hub"), "qdisc", "del", "dev", f"p{node}", "root"], check=True)

    def inside(self, node: int, work: Callable[[], RuntimePaths]) -> RuntimePaths:
        """Does `work` in a thread that stands in the node's namespace; what it starts stays there."""

        def run() -> RuntimePaths:
            with open(f"/run/netns/{self.name(node)}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    def remove(self) -> None:
        for name in self.made:
            with contextlib.suppress(OSError):
                ip("netns", "del", name)


class NetRig(Rig):
    """Keepers in namespaces."""

    def __init__(self, base: Path, net: Net, **config: object) -> None:
        self.net = net
        super().__init__(base, num_nodes=net.num_nodes, **config)

    def config_of(self, node: int) -> Config:
        self.config["listen"] = self.net.host(node)
        return super().config_of(node)

    def keeper(self, node: int) -> RuntimePaths:
        return self.net.inside(node, lambda: super(NetRig, self).keeper(node))


@pytest.fixture
def make_net(base: Path, secret_file: Path) -> Iterator[Callable[..., NetRig]]:
    rigs: list[NetRig] = []

    def make(num_nodes: int, **config: object) -> NetRig:
        net = Net(num_nodes)
        try:
            net.make()
        except OSError as error:
            net.remove()
            pytest.skip(f"no network namespaces here: {error}")
        rigs.append(NetRig(base, net, secret_file=str(secret_file), **config))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        rig.net.remove()


@pytest.mark.timeout(240)
def test_a_node_that_was_cut_off_catches_up_and_one_that_is_deaf_does_no_harm(make_net: Callable[..., NetRig]) -> None:
    rig = make_net(3, own_bytes=256 << 10)
    trainers = rig.start()
    assert [address.rpartition(":")[0] for address in rig.assembly().addresses] == [
        f"tcp:{rig.net.host(node)}" for node in range(3)
    ]
    version = save_all(trainers, 0)
    reached(trainers, version, Level.REPLICATED)

    rig.net.unplug(2)
    late = save_all(trainers, 1)  # every rank goes on; nobody is told a level that it has not
    with pytest.raises(LevelNotReached):
        trainers[0].client.announced.wait(late, Level.REPLICATED, 1.0)
    rig.net.plug(2)
    reached(trainers, late, Level.REPLICATED, 60)

    rig.net.deafen(0, 1)  # node 1 hears nothing of node 0, which hears it
    deaf = save_all(trainers, 2)
    with pytest.raises(LevelNotReached):
        trainers[1].client.announced.wait(deaf, Level.REPLICATED, 1.0)
    rig.net.heal(0, 1)
    reached(trainers, deaf, Level.REPLICATED, 60)

    rig.net.unplug(1)  # for good: the other two have everything
    inventory = trainers[0].client.inventory()
    assert [node for node, _ in inventory.silent] == [1]
    choice = choose_version(facts_of(rig, inventory)).value
    assert choice is not None
    assert choice.version == deaf


@pytest.mark.timeout(240)
def test_a_slow_line_delays_replicas_and_no_rank(make_net: Callable[..., NetRig]) -> None:
    rig = make_net(2, own_bytes=256 << 10)
    trainers = rig.start()
    reached(trainers, save_all(trainers, 0), Level.REPLICATED)
    rig.net.slow(1, "1mbit")  # what node 1 keeps of node 0 takes 2 s
    skipped = [step for step in range(1, 7) if not saved(trainers, step)]
    assert len(skipped) < 6  # the first of them found a free slot; none of them blocked its rank
    assert rig.status(1)["replication"]["behind_versions"] > 0
    rig.net.fast(1)
    steps = itertools.count(7)
    eventually(lambda: caught_up(trainers, next(steps)), 60)


def saved(trainers: list[Trainer], step: int) -> bool:
    """Whether every rank got a slot at once; a rank that does not gives the version up and goes on."""
    good = True
    for trainer in trainers:
        try:
            slot = trainer.begin(step, timeout_s=0.1)
            trainer.client.copied(trainer.version(step), trainer.write(slot, step))
        except LevelNotReached:
            trainer.client.abandon(trainer.version(step), "no slot in time")
            good = False
    return good


def caught_up(trainers: list[Trainer], step: int) -> bool:
    if not saved(trainers, step):
        return False
    try:
        return trainers[0].client.announced.wait(trainers[0].version(step), Level.REPLICATED, 10) >= Level.REPLICATED
    except LevelNotReached:
        return False
