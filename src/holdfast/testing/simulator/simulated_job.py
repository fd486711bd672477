"""The simulated job: trainers in lockstep, keepers that talk, a coordinator, storage, and recoveries; in virtual time.

Every decision is the real one: NodeLedger and slots say what may be overwritten, Board says what is captured, replicated,
due and complete, core.recovery.version_choice chooses what to come back from, retention what may go. The shell around them is modelled
after keeper.coordination.coordinator, keeper.coordination.coordinator_client, keeper.storage.writer and
checkpoint.restore.restorer; testing.simulator.observer judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.core.layout import bundles
from holdfast.core.layout.parity_groups import STANDS
from holdfast.core.layout.parity_stripes import Piece
from holdfast.core.model import BundleRef, RankLayout, Topology, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, ChoiceDeferred, Quarantine
from holdfast.core.versions.coordinator_board import OF_WRITING, Announcement, Board, CommitOrder, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.slot_guard import SlotState, SlotView
from holdfast.testing.simulator import persisting
from holdfast.testing.simulator import simulated_restore as choice_model
from holdfast.testing.simulator.clock import Clock, Violation
from holdfast.testing.simulator.network import Network, Storage
from holdfast.testing.simulator.observer import Observer, groups_of
from holdfast.testing.simulator.simulated_escalation import Climb
from holdfast.testing.simulator.simulated_keeper import Desk, Held, Keeper, as_seals
from holdfast.testing.simulator.trainer_state import Memories, stepper

STEP_S, TICK_S, BEGIN_S, RETRY_S = 0.4, 0.25, 1.0, 0.2
DURABLE_EVERY, MAX_HISTORY = 5, 128


class Job:
    """One run of a cluster.

    Args:
        clock: of the run; its chance decides the shape of the cluster too.
        parity: whether nodes keep parity of each other, and no replicas.
    """

    def __init__(self, clock: Clock, *, parity: bool = False) -> None:
        chance = clock.chance
        num_nodes, per_node = chance.randint(3, 6) if parity else chance.randint(1, 4), chance.randint(1, 2)
        node_of = tuple(node for node in range(num_nodes) for _ in range(per_node))
        self.clock, self.network, self.storage = clock, Network(clock), Storage(clock)
        way = f"parity:{chance.randint(3, num_nodes)}" if parity else "replica"
        self.topology = Topology(tuple(f"n{node}" for node in range(num_nodes)), node_of, redundancy=way)
        self.table = self._draw_state()
        self.layouts = {rank: self._layout(rank) for rank in range(self.topology.world_size)}
        slots = chance.choice([2, 2, 3])
        self.keepers = [Keeper(node, self.topology, slots) for node in range(num_nodes)]
        self.observer = Observer(self.table, self.topology.world_size, parity_of=groups_of(self.table, self.topology))
        self.memories, self.every = Memories(self.layouts, self.table), chance.choice([1, 1, 2])
        self.climb = Climb(recover=self.recover, kill=self.end_process, lose=lambda: self.memories.lose(self.layouts))
        self.step = 0
        self.alive = dict.fromkeys(self.layouts, True)
        self.hung: set[int] = set()
        self.attempt = 0  # of recoveries; a later one makes an earlier one void
        self.recovering = False
        self.recoveries = 0
        self.takeovers = 0
        self.skipped: dict[int, list[tuple[int, Version]]] = {}
        self.newest_durable_step = self.newest_captured_step = -1
        self.poisoned: set[int] = set()  # ranks whose next save is not what their twins save
        clock.say(f"cluster of {num_nodes} nodes x {per_node} ranks, {len(self.table)} bundles, {slots} slots")
        self.recover("start")
        for keeper in self.keepers:
            clock.after(chance.uniform(0, TICK_S), self._ticker(keeper.node))

    def _draw_state(self) -> tuple[BundleRef, ...]:
        ranks, chance = range(self.topology.world_size), self.clock.chance
        refs = [BundleRef(f"own{rank}", (rank,), 0, 1, 1, "f") for rank in ranks]
        if chance.random() < 0.6 and len(ranks) > 1:
            count = chance.randint(1, len(ranks))
            refs += [BundleRef(f"all#{i}", tuple(ranks), i, count, 1, "f") for i in range(count)]
        return tuple(refs)

    def _layout(self, rank: int) -> RankLayout:
        mine = tuple(ref for ref in self.table if rank in ref.ranks)
        return RankLayout(rank, mine, bundles.captures(mine, rank, self.topology))

    @property
    def incarnation(self) -> int:
        """The one that trains, or is about to."""
        return self.storage.incarnation

    def _ticker(self, node: int) -> Callable[[], None]:
        def tick() -> None:
            self._tick(self.keepers[node])
            self.clock.after(TICK_S, tick)

        return tick

    # --- training

    def train(self, attempt: int) -> None:
        """One more step of all ranks, if all are there and can talk."""
        if attempt != self.attempt or self.recovering:
            return
        dead = [rank for rank, alive in self.alive.items() if not alive or rank in self.hung]
        nodes = range(len(self.keepers))
        apart = any(not self.network.both_ways(a, b) for a in nodes for b in nodes if a < b) and self.split_hurts
        if not dead and not apart:
            if self.climb.strikes(self.step):
                return
            self.climb.made(self.step)
            version = Version(self.incarnation, self.step)
            for rank in self.layouts:
                self.clock.after(self.clock.chance.uniform(0, 0.15), self._stepper(attempt, rank, version))
            self.step += 1
        self.clock.after(STEP_S * self.clock.chance.uniform(0.8, 1.2), lambda: self.train(attempt))

    split_hurts = False  # whether partitions hold up the trainers too

    def _stepper(self, attempt: int, rank: int, version: Version) -> Callable[[], None]:
        """The update takes a moment; then the step is noted and saved."""

        def goes_on() -> bool:
            return attempt == self.attempt and self.alive[rank] and not self.recovering and rank not in self.hung

        save = self._saver(attempt, rank, version) if version.step % self.every == 0 else lambda: None
        return stepper(self.clock, self.memories.of[rank], version, goes_on, save)

    def _saver(self, attempt: int, rank: int, version: Version) -> Callable[[], None]:
        deadline = self.clock.now_s + BEGIN_S

        def save() -> None:
            if attempt == self.attempt and self.alive[rank] and not self.recovering:
                self._save(attempt, rank, version, deadline, save)

        return save

    def _save(self, attempt: int, rank: int, version: Version, deadline: float, again: Callable[[], None]) -> None:
        keeper = self.keepers[self.topology.node_of[rank]]
        ledger = keeper.ledger
        if not keeper.alive or ledger is None:
            self.skipped.setdefault(keeper.node, []).append((rank, version))
            return
        if any(held.view.state is SlotState.WRITING for held in keeper.slots[rank]):
            self._abandon(keeper, rank, version, "the save before is not finished")
            return
        decision = ledger.begin(rank, version, keeper.views(rank, self.clock.now_s))
        self._give_up_copies(keeper)
        if decision.value is None:
            if self.clock.now_s >= deadline or "abandoned" in decision.reason:
                self._abandon(keeper, rank, version, decision.reason)
            else:
                self.clock.after(RETRY_S, again)
            return
        held = keeper.slots[rank][decision.value]
        if held.view.pins:
            raise Violation("S5", f"rank {rank} may overwrite slot {decision.value} while its bytes are needed")
        held.view = SlotView(decision.value, SlotState.WRITING, version)
        held.seals, held.content = {}, {}
        held.durable = version.step % DURABLE_EVERY == DURABLE_EVERY - 1
        self.observer.check_kept(self.keepers)
        life = keeper.life
        self.clock.after(self.clock.chance.uniform(0.03, 0.3), lambda: self._seal(attempt, life, rank, version, held))

    def _seal(self, attempt: int, life: int, rank: int, version: Version, held: Held) -> None:
        keeper = self.keepers[self.topology.node_of[rank]]
        writing = held.view.state is SlotState.WRITING and held.view.version == version
        if attempt != self.attempt or life != keeper.life or not self.alive[rank] or not writing or not keeper.ledger:
            return
        refs = {ref.bundle_id: ref for ref in self.table}
        digests = {b: self.observer.saves(version, refs[b]) for b in self.layouts[rank].captures}
        if rank in self.poisoned:
            self.poisoned.discard(rank)
            digests = {b: self._poison(digest, refs[b], version, rank) for b, digest in digests.items()}
        held.seals, held.content = digests, dict(digests)
        held.view = SlotView(held.view.index, SlotState.SEALED, version, held.view.pins)
        self.observer.seals(version, rank, keeper.node, tuple(digests))
        self.observer.notices(version, self.keepers)
        self.clock.say(f"rank {rank} sealed {version}")
        self.report(keeper, keeper.ledger.seal(rank, version, as_seals(digests), durable=held.durable))

    def _poison(self, digest: str, ref: BundleRef, version: Version, rank: int) -> str:
        nodes = {self.topology.node_of[rank] for rank in ref.ranks}
        if len(nodes) < 2:
            return digest  # only a twin in another node, which captures it too, can tell
        self.observer.spoiled.add(version)
        return f"{digest}!{rank}"  # no two go wrong in the same way

    def _abandon(self, keeper: Keeper, rank: int, version: Version, reason: str) -> None:
        if keeper.ledger is not None:
            told = keeper.ledger.abandon(rank, version, reason)
            self.report(keeper, Reports(abandoned=(told,) if told else ()))

    def broken(self, invariant: str, what: str) -> None:
        raise Violation(invariant, what)

    # --- keepers and their coordinator

    def report(self, keeper: Keeper, reports: Reports) -> None:
        """Facts to the coordinator that the keeper follows; none if it follows nobody."""
        if keeper.follows is None or keeper.ledger is None or reports == Reports():
            return
        target, life = keeper.follows
        incarnation, mine = keeper.ledger.incarnation, keeper.life
        desk = self.keepers[target]

        def arrive() -> None:
            if desk.alive and desk.life == life and desk.desk and desk.desk.incarnation == incarnation:
                self._take_in(desk, keeper.node, reports)

        # One connection, on which nothing overtakes: the board concludes from a later report what a rank left out.
        self.network.send(keeper.node, target, arrive, lambda: self._broken(keeper, mine), ordered=True)

    def _broken(self, keeper: Keeper, life: int) -> None:
        if keeper.life == life:
            keeper.follows = None

    def _take_in(self, keeper: Keeper, node: int, facts: Reports) -> None:
        assert keeper.desk is not None
        board = keeper.desk.board
        for layout in facts.layouts:
            board.register(layout)
        self.carry_out(keeper, board.heard(facts.heard))
        self.carry_out(keeper, board.sealed(facts.sealed))
        for fact in facts.abandoned:
            self.carry_out(keeper, board.abandoned(*fact))
        for version in facts.dropped:
            self.carry_out(keeper, board.dropped(node, version))
        for version, bundle_ids in facts.replicas:
            self.carry_out(keeper, board.replicated(version, node, bundle_ids))
        self.carry_out(keeper, board.due(facts.due))
        persisting.take_in(self, keeper, node, facts)

    def carry_out(self, keeper: Keeper, actions: Sequence[Announcement | CommitOrder]) -> None:
        """Carry out what the board concluded."""
        for action in actions:
            if isinstance(action, CommitOrder):
                persisting.commit(self, keeper, action)
            else:
                self._announce(keeper, action)

    def _announce(self, keeper: Keeper, news: Announcement) -> None:
        assert keeper.desk is not None
        if news.kind in OF_WRITING:
            for node in sorted(keeper.desk.board.in_line_with(news.version, news.node) & keeper.desk.followers):
                self._tell(keeper, self.keepers[node], news)
            return
        self.observer.check_news(news, self.storage)
        self.clock.say(f"node {keeper.node} announces {news.version} {news.kind.value}")
        if news.kind is Kind.CAPTURED:
            self.newest_captured_step = max(self.newest_captured_step, news.version.step)
        if news.kind is Kind.DURABLE:
            self.newest_durable_step = max(self.newest_durable_step, news.version.step)
        keeper.desk.history.append(news)
        del keeper.desk.history[:-MAX_HISTORY]
        for node in sorted(keeper.desk.followers):
            self._tell(keeper, self.keepers[node], news)

    def _give_up_copies(self, keeper: Keeper) -> None:
        """Those that the guard would like to overwrite: the coordinator is asked."""
        asked, keeper.dropping = tuple(keeper.dropping), []
        self.report(keeper, Reports(dropped=asked))

    def _tell(self, desk: Keeper, keeper: Keeper, news: Announcement) -> None:
        assert desk.desk is not None
        table = desk.desk.board.table(news.layout) if news.layout else ()
        life, followed = keeper.life, (desk.node, desk.life)

        def arrive() -> None:
            if keeper.alive and keeper.life == life and keeper.follows == followed:
                self._hear(keeper, news, table)

        def lost() -> None:
            if desk.desk is not None:
                desk.desk.followers.discard(keeper.node)
            self._broken(keeper, life)

        self.network.send(desk.node, keeper.node, arrive, lost)

    def _hear(self, keeper: Keeper, news: Announcement, table: tuple[BundleRef, ...]) -> None:
        fresh = news.kind in OF_WRITING or keeper.take(news, table, self.clock.now_s)
        self._give_up_copies(keeper)
        if not fresh:
            return
        if any(self.alive[rank] for rank in keeper.ranks):
            self.observer.told(news)
        if news.kind is Kind.CAPTURED:
            self._replicate(keeper, news.version, self.clock.now_s + 20.0)
            self._make_parity(keeper, news.version, self.clock.now_s + 20.0)
        persisting.heard(self, keeper, news)

    def _replicate(self, keeper: Keeper, version: Version, deadline: float) -> None:
        """Pulls what this node keeps replicas of; tries again while there is hope."""
        ledger = keeper.ledger
        if ledger is None or not keeper.alive or version.incarnation != ledger.incarnation:
            return
        held = keeper.replicas.setdefault(version, {})
        wanted = [
            (home, rank, ref)
            for home, rank, ref in ledger.bundles_of(version).to_replicate
            if ref.bundle_id not in held
        ]
        for home, rank, ref in wanted:
            source = self.keepers[home].find(rank, version)
            if (
                source is not None
                and source.intact
                and self.keepers[home].alive
                and self.network.both_ways(keeper.node, home)
            ):
                digest = source.content[ref.bundle_id]
                one = {ref.bundle_id: digest}
                held[ref.bundle_id] = (rank, Held(SlotView(0, SlotState.SEALED, version), one, dict(one)))
                self.observer.seals(version, rank, keeper.node, (ref.bundle_id,))
                ledger.replicated(version, (ref.bundle_id,))
                self.report(keeper, Reports(replicas=((version, (ref.bundle_id,)),)))
        if [ref for _, _, ref in wanted if ref.bundle_id not in held] and self.clock.now_s < deadline:
            self.clock.after(0.3 * self.network.slow, lambda: self._replicate(keeper, version, deadline))

    def _make_parity(self, keeper: Keeper, version: Version, deadline: float) -> None:
        """Makes this node's piece of parity, of what all members of its group hold; tries again while there is hope."""
        ledger = keeper.ledger
        if ledger is None or not keeper.alive or version.incarnation != ledger.incarnation or version in keeper.parity:
            return
        made = ledger.bundles_of(version)
        if not made.of_parity:
            return
        covers = [
            self.keepers[node].seals_of(version, names)
            if self.keepers[node].alive and self.network.both_ways(keeper.node, node)
            else None
            for node, names in zip(made.group, made.of_parity, strict=True)
        ]
        whole = tuple(each for each in covers if each is not None)
        if len(whole) == len(covers):
            keeper.parity[version] = Piece(version, made.group.index(keeper.node), whole)
            self.observer.parity.setdefault(version, set()).add(keeper.node)
            ledger.replicated(version, (STANDS,))
            self.report(keeper, Reports(replicas=((version, (STANDS,)),)))
        elif self.clock.now_s < deadline:
            self.clock.after(0.3 * self.network.slow, lambda: self._make_parity(keeper, version, deadline))

    def _tick(self, keeper: Keeper) -> None:
        """Finds the coordinator: the lowest living node that can be reached; joins it if it is another one."""
        if not keeper.alive or keeper.ledger is None or self.recovering:
            return
        lowest = next(k for k in self.keepers if k.alive and k.ledger and self.network.both_ways(keeper.node, k.node))
        followed = (lowest.node, lowest.life)
        incarnation = keeper.ledger.incarnation
        if lowest.node == keeper.node and (keeper.desk is None or keeper.desk.incarnation != incarnation):
            keeper.desk = Desk(Board(self.topology), incarnation)
            self.clock.say(f"node {keeper.node} coordinates incarnation {incarnation}")
        if lowest.desk is None or lowest.desk.incarnation != incarnation:
            return
        if keeper.follows != followed or keeper.node not in lowest.desk.followers:
            keeper.follows = followed
            lowest.desk.followers.add(keeper.node)
            self.report(keeper, keeper.ledger.reports())
            for news in list(lowest.desk.history):
                self._tell(lowest, keeper, news)
        persisting.tick(self, keeper)

    # --- deaths and recoveries

    def end_process(self, rank: int) -> None:
        """A trainer's process ends, with the live state in it."""
        self.kill_rank(rank)
        self.memories.of[rank].die()

    def kill_rank(self, rank: int) -> None:
        """A trainer dies; its keeper gives up what it was writing."""
        keeper = self.keepers[self.topology.node_of[rank]]
        self.alive[rank] = False
        self.hung.discard(rank)
        if not keeper.alive and any(held.view.version for held in keeper.slots[rank]):
            self.observer.lost.add(keeper.node)  # between two keepers the trainers alone hold the memory
            keeper.slots[rank] = [Held(SlotView(i)) for i in range(keeper.num_slots)]
        for held in keeper.slots[rank]:
            if held.view.state is SlotState.WRITING and held.view.version is not None:
                version, held.view = held.view.version, SlotView(held.view.index)
                self._abandon(keeper, rank, version, "its trainer died")

    def kill_keeper(self, keeper: Keeper) -> None:
        """A keeper dies. Living trainers keep its slots for the next one; without them its memory is gone."""
        if not any(self.alive[rank] for rank in keeper.ranks):
            self.lose_node(keeper)
            return
        if not all(self.alive[rank] for rank in keeper.ranks):
            self.observer.lost.add(keeper.node)  # the dead one's slots were mapped by nobody else
            for rank in keeper.ranks:
                if not self.alive[rank]:
                    keeper.slots[rank] = [Held(SlotView(i)) for i in range(keeper.num_slots)]
        keeper.alive = False
        self.observer.renewed.add(keeper.node)
        writing = [
            (r, h.view.version) for r, own in keeper.slots.items() for h in own if h.view.state is SlotState.WRITING
        ]
        self.skipped.setdefault(keeper.node, []).extend((rank, v) for rank, v in writing if v is not None)
        keeper.forget()
        self.clock.after(self.clock.chance.uniform(0.1, 1.0), lambda: self._renew(keeper))

    def _renew(self, keeper: Keeper) -> None:
        if keeper.alive:
            return
        keeper.alive = True
        if self.recovering or not self.storage.resumed:
            return
        lineage = Lineage({i: v for i, v in self.storage.resumed.items() if i != self.incarnation})
        ledger = keeper.new_ledger(self.incarnation, lineage, self.storage.resumed[self.incarnation], self.table)
        for rank in keeper.ranks:
            ledger.register(self.layouts[rank])
        keeper.adopt({rank: self.layouts[rank].fingerprint for rank in keeper.ranks})
        for rank, version in self.skipped.pop(keeper.node, []):
            if version.incarnation == self.incarnation:
                ledger.abandon(rank, version, "there was no keeper")
        self.clock.say(f"keeper {keeper.node} is renewed")

    def lose_node(self, keeper: Keeper) -> None:
        """A node with everything on it; an empty one takes its place a little later."""
        for rank in keeper.ranks:
            self.alive[rank] = False
            self.hung.discard(rank)
        self.memories.lose(keeper.ranks)
        keeper.alive = False
        keeper.clear()
        self.observer.lost.add(keeper.node)
        self.observer.complete = None
        self.clock.after(self.clock.chance.uniform(0.5, 2.0), lambda: setattr(keeper, "alive", True))

    def recover(self, why: str) -> None:
        """All ranks come back as the next incarnation; can be interrupted anywhere and begun again."""
        self.attempt += 1
        self.recovering = True
        attempt = self.attempt
        self.clock.say(f"recovery {attempt}: {why}")
        self.memories.break_off()
        for rank in self.layouts:
            self.kill_rank(rank)
        self.clock.after(
            self.clock.chance.uniform(0.1, 0.5), lambda: self._gather(attempt, Quarantine(), self.clock.now_s)
        )

    def _gather(self, attempt: int, quarantine: Quarantine, since_s: float) -> None:
        """Everybody there? Then the facts, the choice, and its proof."""
        if attempt != self.attempt:
            return
        nodes = range(len(self.keepers))
        there = all(keeper.alive for keeper in self.keepers) and not self.storage.down
        there = there and all(self.network.both_ways(a, b) for a in nodes for b in nodes)
        chosen = version_choice.choose_version(choice_model.facts(self, quarantine)).value if there else None
        if not there or isinstance(chosen, ChoiceDeferred):
            if self.clock.now_s - since_s > 120:
                raise Violation("V2", "a recovery found no end")
            self.clock.after(0.3, lambda: self._gather(attempt, quarantine, since_s))
            return
        self.clock.after(self.clock.chance.uniform(0.1, 0.6), lambda: self._load(attempt, chosen, quarantine, since_s))

    def _load(self, attempt: int, choice: Choice | None, quarantine: Quarantine, since_s: float) -> None:
        """Every rank verifies what it was told to load; one NO, and the plan is made again."""
        if attempt != self.attempt:
            return
        facts = choice_model.facts(self, quarantine)
        bad = choice_model.bad_copies(self, choice, facts) if choice else set()
        if bad:
            if len(quarantine.copies | bad) == len(quarantine.copies):
                raise Violation("V2", f"a copy that failed is tried again: {sorted(bad)[0]}")
            again = replace(quarantine, copies=quarantine.copies | bad)
            self.clock.after(0.1, lambda: self._gather(attempt, again, since_s))
            return
        version = choice.version if choice else None
        self.observer.check_choice(version, self.storage, self.keepers)
        older = choice_model.older(self, version, quarantine) if self.climb.wants_older else version
        self.climb.came_back(older, version)
        live = self.memories.agreed(version, Lineage(dict(self.storage.resumed))) if older == version else None
        self._resume(older, live)

    def _resume(self, version: Version | None, live: Version | None) -> None:
        """All hold the state of `live`, if that is one, else of `version`, which the lineage goes on from."""
        number = self.storage.incarnation + 1
        lineage = Lineage(dict(self.storage.resumed))
        self.storage.incarnation = number
        self.storage.resumed[number] = version
        self.skipped = {}
        self.recoveries += 1
        self.alive = dict.fromkeys(self.layouts, True)
        self.hung = set()
        for keeper in self.keepers:
            keeper.desk, keeper.follows, keeper.life = None, None, keeper.life + 1
            ledger = keeper.new_ledger(number, lineage, version, self.table)
            for rank in keeper.ranks:
                ledger.register(self.layouts[rank])
            keeper.collect(self.clock.now_s)
        self.observer.resumes(version, self.keepers)
        self.recovering = False
        came_to = live or version
        self.memories.resumed(Version(number, came_to.step) if came_to else None)
        self.step = came_to.step + 1 if came_to else 0
        self.newest_captured_step = self.newest_durable_step = -1
        how = f", and goes on from the live state of {live}" if live else ""
        self.clock.say(f"incarnation {number} resumed from {version or 'nothing'}{how}")
        attempt = self.attempt
        self.clock.after(STEP_S, lambda: self.train(attempt))
