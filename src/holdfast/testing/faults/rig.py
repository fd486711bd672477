"""A job without torch: real keepers on "nodes" of one machine, trainers that write bytes into slot views.

The ground of `holdfast drill faults` and of the tests of nodes.

Every rank has a bundle of its own ("rng") and shares one with its twins: rank r of a node twins with rank r of every
other node. Content is a function of bundle and step, so that twins agree and every byte can be checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.base import program
from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.base.events import Events
from holdfast.core.layout.bundles import plan_bundles, rank_layout
from holdfast.core.model import Bundle, Extent, Level, RankLayout, Shard, Topology, Version
from holdfast.elastic.watchdog.proc_stats import state
from holdfast.keeper.rpc.client import Assembly, ImageSpan, KeeperClient, Slot
from holdfast.keeper.rpc.paths import RuntimePaths, place_of
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.keeper.rpc.viewer import KeeperViewer
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.processes import start_time
from holdfast.tiers.storage.version_store import open_storage

TIMEOUT_S = 30.0
# The program of a keeper that can be hurt, and what stands before the name of its control file.
INJECT = ("holdfast.testing.faults.inject",)


def start_hurtable(root: str, config: Config, control: Path) -> subprocess.Popen[bytes]:
    """A keeper that does as `control` says (testing.faults.hurt), once it listens."""
    place = place_of(root, config)
    place.make()
    ready, theirs = os.pipe()
    command = program.command(
        *INJECT, str(control),
        "--root", root, "--run-id", config.run_id, "--node", place.node, "--runtime-dir", str(place.runtime),
        "--memory-budget", config.memory_budget, "--linger-s", str(config.linger_s), "--ready-fd", str(theirs),
    )  # fmt: skip
    keeper = subprocess.Popen(command, pass_fds=(theirs,), start_new_session=True)
    os.close(theirs)
    with os.fdopen(ready) as said:
        if json.loads(said.read())["pid"] != keeper.pid:
            raise AssertionError("another keeper of the node was there first")
    return keeper


def _viewer(place: RuntimePaths) -> contextlib.closing[KeeperViewer]:
    return contextlib.closing(KeeperViewer.connect(place.socket, job=place.job))


def _is_stopped(pid: int) -> bool:
    """Return whether every thread of it is, or it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(state(int(thread)) in "tTZX" for thread in threads)


class Rig:
    """A job on `num_nodes` nodes with `per_node` ranks each.

    Args:
        base: a short directory of the caller's: a socket's path has at most 107 bytes.
        own_bytes: of the bundle that only one rank holds.
        shared_rows: of what a rank shares with its twins, 2 KiB each.
        redundancy: as in Config.
        config: settings of the keepers; `root` is where the checkpoints go.
    """

    def __init__(
        self,
        base: Path,
        *,
        num_nodes: int = 1,
        per_node: int = 1,
        own_bytes: int = 4096,
        shared_rows: int = 1,
        redundancy: str = "replica",
        **config: Any,
    ) -> None:
        self.base = base
        self.root = str(config.pop("root", base / "ck"))
        self.labels = tuple(f"n{index}" for index in range(num_nodes))
        node_of = tuple(rank // per_node for rank in range(num_nodes * per_node))
        self.topology = Topology(self.labels, node_of, redundancy=redundancy)
        self.per_node = per_node
        self.own_bytes = own_bytes
        self.shared_rows = shared_rows
        self.config: dict[str, Any] = {"memory_budget": "1GiB", "linger_s": 60.0, **config}
        self.storage = open_storage(self.root, Events())
        self.hurt_keepers: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()
        self.trainers: list[Trainer] = []
        self.job_id = self.storage.claim()
        self.incarnation = 0
        self.resumed: Version | None = None

    def config_of(self, node: int) -> Config:
        """Settings of the node's keeper."""
        return Config(runtime_dir=str(self.base / "rt"), node_label=self.labels[node], **self.config)

    def keeper(self, node: int) -> RuntimePaths:
        """Return where the node's keeper is; it is started if there is none."""
        place = ensure_keeper(self.root, self.config_of(node))
        self.pids.add(self.pid_of(place))
        return place

    def hurtable(self, node: int) -> int:
        """Starts a keeper of the node that `hurt` reaches, before anyone else starts one; returns its process id."""
        keeper = start_hurtable(self.root, self.config_of(node), self.base / f"hurt{node}")
        self.hurt_keepers.append(keeper)
        self.pids.add(keeper.pid)
        return keeper.pid

    def hurt(self, node: int, what: str) -> None:
        """Hurt the node's keeper in `what` from now on; in nothing if it is empty. See testing.faults.hurt."""
        control = self.base / f"hurt{node}"
        control.with_suffix(".new").write_text(what)
        control.with_suffix(".new").rename(control)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """All threads of all keepers are stopped meanwhile: retention removes nothing between two looks at the root."""
        pids = [pid for pid in self.pids if start_time(pid) is not None]
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            while not all(map(_is_stopped, pids)):
                if time.monotonic() > deadline:
                    raise AssertionError("a keeper does not stop")
                time.sleep(0.001)
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def pid_of(self, place: RuntimePaths) -> int:
        """Process id of the keeper there."""
        with _viewer(place) as viewer:
            return viewer.welcome.pid

    def address(self, node: int) -> str:
        """Return where other nodes find the keeper."""
        with _viewer(self.keeper(node)) as viewer:
            return viewer.welcome.address

    def status(self, node: int) -> dict[str, Any]:
        """The status page of the node's keeper."""
        with _viewer(self.keeper(node)) as viewer:
            return viewer.status()

    def replicas(self, version: Version) -> str:
        """Return of which ranks every node has a replica of the version, in words; no keeper is started for it."""
        found = []
        for node, label in enumerate(self.labels):
            place = place_of(self.root, self.config_of(node))
            try:
                with _viewer(place) as viewer:
                    kept = viewer.status()["replicas"]
            except HoldfastError as error:
                found.append(f"{label}: {error.what}")
                continue
            ranks = sorted(
                {slot["rank"] for slot in kept if (slot["version"], slot["state"]) == (str(version), "sealed")}
            )
            found.append(f"{label}: {', '.join(f'rank {rank}' for rank in ranks) or 'none'}")
        return f"replicas: {'; '.join(found)}"

    def next_incarnation(self, resumed: Version | None = None) -> int:
        """A new incarnation that resumes from `resumed`."""
        self.incarnation = self.storage.incarnations.register()
        self.storage.incarnations.record_resumed(self.incarnation, resumed)
        self.resumed = resumed
        return self.incarnation

    def assembly(self) -> Assembly:
        """Return what the ranks tell their keepers."""
        lineage = tuple((n, v) for n, v in self.storage.incarnations.lineage().items() if n < self.incarnation)
        addresses = tuple(self.address(node) for node in range(len(self.labels)))
        return Assembly(self.incarnation, self.root, self.job_id, self.topology, addresses, lineage=lineage)

    def start(self, *, prepare: bool = True) -> list[Trainer]:
        """Keepers, a new incarnation, and every rank ready to save."""
        self.next_incarnation()
        assembly = self.assembly()
        trainers = [self.trainer(rank) for rank in range(self.topology.world_size)]
        for trainer in trainers:
            trainer.join(assembly, prepare=prepare)
        for trainer in trainers:
            trainer.client.resume(self.incarnation, None)
        return trainers

    def trainer_bundles(self, rank: int) -> tuple[Bundle, ...]:
        return bundles_of(self, rank)

    def trainer(self, rank: int) -> Trainer:
        """A rank, connected to the keeper of its node."""
        trainer = Trainer(self, rank)
        self.trainers.append(trainer)
        return trainer

    def close(self) -> None:
        """Ends all processes."""
        for trainer in self.trainers:
            trainer.client.close()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                if start_time(pid) is not None:
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
        for keeper in self.hurt_keepers:
            keeper.kill()
            keeper.wait()


class Trainer:
    """One rank, in this process."""

    def __init__(self, rig: Rig, rank: int) -> None:
        self.rig = rig
        self.rank = rank
        self.node = rig.topology.node_of[rank]
        self.bundles = bundles_of(rig, rank)
        self.layout = self.layout_of(rig, rank)
        self.slots: tuple[Slot, ...] = ()
        self.connect()

    @staticmethod
    def layout_of(rig: Rig, rank: int) -> RankLayout:
        return rank_layout(bundles_of(rig, rank), rank, rig.topology)

    @property
    def num_bytes(self) -> int:
        """Room that its images need."""
        return sum(-(-image_format.plan_image(b, 0).length // 4096) * 4096 for b in self.mine)

    @property
    def mine(self) -> list[Bundle]:
        """The bundles that it copies; twins on the same node copy the others."""
        return [bundle for bundle in self.bundles if bundle.bundle_id in self.layout.captures]

    def connect(self) -> None:
        """A connection to the keeper of its node."""
        place = self.rig.keeper(self.node)
        self.client = KeeperClient.connect(place.socket, job=place.job, rank=self.rank)

    def join(self, assembly: Assembly, *, prepare: bool = True) -> None:
        """Belongs to the job from here on, with two slots if it is to save."""
        self.client.assemble(assembly)
        self.client.register(self.layout)
        if prepare:
            self.slots = self.client.prepare(self.num_bytes, 2)

    def version(self, step: int) -> Version:
        return Version(self.rig.incarnation, step)

    def begin(self, step: int, *, durable: bool = False, timeout_s: float = 1.0) -> Slot:
        return self.client.begin(self.version(step), self.num_bytes, durable=durable, timeout_s=timeout_s)

    def write(self, slot: Slot, step: int, salt: int = 0) -> list[ImageSpan]:
        """Copies the step's images into the slot."""
        spans, offset = [], 0
        refs = {ref.bundle_id: ref for ref in self.layout.bundles}
        for bundle in self.mine:
            image = image_of(bundle, step, salt)
            slot.view[offset : offset + len(image)] = image
            spans.append(ImageSpan(refs[bundle.bundle_id], offset, len(image)))
            offset += -(-len(image) // 4096) * 4096
        return spans

    def save(self, step: int, *, durable: bool = False, salt: int = 0) -> Version:
        """Saves the step; levels come later."""
        slot = self.begin(step, durable=durable)
        self.client.copied(self.version(step), self.write(slot, step, salt))
        return self.version(step)


def save_all(trainers: Sequence[Trainer], step: int, *, durable: bool = False) -> Version:
    """All ranks save `step`."""
    for trainer in trainers:
        trainer.save(step, durable=durable)
    return trainers[0].version(step)


def reached(trainers: Sequence[Trainer], version: Version, level: Level, timeout_s: float = TIMEOUT_S) -> None:
    """Waits until every rank heard that `version` reached `level`; else says which node keeps its copies of whom."""
    for trainer in trainers:
        try:
            heard = trainer.client.announced.wait(version, level, timeout_s)
        except LevelNotReached as error:
            raise LevelNotReached(f"rank {trainer.rank}: {error.what}; {trainer.rig.replicas(version)}") from error
        if heard < level:
            raise AssertionError(f"rank {trainer.rank} heard of another level of {version}")


def bundles_of(rig: Rig, rank: int) -> tuple[Bundle, ...]:
    """One of its own, and one that it shares with its twins."""
    twins = tuple(range(rank % rig.per_node, rig.topology.world_size, rig.per_node))
    rows, shared, place = rig.own_bytes // 1024, rig.shared_rows, rank % rig.per_node
    shards = [
        Shard(f"rank{rank}/rng", "F32", (rows, 256), Extent((0, 0), (rows, 256)), (rank,)),
        Shard("weight", "F32", (rig.per_node * shared, 512), Extent((place * shared, 0), (shared, 512)), twins),
    ]
    return plan_bundles(shards, values_of=[], topology=rig.topology)


def image_of(bundle: Bundle, step: int, salt: int = 0) -> bytes:
    """The image of a bundle at a step."""
    plan = image_format.plan_image(bundle, 0)
    seed = sum(bundle.bundle_id.encode()) + step + salt
    return plan.header + bytes([seed % 251]) * (plan.length - len(plan.header))
