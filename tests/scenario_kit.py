"""The stage for scenarios written as text: commands in words, what the real core decides in words.

`Stage` is a job whose keepers and coordinator talk without delay, unless a node is cut off. `Archive` is what is left
of a job when it has to come back. Versions are written `incarnation.step`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from bubble_kit import Pipelines
from holdfast.core.layout import bundles, replica_placement
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Topology, Version
from holdfast.core.rank_runs import is_in
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import (
    Choice,
    ChoiceDeferred,
    Copy,
    Facts,
    MemoryCopy,
    Quarantine,
    Source,
    Stored,
    Unreachable,
)
from holdfast.core.scheduling.cadence import Cadence
from holdfast.core.versions import retention
from holdfast.core.versions.coordinator_board import (
    OF_WRITING,
    Action,
    Announcement,
    Board,
    CommitOrder,
    Kind,
    PartReport,
    WriteFailure,
)
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.slot_guard import SlotState, SlotView
from holdfast.core.versions.twin_vote import Examined
from holdfast.core.versions.writer_failover import Order, Part, Watch

Args = dict[str, str]
Lines = list[str]


def short(text: object) -> str:
    """Versions as `incarnation.step`."""
    return re.sub(r"i0*(\d+)-s0*(\d+)", r"\1.\2", str(text))


def version_of(text: str) -> Version:
    incarnation, step = text.split(".")
    return Version(int(incarnation), int(step))


def versions_of(text: str) -> list[Version]:
    return [version_of(part) for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    """`0,2-4` -> 0, 2, 3, 4."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def words(items: Iterable[object]) -> str:
    return ", ".join(short(item) for item in items) or "nothing"


class Parts:
    """Who runs where and who holds what; common to both kinds of scenario."""

    def __init__(self) -> None:
        self.topology = Topology((), ())
        self.layouts: dict[int, RankLayout] = {}

    @property
    def table(self) -> tuple[BundleRef, ...]:
        return tuple({ref.bundle_id: ref for layout in self.layouts.values() for ref in layout.bundles}.values())

    def place(self, args: Args) -> Lines:
        """`nodes=a,a,b`: the node of each rank."""
        labels = args["nodes"].split(",")
        names = tuple(dict.fromkeys(labels))
        self.topology = Topology(names, tuple(names.index(label) for label in labels))
        return [f"node {label}: ranks {words(self.topology.ranks_on(index))}" for index, label in enumerate(names)]

    def state(self, args: Args) -> Lines:
        """`weights=0,2 other=1,3 own=each`, `all=0-3*2` for two shares."""
        refs: list[BundleRef] = []
        for name, text in args.items():
            ranks, _, shares = text.partition("*")
            groups = [[rank] for rank in range(self.topology.world_size)] if ranks == "each" else [numbers(ranks)]
            for group in groups:
                refs += _group(f"{name}{group[0]}" if ranks == "each" else name, group, int(shares or 1))
        for rank in range(self.topology.world_size):
            mine = tuple(ref for ref in refs if rank in ref.ranks)
            self.layouts[rank] = RankLayout(rank, mine, bundles.captures(mine, rank, self.topology))
        placed = replica_placement.place(refs, self.topology)
        return [self._describe(ref, placed.get(ref.bundle_id)) for ref in refs]

    def _describe(self, ref: BundleRef, backup: int | None) -> str:
        nodes = sorted({self.topology.node_of[rank] for rank in ref.ranks})
        captured = words(bundles.capturer(ref, node, self.topology) for node in nodes)
        replica = f", replica on node {self.topology.nodes[backup]}" if backup is not None else ""
        writer = self.topology.nodes[self.topology.node_of[bundles.representative(ref)]]
        return f"{ref.bundle_id}: ranks {words(ref.ranks)}; copied by {captured}; written by node {writer}{replica}"

    def node(self, label: str) -> int:
        return self.topology.nodes.index(label)


def _group(name: str, ranks: list[int], count: int) -> list[BundleRef]:
    ids = [name if count == 1 else f"{name}#{index}" for index in range(count)]
    return [BundleRef(bid, tuple(ranks), index, count, 100, name) for index, bid in enumerate(ids)]


class Stage(Parts):
    """A running job: one ledger per node, one board."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = 1
        self.lineage = Lineage()
        self.resumed: Version | None = None
        self.ledgers: dict[int, NodeLedger] = {}
        self.slots: dict[int, list[SlotView]] = {}
        self.bytes: dict[tuple[int, Version], tuple[str, str]] = {}
        self.cut: set[int] = set()
        self.history: list[Announcement] = []
        self.durable: set[Version] = set()
        self.said: Lines = []
        self.board = Board(self.topology)
        self.watches: dict[int, Watch] = {}
        self.ordered: dict[int, list[Part]] = {}
        self.now_s = 0.0

    def run(self, name: str, args: Args) -> Lines:
        self.said = []
        command: Callable[[Args], Lines | None] = getattr(self, f"do_{name.replace('-', '_')}")
        return [short(line) for line in (command(args) or []) + self.said]

    def do_job(self, args: Args) -> Lines:
        lines = self.place(args)
        count = int(args.get("slots", 2))
        self.slots = {rank: [SlotView(i) for i in range(count)] for rank in range(self.topology.world_size)}
        self._begin_incarnation(None)
        return lines

    def do_state(self, args: Args) -> Lines:
        lines = self.state(args)
        for rank, layout in self.layouts.items():
            self.ledgers[self.topology.node_of[rank]].register(layout)
            self._report(self.topology.node_of[rank], Reports(layouts=(layout,)))
        return lines

    def _begin_incarnation(self, resumed: Version | None) -> None:
        self.resumed, self.board, self.history, self.cut = resumed, Board(self.topology), [], set()
        for node in range(len(self.topology.nodes)):
            self._new_ledger(node)

    def _new_ledger(self, node: int) -> None:
        lineage = self.lineage
        ledger = NodeLedger(node=node, topology=self.topology, incarnation=self.incarnation, lineage=lineage)
        ledger.resume(self.resumed)
        for rank in ledger.ranks:
            if rank in self.layouts:
                ledger.register(self.layouts[rank])
        self.ledgers[node], self.watches[node], self.ordered[node] = ledger, Watch(node), []

    # --- trainers

    def do_begin(self, args: Args) -> None:
        version = self._version(args)
        for rank in numbers(args["ranks"]):
            decision = self._ledger(rank).begin(rank, version, self.slots[rank])
            if decision.value is None:
                self.said.append(f"rank {rank} gets no slot: {decision.reason}")
            else:
                self.slots[rank][decision.value] = SlotView(decision.value, SlotState.WRITING, version)
                self.said.append(f"rank {rank} writes {version}: {decision.reason}")

    def do_seal(self, args: Args) -> None:
        version = self._version(args)
        for rank in numbers(args["ranks"]):
            for slot in self.slots[rank]:
                if slot.state is SlotState.WRITING and slot.version == version:
                    self.slots[rank][slot.index] = replace(slot, state=SlotState.SEALED)
                    self.bytes[rank, version] = (args.get("bytes", "good"), self.layouts[rank].fingerprint)
                    seals = self._seals(rank, version)
                    reports = self._ledger(rank).seal(rank, version, seals, durable="durable" in args)
                    self._report(self.topology.node_of[rank], reports)

    def do_save(self, args: Args) -> None:
        self.do_begin(args)
        self.said = [line for line in self.said if "no slot" in line]
        self.do_seal(args)

    def do_give_up(self, args: Args) -> None:
        version, rank = self._version(args), int(args["rank"])
        for slot in self.slots[rank]:
            if slot.state is SlotState.WRITING and slot.version == version:
                self.slots[rank][slot.index] = SlotView(slot.index)
        told = self._ledger(rank).abandon(rank, version, args.get("because", "the copy took too long"))
        self._report(self.topology.node_of[rank], Reports(abandoned=(told,) if told else ()))

    def do_want_durable(self, args: Args) -> None:
        version, rank = self._version(args), int(args["rank"])
        if self._ledger(rank).want_durable(version):
            self._report(self.topology.node_of[rank], Reports(due=(version,)))

    def do_slots(self, _: Args) -> None:
        for rank, own in self.slots.items():
            held = [f"{s.version} {s.state.value}{' in use' * bool(s.pins)}" if s.version else "empty" for s in own]
            self.said.append(f"rank {rank}: {' | '.join(held)}")

    def do_pin(self, args: Args) -> None:
        self._set_pins(args, 1)

    def do_unpin(self, args: Args) -> None:
        self._set_pins(args, 0)

    def _set_pins(self, args: Args, pins: int) -> None:
        rank = int(args["rank"])
        self.slots[rank] = [replace(s, pins=pins) if s.version == self._version(args) else s for s in self.slots[rank]]

    # --- keepers

    def do_replicate(self, args: Args) -> None:
        node, version = self.node(args["node"]), self._version(args)
        ids = tuple(ref.bundle_id for _, _, ref in self.ledgers[node].bundles_of(version).to_replicate)
        self.said.append(f"node {args['node']} pulls {words(ids)}")
        self.ledgers[node].replicated(version, ids)
        self._report(node, Reports(replicas=((version, ids),)))

    def do_write(self, args: Args) -> None:
        """The node finishes all that it was ordered to write; `lost`: and nobody ever hears of it."""
        node, version = self.node(args["node"]), self._version(args)
        mine, self.ordered[node] = self.ordered[node], []
        self.said.append(f"node {args['node']} writes {words(ref.bundle_id for part in mine for ref in part.refs)}")
        for part in mine:
            ids = tuple(ref.bundle_id for ref in part.refs)
            report = PartReport(version, node, f"manifest-{part.index}.json", 1, "d", ids, part.index)
            self.ledgers[node].wrote(report)
            if "lost" not in args:
                self._report(node, Reports(parts=(report,)))

    def do_repeat(self, args: Args) -> None:
        """The node reports once more what it wrote: a commit that failed is tried again."""
        node, version = self.node(args["node"]), self._version(args)
        parts = self.ledgers[node].reports().parts
        self._report(node, Reports(parts=tuple(part for part in parts if part.version == version)))

    def do_cannot_write(self, args: Args) -> None:
        """The node's writing fails; `gone`: because it does not hold the bytes any more."""
        node, version = self.node(args["node"]), self._version(args)
        mine, self.ordered[node] = self.ordered[node], []
        failure = WriteFailure(version, tuple(part.index for part in mine), args["because"], "gone" in args)
        self.watches[node].failed(version, node, failure.parts, failure.reason, self.now_s)
        self._report(node, Reports(failures=(failure,)))

    def do_at_work(self, args: Args) -> None:
        """The node gives the sign that every writer gives."""
        self._report(self.node(args["node"]), Reports(at_work=(self._version(args),)))

    def do_seconds(self, args: Args) -> None:
        """So many pass; leases end."""
        self.now_s += float(args["pass"])
        for node, watch in self.watches.items():
            if node not in self.cut:
                self._obey(node, watch.tick(self.now_s))

    def do_missing(self, args: Args) -> None:
        """The coordinator misses a node."""
        self.cut.add(self.node(args["node"]))
        self._carry_out(self.board.lost(self.node(args["node"])))

    def _obey(self, node: int, orders: list[Order]) -> None:
        self.ordered[node] += [part for order in orders for part in order.parts]
        for order in orders:
            if order.term:
                names = words(ref.bundle_id for part in order.parts for ref in part.refs)
                label = self.topology.nodes[node]
                self.said.append(f"node {label} takes over {names} in term {order.term}: {order.reason}")

    def do_cut_off(self, args: Args) -> None:
        self.cut.add(self.node(args["node"]))

    def do_join(self, args: Args) -> None:
        self._join(self.node(args["node"]))

    def do_keeper_dies(self, args: Args) -> None:
        """The next keeper adopts the slots and joins."""
        node = self.node(args["node"])
        self._new_ledger(node)
        for rank in self.topology.ranks_on(node):
            self.slots[rank] = [s if s.state is SlotState.SEALED else SlotView(s.index) for s in self.slots[rank]]
            sealed = [slot.version for slot in self.slots[rank] if slot.version is not None]
            for version in sorted(v for v in sealed if v.incarnation == self.incarnation):
                layout, seals = self.bytes[rank, version][1], self._seals(rank, version)
                self.ledgers[node].adopt(rank, version, seals, layout=layout, durable=False)
        self._join(node)

    def do_new_coordinator(self, args: Args) -> None:
        """The board is lost; the nodes find the next one in this order."""
        self.board, self.history = Board(self.topology), []
        self.cut = set(range(len(self.topology.nodes)))
        for label in args["order"].split(","):
            self._join(self.node(label))

    def _join(self, node: int) -> None:
        self.cut.discard(node)
        facts = self.ledgers[node].reports()
        sealed = sorted({report.version for report in facts.sealed})
        abandoned = sorted({fact[0] for fact in facts.abandoned})
        self.said.append(f"node {self.topology.nodes[node]} joins: sealed {words(sealed)}; given up {words(abandoned)}")
        for news in self.history:
            self._tell(node, news)
        self._report(node, facts)

    def do_levels(self, args: Args) -> None:
        for version in versions_of(args["of"]):
            for node, ledger in self.ledgers.items():
                standing = ledger.standing(version)
                level = max(standing.reached, default=Level.NONE)
                what = standing.reason if standing.abandoned else f"{level.name.lower()}: {standing.reason}"
                self.said.append(f"{version} on node {self.topology.nodes[node]} is {what}")

    def do_examine(self, args: Args) -> None:
        """Keepers look at what these ranks captured of a suspect version; the bytes differ in the entry named."""
        version, bundle_id = self._version(args), args["bundle"]
        for rank in numbers(args["ranks"]):
            entries = (("bias", "same"), (args["entry"], self.bytes[rank, version][0]))
            exam = Examined(version, rank, bundle_id, entries)
            self._report(self.topology.node_of[rank], Reports(examined=(exam,)))

    # --- the coordinator

    def do_commit(self, args: Args) -> None:
        version = self._version(args)
        self.durable.add(version)
        self._carry_out(self.board.committed(version))

    def do_commit_fails(self, args: Args) -> None:
        self.board.commit_failed(self._version(args))

    def _report(self, node: int, facts: Reports) -> None:
        if node in self.cut:
            return
        for layout in facts.layouts:
            self.board.register(layout)
        self._carry_out(self.board.heard(facts.heard))
        self._carry_out(self.board.sealed(facts.sealed))
        for fact in facts.abandoned:
            self._carry_out(self.board.abandoned(*fact))
        for version, ids in facts.replicas:
            self._carry_out(self.board.replicated(version, node, ids))
        self._carry_out(self.board.due(facts.due))
        for part in facts.parts:
            self._carry_out(self.board.written(part))
        for failure in facts.failures:
            self._carry_out(self.board.failed(node, failure))
        self._carry_out(self.board.at_work(node, facts.at_work))
        for exam in facts.examined:
            self._carry_out(self.board.examined(exam))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, CommitOrder):
                parts = words(part.part for part in action.parts)
                self.said.append(f"coordinator: write the manifest of {action.version} over {parts}")
                continue
            if action.kind in OF_WRITING:  # not part of the story; what comes of it is
                for node in sorted(self.board.in_line_with(action.version, action.node) - self.cut):
                    self._tell(node, action)
                continue
            self.said.append(f"coordinator: {action.version} {action.kind.value}: {action.reason}")
            self.history.append(action)
            for node in self.ledgers:
                if node not in self.cut:
                    self._tell(node, action)

    def _tell(self, node: int, news: Announcement) -> None:
        if news.layout:
            self.ledgers[node].tables.learn(news.layout, self.board.table(news.layout))
        watch, version = self.watches[node], news.version
        if news.kind is Kind.AT_WORK:
            watch.sign(version, news.node, self.now_s)
        elif news.kind is Kind.WRITTEN:
            watch.written(version, news.node, news.parts)
            if news.report is not None:
                self.ledgers[node].wrote(news.report)
        elif news.kind is Kind.FAILED:
            self._obey(node, watch.failed(version, news.node, news.parts, news.reason, self.now_s))
        elif self.ledgers[node].told(news):
            if news.kind is Kind.PERSIST:
                self._obey(node, watch.persist(version, self.ledgers[node].bundles_of(version).parts, self.now_s))
            if news.kind is Kind.DURABLE:
                watch.forget(version)

    # --- coming back

    def do_roll_back(self, args: Args) -> None:
        """All ranks come back as the next incarnation."""
        self.lineage = self.lineage.with_(self.incarnation, self.resumed)
        self.incarnation += 1
        for rank, own in self.slots.items():
            self.slots[rank] = [s if s.state is SlotState.SEALED else SlotView(s.index) for s in own]
        self._begin_incarnation(version_of(args["to"]) if args["to"] != "nothing" else None)
        for rank, layout in self.layouts.items():
            self._report(self.topology.node_of[rank], Reports(layouts=(layout,)))
        self.said.append(f"incarnation {self.incarnation} resumed from {self.resumed or 'nothing'}")

    def _version(self, args: Args) -> Version:
        return Version(self.incarnation, int(args["step"]))

    def _ledger(self, rank: int) -> NodeLedger:
        return self.ledgers[self.topology.node_of[rank]]

    def _seals(self, rank: int, version: Version) -> tuple[Seal, ...]:
        content = self.bytes[rank, version][0]
        return tuple(Seal(bundle_id, 100, f"{version}{content}") for bundle_id in self.layouts[rank].captures)


class Archive(Parts):
    """What keepers hold and storage lists when a job has to come back; retention and cadence too."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[MemoryCopy] = []
        self.tables: dict[Version, tuple[BundleRef, ...]] = {}
        self.stored: dict[Version, Stored] = {}
        self.lineage = Lineage()
        self.suspects: set[Version] = set()
        self.bad_copies: set[Copy] = set()
        self.passed_over: dict[Version, str] = {}
        self.unread: dict[Version, str] = {}
        self.away: dict[Copy, str] = {}
        self.silent: list[str] = []
        self.cadence = Cadence()

    def run(self, name: str, args: Args) -> Lines:
        command: Callable[[Args], Lines | None] = getattr(self, f"do_{name.replace('-', '_')}")
        return [short(line) for line in command(args) or []]

    def do_job(self, args: Args) -> Lines:
        return self.place(args)

    def do_state(self, args: Args) -> Lines:
        return self.state(args)

    def do_memory(self, args: Args) -> Lines:
        """Ranks hold what they captured of a version; `without` bundles, `bytes` of another content."""
        version = version_of(args["version"])
        ranks = numbers(args["ranks"]) if "ranks" in args else list(self.layouts)
        for rank in ranks:
            for bundle_id in self.layouts[rank].captures:
                if bundle_id not in args.get("without", "").split(","):
                    self._hold(version, self.topology.node_of[rank], rank, self._seal(version, bundle_id, args))
        if "unannounced" not in args:
            self.tables[version] = self.table
        return []

    def do_replica(self, args: Args) -> Lines:
        version = version_of(args["version"])
        for bundle_id in args["bundles"].split(","):
            self._hold(version, self.node(args["node"]), None, self._seal(version, bundle_id, args))
        return []

    def do_lose(self, args: Args) -> Lines:
        self.memory = [copy for copy in self.memory if not is_in(self.node(args["node"]), copy.nodes)]
        return []

    def do_storage(self, args: Args) -> Lines:
        version = version_of(args["version"])
        seals = {ref.bundle_id: self._seal(version, ref.bundle_id, args) for ref in self.table}
        size = int(args.get("ranks", self.topology.world_size))
        self.stored[version] = Stored(version, size, self.table, seals)
        return []

    def do_lineage(self, args: Args) -> Lines:
        """`1=nothing 2=1.20`: what each incarnation resumed from."""
        resumed = {int(number): None if text == "nothing" else version_of(text) for number, text in args.items()}
        self.lineage = Lineage(resumed)
        return []

    def do_suspect(self, args: Args) -> Lines:
        self.suspects.add(version_of(args["version"]))
        return []

    def do_failed(self, args: Args) -> Lines:
        """A copy did not have the sealed bytes."""
        self.bad_copies.add(self._copy(args))
        return []

    def do_pass_over(self, args: Args) -> Lines:
        """Somebody leaves a version out."""
        self.passed_over[version_of(args["version"])] = args["because"]
        return []

    def do_unreadable(self, args: Args) -> Lines:
        """The manifest of a version stands, and cannot be read now."""
        version = version_of(args["version"])
        self.unread[version] = args["because"]
        self.stored.pop(version, None)
        return []

    def do_unreachable(self, args: Args) -> Lines:
        """A copy could not be had."""
        self.away[self._copy(args)] = args["because"]
        return []

    def do_silent(self, args: Args) -> Lines:
        """A keeper does not answer: what it holds is not known."""
        self.silent.append(args["node"])
        return self.do_lose(args)

    def do_answers(self, _: Args) -> Lines:
        """Keepers and storage can be reached again; what a keeper holds is said anew."""
        self.unread, self.away, self.silent = {}, {}, []
        return []

    def _copy(self, args: Args) -> Copy:
        node = None if args["at"] == "storage" else self.node(args["at"])
        return version_of(args["version"]), args["bundle"], node

    def do_choose(self, args: Args) -> Lines:
        wanted = version_of(args["wanted"]) if "wanted" in args else None
        decision = version_choice.choose_version(self._facts(), wanted=wanted)
        chosen = decision.value
        if isinstance(chosen, ChoiceDeferred):
            what = f"{chosen.version or 'whatever there is'}{', which is durable' if chosen.durable else ''}"
            return [f"waits for {what}", *decision.reason.split("; ")]
        return [f"chosen: {chosen.version if chosen else 'none'}", *decision.reason.split("; ")]

    def do_fetch(self, args: Args) -> Lines:
        facts = self._facts()
        choice = version_choice.choose_version(facts).value
        lines = []
        for rank in numbers(args["ranks"]):
            for fetch in version_choice.fetches(choice, rank, facts) if isinstance(choice, Choice) else ():
                names = {
                    Source.SLOT: "own slot",
                    Source.NODE: "own node",
                    Source.PEER: "node",
                    Source.STORAGE: "storage",
                }
                where = f" {self.topology.nodes[fetch.node or 0]}" if fetch.source is Source.PEER else ""
                lines.append(f"rank {rank}: {fetch.ref.bundle_id} from {names[fetch.source]}{where}")
        return lines

    def do_retire(self, args: Args) -> Lines:
        durable = versions_of(args["durable"])
        gone = retention.to_retire(
            durable,
            keep_last=int(args.get("keep_last", 2)),
            keep_every=int(args.get("keep_every", 0)),
            protected=versions_of(args.get("protected", "")),
            lineage=self.lineage,
        )
        return [f"removed, oldest first: {words(gone)}", f"kept: {words(v for v in durable if v not in gone)}"]

    def do_cadence(self, args: Args) -> Lines:
        try:
            self.cadence = Cadence.parse(args["text"])
        except ValueError as error:
            return [f"error: {error}"]
        talk = "ranks must agree" if self.cadence.needs_agreement else "every rank knows by itself"
        return [talk]

    def do_steps(self, args: Args) -> Lines:
        """Steps from..to, one every `each` seconds: which are saved."""
        saved: list[str] = []
        last_s, each = 0.0, float(args.get("each", 1))
        for count, step in enumerate(numbers(args["of"]), 1):
            decision = self.cadence.due(step=step, last_step=None, now_s=count * each, last_s=last_s)
            if decision.value:
                saved.append(str(step))
                last_s = count * each
        return [f"saved: {words(saved)}"]

    def _facts(self) -> Facts:
        quarantine, suspects = Quarantine(frozenset(self.bad_copies), self.passed_over), frozenset(self.suspects)
        unreachable = Unreachable(self.unread, self.away, tuple(self.silent))
        return Facts(
            self.memory, self.tables, self.stored, self.lineage, self.topology, suspects, quarantine, unreachable
        )

    def _hold(self, version: Version, node: int, rank: int | None, seal: Seal) -> None:
        self.memory.append(MemoryCopy.at(version, node, rank, seal))

    def _seal(self, version: Version, bundle_id: str, args: Args) -> Seal:
        return Seal(bundle_id, 100, f"{version}{bundle_id}{args.get('bytes', 'good')}")


KINDS: dict[str, type[Stage] | type[Archive] | type[Pipelines]] = {
    "running": Stage, "archive": Archive, "pipeline": Pipelines
}  # fmt: skip
