"""Second copies in the worlds of the model check: who pulls what, what is overwritten, and when waiting ends.

Every rank's state is to be copied to the node after its own, and may be copied again although it stands there: in both
places of a rank the same version would bar every newer one. A copy stands at once, but that it does reaches the
coordinator late, as does the word that copies count no more; so a version may be called replicated when a copy is
already gone, if nothing prevents it. A node may have to write a copy to storage: the order waits, perhaps before the copy
has come, and is carried out from what is found when its turn comes. Called by testing.model_world, whose `Job` carries out
what is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from holdfast.core.layout.parity_groups import STANDS
from holdfast.core.model import Level, Topology, Version
from holdfast.core.versions.coordinator_board import Announcement, Kind
from holdfast.core.versions.slot_guard import SlotState, SlotView
from model_check.state import Bounds, Broken, Takeover, World

# Slots for replicas of one rank.
NUM_REPLICAS = 2
# Stands for the rank of a node's parity, of which it has as many slots.
PARITY = -1


class Rules(Protocol):
    """Names what is needed of the job."""

    bounds: Bounds
    topology: Topology

    @property
    def ranks(self) -> range: ...

    @property
    def nodes(self) -> range: ...

    def ask(self, world: World, node: int, method: str, *args: Any, **more: Any) -> tuple[World, Any]: ...

    def conclude(self, world: World, method: str, *facts: Any) -> World: ...

    def checked(self, world: World) -> World: ...


def moves(job: Rules, world: World, node: int) -> Iterator[tuple[str, Callable[[], World]]]:
    """Yield what may happen to copies at this node."""
    if world.untold[node] and world.joined[node]:
        what, version = world.untold[node][0]
        yield f"the coordinator hears from node {node}: {version.step} {what}", partial(tell, job, world, node)
    if world.left.impatience and world.patient[node]:
        yield f"node {node} has waited long enough", partial(lose_patience, world, node)
    if not world.patient[node]:
        yield f"node {node} asks what it may overwrite", partial(ask_all, job, world, node)
    for rank in _kept(job, node):
        if (wanted := _wanted(job, world, node, rank)) is not None:
            yield f"node {node} copies rank {rank}", partial(pull, job, world, node, rank, wanted)
        # Of the first node only: others would tell the same story.
        due = max(world.tables[node], default=None) if node == 0 else None
        if world.left.takeovers and due is not None:
            yield f"node {node} is to write {due.step} of rank {rank}", partial(take_over, world, node, rank, due)
        if world.left.repeats and (had := _had(job, world, node, rank)) is not None:
            again = world._replace(left=world.left._replace(repeats=world.left.repeats - 1))
            yield f"node {node} copies rank {rank} once more", partial(pull, job, again, node, rank, had)
    if world.orders[node]:
        what = "has written" if world.orders[node][0].begun else "begins to write"
        yield f"node {node} {what} what it took over", partial(write_on, world, node)


def take_over(world: World, node: int, rank: int, version: Version) -> World:
    """Let the writer of the rank's bundle fail: the order waits here. The replica is pinned, if it has come."""
    left = world.left._replace(takeovers=world.left.takeovers - 1)
    order = Takeover(rank, version, begun=False, pinned=stands(world, node, rank, version))
    return world._replace(orders=_put(world.orders, node, (*world.orders[node], order)), left=left)


def write_on(world: World, node: int) -> World:
    """The first order's turn comes: it is written from what is found, or fails; or it is written to its end."""
    order, *later = world.orders[node]
    if not order.begun and stands(world, node, order.rank, order.version):
        later = [order._replace(begun=True, pinned=order.pinned or pins_when_its_turn_comes()), *later]
    return world._replace(orders=_put(world.orders, node, tuple(later)))


def pins_when_its_turn_comes() -> bool:
    """Return whether a replica that is found only then is pinned then. A rule of the protocol, to be taken out by
    tests.
    """
    return True


def lose_patience(world: World, node: int) -> World:
    """It goes by the overwrite guard alone from now on, as far as the coordinator lets it."""
    left = world.left._replace(impatience=world.left.impatience - 1)
    return world._replace(patient=_put(world.patient, node, False), left=left)


def ask_all(job: Rules, world: World, node: int) -> World:
    """A save that waits for a slot looks at all of them, again and again."""
    for rank in job.topology.ranks_on(node):
        world, _ = shown(job, world, node, world.slots[rank])
    return world


def tell(job: Rules, world: World, node: int) -> World:
    """The oldest word of a node reaches the coordinator."""
    (what, version), *later = world.untold[node]
    world = world._replace(untold=_put(world.untold, node, tuple(later)))
    if what == "dropped":
        return job.conclude(world, "dropped", node, version)
    ids = _names(job, node)
    return job.conclude(world, "replicated", version, node, ids)


def shown(job: Rules, world: World, node: int, slots: Sequence[SlotView]) -> tuple[World, tuple[SlotView, ...]]:
    """Slots as the guard is shown them: one that is awaited in two nodes counts as in use."""
    found = []
    for slot in slots:
        world, awaited = _awaited(job, world, node, slot.version)
        found.append(replace(slot, pins=slot.pins + 1) if awaited else slot)
    return world, tuple(found)


def _awaited(job: Rules, world: World, node: int, version: Version | None) -> tuple[World, bool]:
    if version is None or not job.bounds.replicas:
        return world, False
    world, awaited = job.ask(world, node, "awaits_copies", version)
    if not awaited or world.patient[node]:
        return world, awaited
    world, may = _ask_to_drop(job, world, node, version)
    return world, not may


def _ask_to_drop(job: Rules, world: World, node: int, version: Version) -> tuple[World, bool]:
    world, decision = job.ask(world, node, "give_up_copies", version)
    if decision.reason and world.joined[node]:
        world = world._replace(untold=_put(world.untold, node, (*world.untold[node], ("dropped", version))))
    return world, decision.value


def pull(job: Rules, world: World, node: int, rank: int, version: Version) -> World:
    """A version of a rank is copied, if it does not stand here, and a place for it may be overwritten."""
    if not stands(world, node, rank, version):
        own = [held for held in world.copies[node] if held[0] == rank]
        if len(own) >= NUM_REPLICAS:
            pinned = {order.version for order in world.orders[node] if order.pinned and order.rank == rank}
            world, victim = _victim(job, world, node, [held[1] for held in own], pinned)
            if victim is None:
                return world
            if any(order.begun and order[:2] == (rank, victim) for order in world.orders[node]):
                raise Broken(
                    "S5", f"node {node} overwrites its copy of {victim} of rank {rank} while it is being written"
                )
            at = world.copies[node].index((rank, victim))
            left = (*world.copies[node][:at], *world.copies[node][at + 1 :])
            world = job.checked(world._replace(copies=_put(world.copies, node, left)))
        copies = tuple(sorted((*world.copies[node], (rank, version))))
        world = world._replace(copies=_put(world.copies, node, copies))
    mine = _kept(job, node)
    counts = version.incarnation == len(world.resumed)  # the coordinator is told of its own incarnation only
    if counts and all((r, version) in world.copies[node] for r in mine):
        world, _ = job.ask(world, node, "replicated", version, _names(job, node))
        if world.joined[node]:
            world = world._replace(untold=_put(world.untold, node, (*world.untold[node], ("replicated", version))))
    return world


def _victim(
    job: Rules, world: World, node: int, versions: Sequence[Version], pinned: set[Version]
) -> tuple[World, Version | None]:
    """The oldest replica that may go: none that is pinned; one that is awaited only if it does not count, or no more."""
    safe = job.ask(world, node, "newest", Level.REPLICATED)[1] or world.resumed[-1][1]
    kept = safe if safe in versions else max(versions)
    for version in versions:
        if version == kept or version in pinned:
            continue
        world, awaited = job.ask(world, node, "awaits_copies", version)
        if not awaited:
            return world, version
        if job.ask(world, node, "counts", version)[1]:
            world, may = _ask_to_drop(job, world, node, version)
            if not may:
                continue
        return world, version
    return world, None


def announced(job: Rules, world: World, news: Announcement) -> World:
    """S13: what is called replicated is in two nodes at that moment."""
    if news.kind is Kind.REPLICATED:
        world = world._replace(safest=max(world.safest or news.version, news.version))
        under_replicated = _under_replicated(job, world, news.version) if job.bounds.replicas else None
        if under_replicated is not None:
            raise Broken(
                "S13", f"{news.version} is called replicated; rank {under_replicated} is in fewer than two nodes"
            )
    if news.kind is Kind.DROPPED and news.lost and world.safest is not None and news.version >= world.safest:
        world = world._replace(safest=None)
    return world


def check(job: Rules, world: World) -> None:
    """S1: the newest version that is called replicated is in two nodes at every moment."""
    if (
        world.safest is not None
        and job.bounds.replicas
        and (under_replicated := _under_replicated(job, world, world.safest)) is not None
    ):
        raise Broken("S1", f"{world.safest} is called replicated; rank {under_replicated} has one copy left")


def arrive(job: Rules, world: World) -> World:
    """Everything that is to be copied or told is."""
    while True:
        before = world
        for node in job.nodes:
            while world.untold[node]:
                world = tell(job, world, node)
            while world.orders[node]:
                world = write_on(world, node)
            for rank in _kept(job, node):
                if (version := _wanted(job, world, node, rank)) is not None:
                    world = pull(job, world, node, rank, version)
        if world == before:
            return world


def _under_replicated(job: Rules, world: World, version: Version) -> int | None:
    """A rank whose state of the version may be gone with one node; with parity any of them needs all the others have."""
    if job.bounds.parity:
        lost = (rank for rank in job.ranks if not _held(world, rank, version))
        bare = (node for node in job.nodes if (PARITY, version) not in world.copies[node])
        return next(lost, next(bare, None))
    for rank in job.ranks:
        home = job.topology.node_of[rank]
        own = any(slot.version == version and slot.state is SlotState.SEALED for slot in world.slots[rank])
        nodes = {node for node in job.nodes if (rank, version) in world.copies[node]} | ({home} if own else set())
        if len(nodes) < 2:
            return rank
    return None


def stands(world: World, node: int, rank: int, version: Version) -> bool:
    """Return whether the node finds that it has this replica."""
    return (rank, version) in world.copies[node]


def _had(job: Rules, world: World, node: int, rank: int) -> Version | None:
    """The newest version of the rank that this node has a copy of, if what it was made of is still held."""
    version = max((version for of, version in world.copies[node] if of == rank), default=None)
    return version if version is not None and _is_to_be_had(job, world, rank, version) else None


def _wanted(job: Rules, world: World, node: int, rank: int) -> Version | None:
    """The newest captured version, if this node lacks its copy and what it is made of is still held."""
    version = max(world.tables[node], default=None)
    if version is None or version.incarnation != len(world.resumed) or (rank, version) in world.copies[node]:
        return None
    return version if _is_to_be_had(job, world, rank, version) else None


def _is_to_be_had(job: Rules, world: World, rank: int, version: Version) -> bool:
    return all(_held(world, each, version) for each in (job.ranks if rank == PARITY else (rank,)))


def _held(world: World, rank: int, version: Version) -> bool:
    return any(slot.version == version and slot.state is SlotState.SEALED for slot in world.slots[rank])


def _kept(job: Rules, node: int) -> tuple[int, ...]:
    """The ranks that a node keeps copies of."""
    return (PARITY,) if job.bounds.parity else tuple(rank for rank in job.ranks if _backup(job, rank) == node)


def _names(job: Rules, node: int) -> tuple[str, ...]:
    """What a node tells that it keeps."""
    return (STANDS,) if job.bounds.parity else tuple(f"b{rank}" for rank in _kept(job, node))


def _backup(job: Rules, rank: int) -> int:
    return (job.topology.node_of[rank] + 1) % len(job.nodes)


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
