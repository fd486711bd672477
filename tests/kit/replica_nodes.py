"""A keeper inside of the test process, with everything but a socket."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Seal, Topology, Version
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.keeper.replication import replicator as replicate
from holdfast.keeper.replication.replicator import Replicator
from holdfast.keeper.rpc.messages import Assembly, Inventory, News
from holdfast.keeper.slots.keeper_state import NodeState, StateCallbacks
from holdfast.keeper.slots.node_report import inventory
from holdfast.keeper.slots.slot_pool import HeldSlot, SlotPool
from holdfast.tiers.memory.memory_budget import Budget
from keeper.rig import eventually
from kit.inventories import held_as, packed

TICKS = 20

LENGTH = 100

STANDARD_STREAMS = 3

RESUMED = Version(1, 4)


def seal_of(bundle_id: str) -> Seal:
    return Seal(bundle_id, LENGTH, bundle_id.rjust(32, "0"))


class Node:
    """Node 1, which keeps what node 0 alone holds: `parts` bundles of each of its ranks."""

    def __init__(self, base: Path, *, ranks: int = 1, parts: int = 1, budget: str = "64MiB") -> None:
        self.topology = Topology(("n0", "n1"), (0,) * ranks + (1,) * ranks)
        self.table = tuple(
            BundleRef(f"g{rank}-{part}", (rank,), part, parts, LENGTH, "f")
            for rank in range(2 * ranks)
            for part in range(parts)
        )
        place: Any = SimpleNamespace(job="j", node="n1")
        self.state = NodeState(place, SlotPool(Budget(base / "budget", budget)))
        self.silent: tuple[tuple[int, str], ...] = ()
        self.asked: list[Callable[[], None]] = []
        self.replicator = Replicator(self.state, Events(), self._survey)
        drop: Callable[..., None] = lambda *_: None  # noqa: E731
        self.state.callbacks = StateCallbacks(drop, drop, self.replicator.put, drop, drop, drop, drop, drop)

    def _survey(self) -> Inventory:
        """What this node holds at first, then what node 0 does: all of what was resumed from."""
        own, silent = inventory(self.state), self.silent
        copies = tuple(
            MemoryCopy.at(RESUMED, 0, ref.ranks[0], seal_of(ref.bundle_id))
            for ref in self.table
            if ref.ranks[0] in self.homes
        )
        if self.asked:
            self.asked.pop()()
        held = (*own.held, *map(held_as, copies))
        return Inventory(held, packed({RESUMED: self.table}), (), (), (0, 1), silent=silent)

    @property
    def homes(self) -> tuple[int, ...]:
        return self.topology.ranks_on(0)

    def assemble(self, incarnation: int) -> None:
        lineage = ((1, None),) if incarnation > 1 else ()
        self.state.assemble(Assembly(incarnation, "root", "job", self.topology, ("a0", "a1"), lineage=lineage))

    def come_back(self) -> None:
        self.assemble(2)
        self.state.resume(2, RESUMED)

    def hear(self, kind: Kind, version: Version) -> None:
        captured = kind is Kind.CAPTURED
        told = Announcement(kind, version, "", layout="L" if captured else "")
        self.state.hear(News(incarnation=version.incarnation, announcement=told, table=self.table if captured else ()))

    def rest(self) -> None:
        eventually(lambda: self.replicator.idle)

    def tick(self) -> None:
        self.rest()
        self.replicator.tick()
        self.rest()

    def replicate(self, version: Version) -> None:
        """The version is captured, pulled, and called replicated."""
        self.hear(Kind.CAPTURED, version)
        self.rest()
        self.hear(Kind.REPLICATED, version)

    def slots(self, rank: int = 0) -> list[tuple[Version | None, list[str]]]:
        """What stands in the replica slots of a rank."""
        return [(held.version, sorted(held.images)) for held in self.replicas(rank)]

    def replicas(self, rank: int = 0) -> list[HeldSlot]:
        return self.state.slot_pool.of_rank(rank, replica=True)

    def goes_on(self, *versions: Version) -> None:
        """Newer versions are pulled of every rank and replicated, as if nothing had been."""
        for version in versions:
            self.hear(Kind.CAPTURED, version)
            for _ in range(TICKS):
                self.tick()
            for rank in self.homes:
                assert version in [held for held, _ in self.slots(rank)], f"rank {rank}: {self.slots(rank)}"
            self.hear(Kind.REPLICATED, version)
        for rank in self.homes:
            assert len(self.slots(rank)) <= replicate.NUM_REPLICA_SLOTS, "what lay beside the two is given back"
        assert not any(key.startswith("replica of") for key in self.state.alarms.raised)


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process may open nothing more meanwhile; what it has open stays."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (STANDARD_STREAMS, hard))  # what it closes is gone too
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
