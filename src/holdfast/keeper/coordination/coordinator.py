"""The coordinator's desk: the board of core.versions.coordinator_board, fed by reports, spreading what it concludes.

Runs in the keeper of the lowest live node. It only spreads knowledge: if it dies the next one is fed by every node
repeating what it knows. All methods run under the state's lock and only queue.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import Fenced
from holdfast.core.model import Level, Version
from holdfast.core.scheduling.step_agreement import Diary, Proposal
from holdfast.core.versions.coordinator_board import FLEETING, Action, Announcement, Board, CommitOrder, Kind
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.writer_failover import MAX_WATCHED
from holdfast.keeper.rpc.messages import Appointed, Assembly, News, encode, pack
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.storage.writer import CommitJob, Committer

logger = logging.getLogger(__name__)

# Announcements that are repeated to a node that joins late.
MAX_HISTORY = 128
# A node that does not follow for so long writes nothing: its keeper is dead, or cannot reach us. A new line takes less.
ABSENT_S = 2.0
# That a version is on its way to its second copy is said no more often, however many nodes send.
SIGN_EVERY_S = 1.0


@dataclass(slots=True)
class _Follower:
    connection: Connection
    layout: str = ""  # of which it was sent the table last


class Coordinator:
    """The board of one incarnation and the nodes that follow it."""

    def __init__(self, state: NodeState, committer: Committer, assembly: Assembly) -> None:
        self._state = state
        self._committer = committer
        self._assembly = assembly
        self._board = Board(assembly.topology)
        self._diary = Diary()
        self._followers: dict[int, _Follower] = {}
        self._history: OrderedDict[tuple[Version, Kind, int], Announcement] = OrderedDict()
        self._table = ("", msgspec.Raw())  # of the layout that was announced last, encoded
        self._newest: Version | None = None  # captured
        self._sent: tuple[Version | None, float] = (None, 0.0)  # that was last said to be on its way, and when
        ledger = state.ledger  # which heard what coordinators before this one announced
        self._ahead = ledger.newest(Level.DURABLE) if ledger is not None else None  # the newest captured or durable one
        self._passed_s: OrderedDict[Version, float] = OrderedDict()  # older ones, and when all heard of work on them
        self._absent: set[int] = set()
        self._changed_s = time.monotonic()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes that follow."""
        return tuple(sorted(self._followers))

    def report(self, node: int, incarnation: int, reports: Reports) -> None:
        """Facts from `node`; its own included."""
        if incarnation != self._assembly.incarnation:
            raise Fenced(f"this coordinator serves incarnation {self._assembly.incarnation}, not {incarnation}")
        for layout in reports.layouts:
            self._board.register(layout)
        self._carry_out(self._board.heard(reports.heard))
        self._carry_out(self._board.sealed(reports.sealed))
        for version, rank, reason in reports.abandoned:
            self._carry_out(self._board.abandoned(version, rank, reason))
        for (
            version
        ) in reports.dropped:  # first: what a new coordinator is told at once must not be counted for a moment
            self._carry_out(self._board.dropped(node, version))
        for version, bundle_ids in reports.replicas:
            self._carry_out(self._board.replicated(version, node, bundle_ids))
        self._carry_out(self._board.due(reports.due))
        for part in reports.parts:
            self._carry_out(self._board.written(part))
        for failure in reports.failures:
            self._carry_out(self._board.failed(node, failure))
        self._carry_out(self._board.at_work(node, reports.at_work))
        self._carry_out(self._board.sending(node, reports.sending))
        for exam in reports.examined:
            self._carry_out(self._board.examined(exam))

    def join(self, node: int, connection: Connection) -> None:
        """A node follows from now on; what was announced before is repeated to it."""
        follower = _Follower(connection)
        self._followers[node] = follower
        self._absent.discard(node)
        for announcement in self._history.values():
            self._tell(follower, announcement, {})

    def leave(self, connection: Connection) -> None:
        """A follower's connection ended."""
        for node in [n for n, follower in self._followers.items() if follower.connection is connection]:
            del self._followers[node]
            self._board.left(node)
        self._changed_s = time.monotonic()

    def tick(self) -> None:
        """Says of nodes that are missing for a while that they write nothing."""
        if time.monotonic() - self._changed_s < ABSENT_S:
            return
        everybody = set(range(len(self._assembly.topology.nodes)))
        for node in sorted(everybody - set(self._followers) - self._absent - {self._state.node}):
            logger.info("node %d is missing", node)
            self._absent.add(node)
            self._carry_out(self._board.lost(node))

    def propose(self, proposal: Proposal) -> None:
        """Names a step for all ranks."""
        message = Appointed(incarnation=self._state.incarnation, appointment=self._diary.propose(proposal))
        for follower in self._followers.values():
            follower.connection.push(f"appointment {proposal.purpose.value}", message)
        self._state.appointed(message)

    def close(self) -> None:
        """Steps down; the followers elect anew."""
        for follower in self._followers.values():
            follower.connection.channel.abort()
        self._followers.clear()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, CommitOrder):
                self._commit(action)
            else:
                self._announce(action)

    def _announce(self, announcement: Announcement) -> None:
        logger.debug("%s %s: %s", announcement.version, announcement.kind.value, announcement.reason)
        if announcement.kind in FLEETING:
            self._pass_on(announcement)
            return
        self._history[announcement.version, announcement.kind, announcement.node] = announcement
        if announcement.kind is Kind.CAPTURED:
            self._newest = max(self._newest or announcement.version, announcement.version)
        if announcement.kind in (Kind.CAPTURED, Kind.DURABLE):
            self._ahead = max(self._ahead or announcement.version, announcement.version)
        while len(self._history) > MAX_HISTORY:
            # The newest captured version stays, however many were given up since: it is what frees slots.
            key = next(key for key in self._history if key[0] != self._newest)
            del self._history[key]
        bodies: dict[bool, bytes] = {}  # each said to many, and a table takes milliseconds to encode
        for follower in self._followers.values():
            self._tell(follower, announcement, bodies)
        self._state.hear(self._news(announcement, with_table=True))
        if announcement.kind is Kind.PERSIST:
            for node in sorted(self._absent):
                self._carry_out(self._board.lost(node))

    def _pass_on(self, announcement: Announcement) -> None:
        """Pass on to those in the same lines, or of what is sent to all, once in a second; nobody is told later.

        All hear that work goes on with a version behind a newer one. They would wait for it no more if they know the newer one to be
        durable, which a new coordinator may not know.
        """
        version, concerned = announcement.version, frozenset(self._followers)
        if announcement.kind is Kind.SENDING:
            if self._sent[0] == version and time.monotonic() - self._sent[1] < SIGN_EVERY_S:
                return
            self._sent = version, time.monotonic()
        elif announcement.kind is not Kind.AT_WORK or not self._is_told_to_all(version):
            concerned = self._board.in_line_with(version, announcement.node)
        news = self._news(announcement, with_table=False)
        body = encode(news)
        for node, follower in self._followers.items():
            if node in concerned:
                follower.connection.send_encoded(body)
        self._state.hear(news)

    def _is_told_to_all(self, version: Version) -> bool:
        if self._ahead is None or version >= self._ahead:
            return False
        if time.monotonic() - self._passed_s.get(version, 0.0) < SIGN_EVERY_S:
            return False
        self._passed_s[version] = time.monotonic()
        while len(self._passed_s) > MAX_WATCHED:
            self._passed_s.popitem(last=False)
        return True

    def _tell(self, follower: _Follower, announcement: Announcement, bodies: dict[bool, bytes]) -> None:
        """`bodies`: the message with its table and without, as far as somebody was told."""
        layout = announcement.layout
        with_table = layout != follower.layout
        if with_table not in bodies:
            bodies[with_table] = self._encoded(announcement, with_table=with_table)
        follower.connection.send_encoded(bodies[with_table])
        follower.layout = layout or follower.layout

    def _encoded(self, announcement: Announcement, *, with_table: bool) -> bytes:
        news = self._news(announcement, with_table=False)
        layout = announcement.layout
        if with_table and layout:
            if self._table[0] != layout:
                self._table = layout, pack(self._board.table(layout))
            news = msgspec.structs.replace(news, table=self._table[1])
        return encode(news)

    def _news(self, announcement: Announcement, *, with_table: bool) -> News:
        table = self._board.table(announcement.layout) if with_table and announcement.layout else ()
        return News(incarnation=self._assembly.incarnation, announcement=announcement, table=table)

    def _commit(self, order: CommitOrder) -> None:
        if not self._committer.put(CommitJob(order, self._assembly, self._state.resumed, self._committed)):
            self._committed(order.version, False)

    def _committed(self, version: Version, success: bool) -> None:
        """Take note of a commit; called from the committer's thread."""
        with self._state.lock:
            if success:
                self._carry_out(self._board.committed(version))
            else:
                self._board.commit_failed(version)
