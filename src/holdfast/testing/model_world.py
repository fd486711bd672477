"""A small job as a value: ranks, slots, keepers, a coordinator and late messages, moved by the real decision code.

`World` is hashable, `moves` gives every next world. What a keeper decides, its real NodeLedger decides; what the
coordinator concludes, the real Board concludes; what to come back from, core.recovery chooses. Only what surrounds
them is modelled: a slot is what the guard sees of it, a message is a line in an inbox. Some fields are the observer's
own (`complete`, `acked`, `living`): no decision can see them, the promises are judged by them.

The ledgers and the board change in place, so a world holds numbers; `Cells` keeps one object per distinct content and
remembers what each call made of it. Called by testing.model_check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

from holdfast.core import recovery
from holdfast.core.commit import Announcement, Board, CommitOrder, Kind, PartReport
from holdfast.core.ledger import NodeLedger, Reports
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, RankLayout, Seal, Topology, Version
from holdfast.core.recovery import Facts, MemoryCopy
from holdfast.core.slots import SlotState, SlotView


class Broken(Exception):  # noqa: N818  # a promise, not an error of ours
    """A promise does not hold in some world; `args` are its number in the protocol and what was seen."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is explored: every order of events, within these numbers.

    Attributes:
        node_of: node of each rank.
        num_slots: slots of each rank.
        max_step: last step that is saved.
        durable_every: versions of these steps go to storage, which may take any time; 0 for none.
        skips: how often a rank leaves a version out without a word.
        failures: how often a rank gives a version up in the middle of writing it.
        trainer_deaths: how often a trainer dies; all ranks then roll back into a new incarnation.
        keeper_deaths: how often a keeper dies; its trainers hand the slots to the next one.
        overlap: a rank may begin a version while its last one is still on the way to a seal.
    """

    node_of: tuple[int, ...] = (0, 1)
    num_slots: int = 2
    max_step: int = 3
    durable_every: int = 0
    skips: int = 0
    failures: int = 0
    trainer_deaths: int = 0
    keeper_deaths: int = 0
    overlap: bool = False


class World(NamedTuple):
    """The job at one moment. Per node: ledgers, inboxes, joined, tables. Per rank: slots, steps, alive.

    Attributes:
        ledgers, board: numbers in `Cells`.
        joined: whether the node's keeper follows the present coordinator.
        history: what the coordinator announced, for keepers that join late.
        steps: the last step that the rank saved or let go.
        tables: versions whose list of bundles the keeper knows.
        resumed: incarnation and what it came back from, for each.
        complete: the newest version that all ranks held sealed at one moment.
        acked: the newest version that some trainer was told to be captured.
        living: versions that descend from no rolled-back step.
        left: skips, failures, deaths of trainers and of keepers that may still happen.
    """

    ledgers: tuple[int, ...]
    board: int
    slots: tuple[tuple[SlotView, ...], ...]
    inboxes: tuple[tuple[Announcement, ...], ...]
    joined: tuple[bool, ...]
    history: tuple[Announcement, ...]
    steps: tuple[int, ...]
    alive: tuple[bool, ...]
    tables: tuple[frozenset[Version], ...]
    resumed: tuple[tuple[int, Version | None], ...]
    complete: Version | None
    acked: Version | None
    living: frozenset[Version]
    left: tuple[int, int, int, int]


class Cells:
    """Objects that change in place, as numbers: one object per content, one execution per call and content."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._calls: dict[Any, tuple[int, Any]] = {}

    def add(self, thing: object) -> int:
        """The number of a thing with this content."""
        number = self._numbers.setdefault(_frozen(thing), len(self._objects))
        if number == len(self._objects):
            self._objects.append(thing)
        return number

    def call(self, number: int, method: str, *args: Any, **more: Any) -> tuple[int, Any]:
        """What the thing becomes by the call, and what the call returns."""
        key = (number, method, args, *more.values())
        if key not in self._calls:
            thing = _copy(self._objects[number])
            answer = getattr(thing, method)(*args, **more)
            self._calls[key] = self.add(thing), tuple(answer) if isinstance(answer, list) else answer
        return self._calls[key]


def _fields(thing: Any) -> tuple[str, ...]:
    return tuple(thing.__dataclass_fields__) if is_dataclass(thing) else tuple(vars(thing))


def _values(thing: Any) -> Iterator[Any]:
    return (getattr(thing, name) for name in _fields(thing))


def _is_changeable(thing: Any) -> bool:
    """A ledger, a board or a record in them that is written in place."""
    if is_dataclass(thing):
        return not thing.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return isinstance(thing, NodeLedger | Board)


def _copy(thing: Any) -> Any:
    """A deep copy of what may change; values are shared."""
    if isinstance(thing, dict):
        return {key: _copy(value) for key, value in thing.items()}
    if isinstance(thing, list | set):
        return type(thing)(thing)
    if not _is_changeable(thing):
        return thing
    twin = object.__new__(type(thing))
    for name in _fields(thing):
        setattr(twin, name, _copy(getattr(thing, name)))
    return twin


def _frozen(thing: Any) -> Any:
    """The content as a hashable value."""
    if isinstance(thing, dict):
        return frozenset((key, _frozen(value)) for key, value in thing.items())
    if isinstance(thing, set):
        return frozenset(thing)
    # A record with a mapping in it has no hash of its own.
    if _is_changeable(thing) or (is_dataclass(thing) and any(isinstance(x, dict) for x in _values(thing))):
        return tuple(map(_frozen, _values(thing)))
    return thing


class Job:
    """The rules by which a world moves."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.cells = Cells()
        nodes = tuple(f"n{node}" for node in range(max(bounds.node_of) + 1))
        self.topology = Topology(nodes, bounds.node_of)
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
        bounds = self.bounds
        slots = tuple(tuple(SlotView(index) for index in range(bounds.num_slots)) for _ in self.ranks)
        left = (bounds.skips, bounds.failures, bounds.trainer_deaths, bounds.keeper_deaths)
        nothing = World((), 0, slots, (), (), (), (), (), ((),) * len(self.nodes), (), None, None, frozenset(), left)  # type: ignore[arg-type]
        return self._begin_incarnation(nothing._replace(tables=(frozenset(),) * len(self.nodes)), None)

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Every next event with the world after it."""
        for rank in self.ranks:
            if world.alive[rank]:
                yield from self._trainer_moves(world, rank)
            if self._writing(world, rank) is not None:
                yield f"rank {rank} seals", self.seal(world, rank)
        for node in self.nodes:
            if world.inboxes[node]:
                yield f"node {node} hears {_words(world.inboxes[node][0])}", self.hear(world, node)
            if not world.joined[node]:
                yield f"node {node} joins", self.join(world, node)
            if any(slot.pins for rank in self.topology.ranks_on(node) for slot in world.slots[rank]):
                yield f"node {node} has persisted", self.persisted(world, node)
            if world.left[3]:
                yield f"keeper {node} dies", self.keeper_dies(_spend(world, 3), node)
        if not all(world.alive):
            yield "all come back", self.recover(world)

    def _trainer_moves(self, world: World, rank: int) -> Iterator[tuple[str, World]]:
        step = world.steps[rank] + 1
        writing = sum(slot.state is SlotState.WRITING for slot in world.slots[rank])
        if step <= self.bounds.max_step and writing <= self.bounds.overlap:
            begun = self.begin(world, rank, step)
            yield f"rank {rank} begins {step}", begun or self.give_up(world, rank, step)
            if world.left[0]:
                yield f"rank {rank} skips {step}", _spend(world, 0)._replace(steps=_put(world.steps, rank, step))
        if writing and world.left[1]:
            yield f"rank {rank} fails", self.fail(_spend(world, 1), rank)
        if world.left[2]:
            dead = self.fail(_spend(world, 2), rank)
            yield f"trainer {rank} dies", dead._replace(alive=_put(dead.alive, rank, False))

    # --- saving

    def begin(self, world: World, rank: int, step: int) -> World | None:
        """The guard gives the rank a slot, or None."""
        node, version = self.topology.node_of[rank], Version(self._incarnation(world), step)
        world, decision = self._ask(world, node, "begin", rank, version, world.slots[rank])
        if decision.value is None:
            return None
        if world.slots[rank][decision.value].pins:
            raise Broken("S5", f"rank {rank} may overwrite slot {decision.value} while its bytes are being written")
        slot = SlotView(decision.value, SlotState.WRITING, version)
        return self._checked(self._with_slot(world, rank, slot)._replace(steps=_put(world.steps, rank, step)))

    def give_up(self, world: World, rank: int, step: int) -> World:
        """No slot came free in time."""
        version = Version(self._incarnation(world), step)
        return self._abandon(world._replace(steps=_put(world.steps, rank, step)), rank, version)

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
        world, reports = self._ask(world, node, "seal", rank, version, _seals(rank, version), durable=durable)
        return self._report(world, node, Reports(sealed=reports))

    def fail(self, world: World, rank: int) -> World:
        """What the rank was writing is given up."""
        for slot in world.slots[rank]:
            if slot.state is SlotState.WRITING and slot.version is not None:
                world = self._abandon(self._with_slot(world, rank, SlotView(slot.index)), rank, slot.version)
        return world

    def _abandon(self, world: World, rank: int, version: Version) -> World:
        node = self.topology.node_of[rank]
        world, told = self._ask(world, node, "abandon", rank, version, "no luck")
        return self._report(world, node, Reports(abandoned=(told,))) if told else world

    # --- messages

    def _report(self, world: World, node: int, reports: Reports) -> World:
        """Facts to the coordinator, as its desk takes them in. A node that has not joined reports all of it later."""
        if not world.joined[node]:
            return world
        for layout in reports.layouts:
            world = world._replace(board=self.cells.call(world.board, "register", layout)[0])
        world = self._conclude(world, "sealed", reports.sealed)
        for fact in reports.abandoned:
            world = self._conclude(world, "abandoned", *fact)
        world = self._conclude(world, "due", reports.due)
        for part in reports.parts:
            world = self._conclude(world, "written", part)
        return world

    def _conclude(self, world: World, method: str, *facts: Any) -> World:
        board, actions = self.cells.call(world.board, method, *facts)
        world = world._replace(board=board)
        for action in actions:
            if isinstance(action, CommitOrder):
                world = self._conclude(world, "committed", action.version)
            else:
                world = self._announce(world, action)
        return world

    def _announce(self, world: World, news: Announcement) -> World:
        if news.kind is Kind.CAPTURED and (world.complete is None or news.version > world.complete):
            raise Broken("S13", f"{news.version} is called captured, and no rank's copy of it need exist")
        history = (*(old for old in world.history if (old.version, old.kind) != (news.version, news.kind)), news)
        inboxes = ((*box, news) if here else box for box, here in zip(world.inboxes, world.joined, strict=True))
        return world._replace(history=history, inboxes=tuple(inboxes))

    def hear(self, world: World, node: int) -> World:
        """The node's oldest message arrives."""
        news, *later = world.inboxes[node]
        world = world._replace(inboxes=_put(world.inboxes, node, tuple(later)))
        world, fresh = self._ask(world, node, "told", news)
        if fresh and news.kind is Kind.CAPTURED:
            tables = _put(world.tables, node, world.tables[node] | {news.version})
            world = world._replace(acked=max(world.acked or news.version, news.version), tables=tables)
        if fresh and news.kind is Kind.PERSIST:
            for rank in self.topology.ranks_on(node):
                for slot in world.slots[rank]:
                    if slot.version == news.version and slot.state is SlotState.SEALED:
                        world = self._with_slot(world, rank, SlotView(slot.index, slot.state, slot.version, 1))
        return self._checked(world)

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
        world, _ = self._ask(world, node, "wrote", part)
        return self._report(world, node, Reports(parts=(part,)))

    def join(self, world: World, node: int) -> World:
        """The keeper finds the coordinator: tells all it knows, and is told all that was announced."""
        joined = world._replace(joined=_put(world.joined, node, True))
        joined = joined._replace(inboxes=_put(joined.inboxes, node, world.history))
        return self._report(joined, node, self._ask(world, node, "reports")[1])

    # --- deaths

    def keeper_dies(self, world: World, node: int) -> World:
        """A new keeper gets the slots from the trainers; what was being written or announced is lost."""
        ranks = self.topology.ranks_on(node)
        lost = [(r, slot.version) for r in ranks for slot in world.slots[r] if slot.state is SlotState.WRITING]
        for rank in ranks:
            kept = (s if s.state is SlotState.SEALED else SlotView(s.index) for s in world.slots[rank])
            unpinned = tuple(SlotView(s.index, s.state, s.version) for s in kept)
            world = world._replace(slots=_put(world.slots, rank, unpinned))
        world = world._replace(
            ledgers=_put(world.ledgers, node, self._new_ledger(world, node)),
            inboxes=_put(world.inboxes, node, ()),
            joined=_put(world.joined, node, False),
            tables=_put(world.tables, node, frozenset()),
        )
        for version, rank in sorted((s.version, r) for r in ranks for s in world.slots[r] if s.version is not None):
            layout = self._layouts[rank].fingerprint
            seals = _seals(rank, version)
            world, _ = self._ask(world, node, "adopt", rank, version, seals, layout=layout, durable=False)
        for rank, version in lost:
            if version is not None:
                world = self._abandon(world, rank, version)
        if node == 0:  # the coordinator's: its board is lost, every node has to find the next one
            board = self.cells.add(Board(self.topology))
            nobody, nothing = (False,) * len(self.nodes), ((),) * len(self.nodes)
            world = world._replace(board=board, history=(), joined=nobody, inboxes=nothing)
            world = self.join(world, 0)
        return self._checked(world)

    def recover(self, world: World) -> World:
        """All ranks start anew from what core.recovery chooses in memory."""
        copies = [
            MemoryCopy(slot.version, self.topology.node_of[rank], rank, _seals(rank, slot.version)[0])
            for rank in self.ranks
            for slot in world.slots[rank]
            if slot.state is SlotState.SEALED and slot.version is not None
        ]
        tables = {version: self._table for known in world.tables for version in known}
        facts = Facts(copies, tables, {}, Lineage(dict(world.resumed[:-1] + world.resumed[-1:])), self.topology)
        choice = recovery.choose_version(facts).value
        version = choice.version if choice else None
        if version is not None and version not in world.living:
            raise Broken("S4", f"{version} is chosen, which an incarnation in between had rolled back")
        if world.acked is not None and (version is None or version < world.acked):
            raise Broken("S1", f"{world.acked} was called captured; {version} is found")
        return self._begin_incarnation(world, version)

    def _begin_incarnation(self, world: World, version: Version | None) -> World:
        slots = tuple(tuple(s if s.state is SlotState.SEALED else SlotView(s.index) for s in own) for own in world.slots)
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

    def _checked(self, world: World) -> World:
        """S6, after every event that can take a copy away."""
        if world.complete is not None:
            lost = [rank for rank in self.ranks if not _holds(world.slots[rank], world.complete)]
            if lost:
                raise Broken("S6", f"{world.complete} is the newest complete version; rank {lost[0]} lost its copy")
        return world

    def _ask(self, world: World, node: int, method: str, *args: Any, **more: Any) -> tuple[World, Any]:
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


def _spend(world: World, kind: int) -> World:
    return world._replace(left=_put(world.left, kind, world.left[kind] - 1))  # type: ignore[arg-type]


def _words(news: Announcement) -> str:
    return f"{news.kind.value} {news.version.step}"
