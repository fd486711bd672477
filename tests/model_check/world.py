"""A small job as a value: ranks, slots, keepers, a coordinator and late messages, moved by the real decision code.

`Job.moves` gives every next world (testing.model_state). What a keeper decides, its real NodeLedger decides; what the
coordinator concludes, the real Board concludes; what to come back from, core.recovery chooses. Only what surrounds
them is modelled: a slot is what the guard sees of it, a message is a line in an inbox. Some fields are the observer's
own (`complete`, `acked`, `living`): no decision can see them, the promises are judged by them.
Called by `explorer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from holdfast.core.model import BundleRef, RankLayout, Seal, Topology, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Facts, MemoryCopy
from holdfast.core.versions.coordinator_board import OF_WRITING, Announcement, Board, CommitOrder, Kind, PartReport
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.slot_guard import SlotState, SlotView
from model_check import replicas
from model_check.state import Bounds, Broken, Cells, Left, World

Move = tuple[str, Callable[[], World]]


def told_by_ranks(origin: Version | None) -> frozenset[Version]:
    """Versions whose bundles the ranks tell a new keeper: what they resumed from. It may be the newest that there is."""
    return frozenset() if origin is None else frozenset((origin,))


class Job:
    """The rules by which a world moves."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.cells = Cells()
        nodes = tuple(f"n{node}" for node in range(max(bounds.node_of) + 1))
        self.topology = Topology(
            nodes, bounds.node_of, redundancy=f"parity:{len(nodes)}" if bounds.parity else "replica"
        )
        refs = [BundleRef(f"b{rank}", (rank,), 0, 1, 1, "f") for rank in self.ranks]
        self._table = tuple(refs)
        self._layouts = [RankLayout(ref.ranks[0], (ref,), (ref.bundle_id,)) for ref in refs]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.bounds.node_of))

    @property
    def nodes(self) -> range:
        """All nodes; the coordinator runs on node 0."""
        return range(len(self.topology.nodes))

    def start(self) -> World:
        """A fresh job: nothing in any slot."""
        bounds, num_nodes = self.bounds, len(self.nodes)
        nothing = World(
            ledgers=(0,) * num_nodes,
            board=0,
            slots=tuple(tuple(SlotView(index) for index in range(bounds.num_slots)) for _ in self.ranks),
            inboxes=((),) * num_nodes,
            joined=(True,) * num_nodes,
            history=(),
            steps=(0,) * len(self.ranks),
            alive=(True,) * len(self.ranks),
            tables=(frozenset(),) * num_nodes,
            resumed=(),
            copies=((),) * num_nodes,
            orders=((),) * num_nodes,
            untold=((),) * num_nodes,
            patient=(True,) * num_nodes,
            safest=None,
            complete=None,
            acked=None,
            living=frozenset(),
            left=Left(
                bounds.skips,
                bounds.failures,
                bounds.trainer_deaths,
                bounds.keeper_deaths,
                bounds.impatience,
                bounds.repeats,
                bounds.takeovers,
            ),
        )
        return self._begin_incarnation(nothing, None)

    def moves(self, world: World) -> Iterator[Move]:
        """Every next event, with what leads to the world after it."""
        for rank in self.ranks:
            if world.alive[rank]:
                yield from self._trainer_moves(world, rank)
            if self._writing(world, rank) is not None:
                yield f"rank {rank} seals", partial(self.seal, world, rank)
        for node in self.nodes:
            ranks = self.topology.ranks_on(node)
            if world.inboxes[node]:
                news = world.inboxes[node][0]
                yield f"node {node} hears {news.kind.value} {news.version.step}", partial(self.hear, world, node)
            if not world.joined[node]:
                yield f"node {node} joins", partial(self.join, world, node)
            if any(slot.pins for rank in ranks for slot in world.slots[rank]):
                yield f"node {node} has persisted", partial(self.persisted, world, node)
            if self.bounds.replicas:
                yield from replicas.moves(self, world, node)
            # With its last trainer a keeper's memory dies too: that is a lost node, not a lost keeper.
            if world.left.keeper_deaths and all(world.alive[rank] for rank in ranks):
                yield f"keeper {node} dies", partial(self.keeper_dies, world, node)
        # Keepers find each other in milliseconds, trainers take seconds to start.
        if not all(world.alive) and all(world.joined):
            yield "all come back", partial(self.recover, world)

    def _trainer_moves(self, world: World, rank: int) -> Iterator[Move]:
        step = world.steps[rank] + 1
        writing = sum(slot.state is SlotState.WRITING for slot in world.slots[rank])
        if step <= self.bounds.max_step and writing <= self.bounds.overlap:
            yield f"rank {rank} saves {step}", partial(self.save, world, rank, step)
            if world.left.skips:
                yield f"rank {rank} skips {step}", partial(self.skip, world, rank, step)
        if writing and world.left.failures:
            yield f"rank {rank} fails", partial(self.fail, world, rank)
        if world.left.trainer_deaths:
            yield f"trainer {rank} dies", partial(self.trainer_dies, world, rank)

    # --- saving

    def save(self, world: World, rank: int, step: int) -> World:
        """The rank begins a version, or gives it up because no slot comes free in time."""
        node, version = self.topology.node_of[rank], Version(self._incarnation(world), step)
        world, shown = replicas.shown(self, world, node, world.slots[rank])
        world, decision = self.ask(world, node, "begin", rank, version, shown)
        if decision.value is None:
            return self._abandon(world._replace(steps=_put(world.steps, rank, step)), rank, version)
        if world.slots[rank][decision.value].pins:
            raise Broken("S5", f"rank {rank} may overwrite slot {decision.value} while its bytes are being written")
        slot = SlotView(decision.value, SlotState.WRITING, version)
        return self.checked(self._with_slot(world, rank, slot)._replace(steps=_put(world.steps, rank, step)))

    def skip(self, world: World, rank: int, step: int) -> World:
        """The rank leaves the version out and tells nobody."""
        return _spend(world, "skips")._replace(steps=_put(world.steps, rank, step))

    def seal(self, world: World, rank: int) -> World:
        """The oldest version that the rank wrote is sealed."""
        slot = self._writing(world, rank)
        version = slot.version if slot else None
        if slot is None or version is None:
            return world
        world = self._with_slot(world, rank, SlotView(slot.index, SlotState.SEALED, version))
        world = world._replace(living=world.living | {version})
        if all(_holds(world.slots[r], version) for r in self.ranks):
            world = world._replace(complete=max(world.complete or version, version))
        every = self.bounds.durable_every
        durable = every > 0 and version.step % every == 0
        node = self.topology.node_of[rank]
        world, reports = self.ask(world, node, "seal", rank, version, _seals(rank, version), durable=durable)
        return self._report(world, node, reports)

    def fail(self, world: World, rank: int) -> World:
        """Give up what the rank was writing."""
        return self._stop_writing(_spend(world, "failures"), rank)

    def _stop_writing(self, world: World, rank: int) -> World:
        for slot in world.slots[rank]:
            if slot.state is SlotState.WRITING and slot.version is not None:
                world = self._abandon(self._with_slot(world, rank, SlotView(slot.index)), rank, slot.version)
        return world

    def _abandon(self, world: World, rank: int, version: Version) -> World:
        node = self.topology.node_of[rank]
        world, told = self.ask(world, node, "abandon", rank, version, "no luck")
        return self._report(world, node, Reports(abandoned=(told,))) if told else world

    # --- messages

    def _report(self, world: World, node: int, reports: Reports) -> World:
        """Facts to the coordinator, as its desk takes them in. A node that has not joined reports all of it later."""
        if not world.joined[node]:
            return world
        for layout in reports.layouts:
            world = world._replace(board=self.cells.call(world.board, "register", layout)[0])
        world = self.conclude(world, "heard", reports.heard)
        world = self.conclude(world, "sealed", reports.sealed)
        for fact in reports.abandoned:
            world = self.conclude(world, "abandoned", *fact)
        world = self.conclude(world, "due", reports.due)
        for part in reports.parts:
            world = self.conclude(world, "written", part)
        return world

    def conclude(self, world: World, method: str, *facts: Any) -> World:
        """Tell the coordinator facts; return the world with its board and what it announces."""
        board, actions = self.cells.call(world.board, method, *facts)
        world = world._replace(board=board)
        for action in actions:
            if isinstance(action, CommitOrder):
                world = self.conclude(world, "committed", action.version)
            elif action.kind not in OF_WRITING:  # who writes when is not modelled: bytes reach storage or they do not
                world = self._announce(world, action)
        return world

    def _announce(self, world: World, news: Announcement) -> World:
        if news.kind is Kind.CAPTURED and (world.complete is None or news.version > world.complete):
            raise Broken("S13", f"{news.version} is called captured, and no rank's copy of it need exist")
        world = replicas.announced(self, world, news)
        same = (news.version, news.kind, news.node)
        history = (*(old for old in world.history if (old.version, old.kind, old.node) != same), news)
        inboxes = ((*box, news) if here else box for box, here in zip(world.inboxes, world.joined, strict=True))
        world = world._replace(history=history, inboxes=tuple(inboxes))
        return world if self.bounds.late_home or not world.joined[0] else self.hear(world, 0)

    def hear(self, world: World, node: int) -> World:
        """The node's oldest message arrives."""
        news, *later = world.inboxes[node]
        world = world._replace(inboxes=_put(world.inboxes, node, tuple(later)))
        world, fresh = self.ask(world, node, "told", news)
        if fresh and news.kind is Kind.CAPTURED:
            tables = _put(world.tables, node, world.tables[node] | {news.version})
            world = world._replace(acked=max(world.acked or news.version, news.version), tables=tables)
        if fresh and news.kind is Kind.PERSIST:
            for rank in self.topology.ranks_on(node):
                for slot in world.slots[rank]:
                    if slot.version == news.version and slot.state is SlotState.SEALED:
                        world = self._with_slot(world, rank, SlotView(slot.index, slot.state, slot.version, 1))
        return self.checked(world)

    def persisted(self, world: World, node: int) -> World:
        """The oldest version that the node was writing is in storage."""
        ranks = self.topology.ranks_on(node)
        version = min(slot.version for rank in ranks for slot in world.slots[rank] if slot.pins and slot.version)
        for rank in ranks:
            for slot in world.slots[rank]:
                if slot.version == version:
                    world = self._with_slot(world, rank, SlotView(slot.index, slot.state, version))
        if version.incarnation != self._incarnation(world):
            return world
        part = PartReport(version, node, f"part-{node}", 1, "d", tuple(f"b{rank}" for rank in ranks))
        world, _ = self.ask(world, node, "wrote", part)
        return self._report(world, node, Reports(parts=(part,)))

    def join(self, world: World, node: int) -> World:
        """The keeper finds the coordinator: tells all it knows, and is told all that was announced."""
        joined = world._replace(joined=_put(world.joined, node, True))
        joined = joined._replace(inboxes=_put(joined.inboxes, node, world.history), untold=_put(world.untold, node, ()))
        _, reports = self.ask(world, node, "reports")
        joined = self._report(joined, node, reports)
        for version in reports.dropped:
            joined = self.conclude(joined, "dropped", node, version)
        for version, bundle_ids in reports.replicas:
            joined = self.conclude(joined, "replicated", version, node, bundle_ids)
        return joined

    # --- deaths

    def trainer_dies(self, world: World, rank: int) -> World:
        """Let the trainer die: what it was writing is lost; what it had sealed stays with the keeper."""
        world = self._stop_writing(_spend(world, "trainer_deaths"), rank)
        return world._replace(alive=_put(world.alive, rank, False))

    def keeper_dies(self, world: World, node: int) -> World:
        """A new keeper gets the slots from the trainers; what was being written or announced is lost."""
        ranks = self.topology.ranks_on(node)
        world = _spend(world, "keeper_deaths")
        lost = [(r, s.version) for r in ranks for s in world.slots[r] if s.state is SlotState.WRITING and s.version]
        for rank in ranks:
            kept = (s if s.state is SlotState.SEALED else SlotView(s.index) for s in world.slots[rank])
            unpinned = tuple(SlotView(s.index, s.state, s.version) for s in kept)
            world = world._replace(slots=_put(world.slots, rank, unpinned))
        world = world._replace(
            ledgers=_put(world.ledgers, node, self._new_ledger(world, node)),
            inboxes=_put(world.inboxes, node, ()),
            joined=_put(world.joined, node, False),
            tables=_put(world.tables, node, told_by_ranks(world.resumed[-1][1])),
            copies=_put(world.copies, node, ()),
            orders=_put(world.orders, node, ()),
            untold=_put(world.untold, node, ()),
            patient=_put(world.patient, node, True),
            safest=None,  # a death that the level is there to survive: it may have taken a copy
        )
        for rank in ranks:
            for version in sorted(slot.version for slot in world.slots[rank] if slot.version is not None):
                layout, seals = self._layouts[rank].fingerprint, _seals(rank, version)
                world, _ = self.ask(world, node, "adopt", rank, version, seals, layout=layout, durable=False)
        for rank, version in lost:
            world = self._abandon(world, rank, version)
        world = self.conclude(world, "left", node)
        if node == 0:  # the coordinator's: its board is lost, every node has to find the next one
            board = self.cells.add(Board(self.topology))
            nobody, nothing = (False,) * len(self.nodes), ((),) * len(self.nodes)
            world = world._replace(board=board, history=(), joined=nobody, inboxes=nothing)
            world = self.join(world, 0)
        return self.checked(world)

    def recover(self, world: World) -> World:
        """All ranks start anew from what core.recovery chooses in memory."""
        copies = [
            MemoryCopy.at(slot.version, self.topology.node_of[rank], rank, _seals(rank, slot.version)[0])
            for rank in self.ranks
            for slot in world.slots[rank]
            if slot.state is SlotState.SEALED and slot.version is not None
        ]
        tables = {version: self._table for known in world.tables for version in known}
        facts = Facts(copies, tables, {}, Lineage(dict(world.resumed)), self.topology)
        choice = version_choice.choose_version(facts).value
        version = choice.version if choice else None
        if version is not None and version not in world.living:
            raise Broken("S4", f"{version} is chosen, which an incarnation in between had rolled back")
        if world.acked is not None and (version is None or version < world.acked):
            raise Broken("S1", f"{world.acked} was called captured; {version} is found")
        return self._begin_incarnation(world, version)

    def _begin_incarnation(self, world: World, version: Version | None) -> World:
        slots = tuple(
            tuple(s if s.state is SlotState.SEALED else SlotView(s.index) for s in own) for own in world.slots
        )
        living = frozenset(v for v in world.living if version is not None and v <= version)
        number = len(world.resumed) + 1
        world = world._replace(
            board=self.cells.add(Board(self.topology)),
            slots=slots,
            inboxes=((),) * len(self.nodes),
            joined=(True,) * len(self.nodes),
            history=(),
            steps=(version.step if version else 0,) * len(self.ranks),
            alive=(True,) * len(self.ranks),
            resumed=(*world.resumed, (number, version)),
            orders=((),) * len(self.nodes),
            untold=((),) * len(self.nodes),
            patient=(True,) * len(self.nodes),
            safest=None,
            complete=version,
            acked=version,
            living=living,
        )
        world = world._replace(ledgers=tuple(self._new_ledger(world, node) for node in self.nodes))
        for layout in self._layouts:
            world = self._report(world, self.topology.node_of[layout.rank], Reports(layouts=(layout,)))
        return world

    def _new_ledger(self, world: World, node: int) -> int:
        incarnation, version = world.resumed[-1]
        lineage = Lineage(dict(world.resumed[:-1]))
        ledger = NodeLedger(node=node, topology=self.topology, incarnation=incarnation, lineage=lineage)
        ledger.resume(version)
        for rank in self.topology.ranks_on(node):
            ledger.register(self._layouts[rank])
        return self.cells.add(ledger)

    # --- small things

    def checked(self, world: World) -> World:
        """S6, after every event that can take a copy away."""
        if world.complete is not None:
            lost = [rank for rank in self.ranks if not _holds(world.slots[rank], world.complete)]
            if lost:
                raise Broken("S6", f"{world.complete} is the newest complete version; rank {lost[0]} lost its copy")
        replicas.check(self, world)
        return world

    def ask(self, world: World, node: int, method: str, *args: Any, **more: Any) -> tuple[World, Any]:
        ledger, answer = self.cells.call(world.ledgers[node], method, *args, **more)
        return world._replace(ledgers=_put(world.ledgers, node, ledger)), answer

    def _incarnation(self, world: World) -> int:
        return world.resumed[-1][0]

    def _with_slot(self, world: World, rank: int, slot: SlotView) -> World:
        return world._replace(slots=_put(world.slots, rank, _put(world.slots[rank], slot.index, slot)))

    def _writing(self, world: World, rank: int) -> SlotView | None:
        writing = [slot for slot in world.slots[rank] if slot.state is SlotState.WRITING]
        return min(writing, key=lambda slot: slot.version or Version(0, 0), default=None)


def _seals(rank: int, version: Version) -> tuple[Seal, ...]:
    return (Seal(f"b{rank}", 1, f"{version}"),)


def _holds(slots: Sequence[SlotView], version: Version) -> bool:
    return any(slot.version == version and slot.state is SlotState.SEALED for slot in slots)


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _spend(world: World, fault: str) -> World:
    return world._replace(left=world.left._replace(**{fault: getattr(world.left, fault) - 1}))
