"""The line to the coordinator: finds it, reports to it, hears from it; or is it, when no lower node is alive.

One thread. The coordinator is the keeper of the lowest live node: each keeper tries the lower ones in order, and leads
itself if none answers. A keeper that is up but has not come together yet is waited for, for a bounded time; one that
does not answer (dead, stopped, cut off) is passed over and tried again later. Two coordinators at once are harmless:
they only spread what nodes reported, and storage's create-once decides about commits. Whenever the line is new,
everything is reported again; reports are idempotent.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import Fenced, HoldfastError, KeeperLost
from holdfast.core.scheduling.step_agreement import Proposal
from holdfast.core.versions.node_ledger import Reports
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.rpc.caller import Caller, dial
from holdfast.keeper.rpc.messages import AnyMessage, Appointed, Assembly, Message, News, Ping, Propose, Report
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.node_report import greeting

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 3.0
PING_EVERY_S = 1.0
# While somebody lower is up but not ready (its ranks are still coming together) we ask again this often, this long.
RETRY_S = 0.05
PATIENCE_S = 15.0
# A lower node that was not there is asked again this often: as long as two lead, nothing is complete. One that was
# there but silent costs DIAL_TIMEOUT_S each time and is left alone for longer.
RECHECK_S = 0.3
FROZEN_S = 5.0
MAX_QUEUE = 256
JOIN_TIMEOUT_S = 5.0
_ALARM = "uplink"


class _Verdict(enum.Enum):
    """Holds what became of asking a lower node."""

    FOLLOW = "it coordinates"
    WAIT = "it is up, but not ready"
    PASS = "it does not answer"


@dataclass(frozen=True, slots=True)
class _Line:
    caller: Caller
    assembly: Assembly
    leader: int


class CoordinatorClient:
    """Owner of the thread, and of the coordinator while this node is it.

    Args:
        state: the keeper's state; its lock guards everything here.
        found: makes the coordinator of an incarnation.
    """

    def __init__(self, state: NodeState, found: Callable[[Assembly], Coordinator]) -> None:
        self._state = state
        self._found = found
        self._changed = threading.Condition(state.lock)
        self._queue: deque[Message] = deque()
        self._whole = False
        self._assembly: Assembly | None = None
        self._node = -1
        self._line: _Line | None = None
        self._coordinator: Coordinator | None = None
        self._patient_until = self._retry_at = self._recheck_at = self._ping_at = 0.0
        self._frozen_until: dict[int, float] = {}
        self._passed: dict[int, str] = {}  # why, as it was said
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="holdfast coordinator client", daemon=True)
        self._thread.start()

    @property
    def coordinator(self) -> Coordinator | None:
        return self._coordinator

    @property
    def leader(self) -> int:
        """Index of the node that coordinates, as far as we know; -1 if unknown."""
        if self._coordinator is not None:
            return self._node
        return self._line.leader if self._line else -1

    def follow(self, assembly: Assembly, node: int) -> None:
        """A new incarnation: whoever led the old one leads no more. Under the state's lock."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._assembly, self._node, self._coordinator = assembly, node, None
        self._queue.clear()
        self._retry_at = 0.0
        self._patient_until = time.monotonic() + PATIENCE_S
        self._changed.notify_all()

    def leave(self) -> None:
        """The job is over: it is neither led nor followed any more. Under the state's lock."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._assembly, self._coordinator = None, None
        self._queue.clear()
        self._changed.notify_all()

    def report(self, facts: Reports) -> None:
        """Queues facts for the coordinator. Under the state's lock."""
        self._put(self._report(facts))

    def propose(self, proposal: Proposal) -> None:
        """Queues a rank's proposal. Under the state's lock."""
        self._put(Propose(proposal=proposal))

    def stop(self) -> None:
        """Ends the thread and the line."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)

    def _put(self, message: Message) -> None:
        if len(self._queue) >= MAX_QUEUE:  # the line is down for long; all is reported again when it is up
            self._queue.clear()
            self._whole = True
        self._queue.append(message)
        self._changed.notify_all()

    def _report(self, facts: Reports, *, whole: bool = False) -> Report:
        return Report.of(self._node, self._state.incarnation, facts, whole=whole)

    def _whole_report(self) -> Report:
        """Everything this node knows, in place of the facts that wait. Under the state's lock."""
        self._queue = deque(message for message in self._queue if not isinstance(message, Report))
        self._whole = False
        return self._report(self._state.need_ledger().reports(), whole=True)

    # --- the thread

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._elect()
                    self._flush()
                    self._ping()
                    self._is_well()
                except HoldfastError as error:
                    self._drop(error.what)
                except OSError as error:  # the system has no more of something: it may pass, and nobody else reports
                    reason = error.strerror or str(error)
                    self._state.alarms.warn(_ALARM, f"no line to the coordinator: {reason}; it is tried again")
                    self._drop(reason)
                    time.sleep(RETRY_S)  # what waits in the queue would let it go on at once
        except Exception as error:
            logger.exception("the coordinator client failed")
            self._state.alarms.warn(_ALARM, f"the line to the coordinator failed: {type(error).__name__}: {error}")
        finally:
            self._drop("")

    def _wait(self) -> bool:
        """Waits until there is something to do; False when stopping."""
        with self._changed:
            if self._assembly is None:
                pause_s = PING_EVERY_S
            elif self._line is None and self._coordinator is None:
                pause_s = self._retry_at - time.monotonic()
            else:
                pause_s = 0.0 if self._queue or self._whole else RECHECK_S if self.leader > 0 else PING_EVERY_S
            if pause_s > 0 and not self._stopping:
                self._changed.wait(pause_s)
            return not self._stopping

    def _elect(self) -> None:
        """Follows the lowest live node, or leads; now and then looks whether a lower one came back."""
        with self._state.lock:
            assembly, line, now = self._assembly, self._line, time.monotonic()
            broken = line is not None and (line.assembly is not assembly or not line.caller.alive)
        if broken:  # not under the lock: the line's reader may be waiting for it
            self._drop("the line broke")
        if assembly is None:
            return
        leader = self.leader
        if leader == 0 or now < (self._retry_at if leader < 0 else self._recheck_at):
            return
        for lower in range(self._node if leader < 0 else min(leader, self._node)):
            if leader >= 0 and now < self._frozen_until.get(lower, 0.0):
                continue
            verdict = self._ask(lower, assembly)
            if verdict is _Verdict.FOLLOW:
                return
            if verdict is _Verdict.WAIT and leader < 0 and time.monotonic() < self._patient_until:
                self._retry_at = time.monotonic() + RETRY_S
                return
        self._recheck_at = time.monotonic() + RECHECK_S
        if leader < 0:
            self._lead(assembly)

    def _ask(self, lower: int, assembly: Assembly) -> _Verdict:
        """Dials a lower node and introduces us with a whole report; only a coordinator takes it."""
        started = time.monotonic()
        try:
            caller = dial(
                assembly.addresses[lower],
                greeting(self._state, assembly),
                timeout_s=DIAL_TIMEOUT_S,
                on_push=lambda message: self._hear(assembly, message),
                on_lost=self._lost,
                security=self._state.security,
            )
        except KeeperLost as error:
            if self._passed.get(lower) != error.what:
                self._passed[lower] = error.what
                logger.info("node %d is passed over: %s", lower, error.what)
            if time.monotonic() - started >= DIAL_TIMEOUT_S:
                self._frozen_until[lower] = time.monotonic() + FROZEN_S
            return _Verdict.PASS
        try:
            with self._state.lock:
                if self._assembly is not assembly:
                    raise Fenced("another incarnation or job began meanwhile")
                report = self._whole_report()
            caller.call(report, timeout_s=ANSWER_TIMEOUT_S)
        except KeeperLost:
            caller.close()
            return _Verdict.PASS
        except Fenced:
            caller.close()
            raise
        except HoldfastError as error:
            logger.debug("node %d: %s", lower, error.what)
            caller.close()
            return _Verdict.WAIT
        self._drop("")
        with self._state.lock:
            if self._coordinator is not None:
                self._coordinator.close()
                self._coordinator = None
            self._line = _Line(caller, assembly, lower)
        self._passed.clear()
        logger.info("node %d coordinates", lower)
        return _Verdict.FOLLOW

    def _lead(self, assembly: Assembly) -> None:
        with self._state.lock:
            if self._assembly is not assembly:
                return  # another incarnation began meanwhile
            self._coordinator = self._found(assembly)
            self._deliver(self._coordinator, self._whole_report())
        logger.info("this node coordinates")

    def _flush(self) -> None:
        """Sends what waits, in order."""
        while True:
            with self._state.lock:
                line, coordinator = self._line, self._coordinator
                if coordinator is None and (line is None or line.assembly is not self._assembly):
                    return
                if self._whole:
                    whole = self._whole_report()  # it replaces the queue, so it must come before the queue is named
                    self._queue.appendleft(whole)
                if not self._queue:
                    return
                message = self._queue.popleft()
                if coordinator is not None:
                    self._deliver(coordinator, message)
            if line is not None:
                line.caller.call(message, timeout_s=ANSWER_TIMEOUT_S)

    def _deliver(self, coordinator: Coordinator, message: Message) -> None:
        if isinstance(message, Report):
            coordinator.report(message.node, message.incarnation, message.facts)
        elif isinstance(message, Propose):
            coordinator.propose(message.proposal)

    def _ping(self) -> None:
        """A frozen coordinator keeps its sockets open; only silence tells."""
        line = self._line
        if line is not None and time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + PING_EVERY_S
            line.caller.call(Ping(), timeout_s=ANSWER_TIMEOUT_S)

    def _is_well(self) -> None:
        with self._state.lock:
            if self.leader >= 0:
                self._state.alarms.calm(_ALARM)

    def _drop(self, reason: str) -> None:
        with self._state.lock:
            line, self._line = self._line, None
            self._whole = True
            self._retry_at = time.monotonic() + RETRY_S
        if line is not None:
            if reason:
                logger.info("node %d no longer coordinates: %s", line.leader, reason)
            line.caller.close()

    def _hear(self, assembly: Assembly, message: AnyMessage) -> None:
        with self._state.lock:
            if assembly is self._assembly:  # else the line is about to be dropped, and its job may be over
                self._take_in(message)

    def _take_in(self, message: AnyMessage) -> None:
        if isinstance(message, News):
            self._state.hear(message)
        elif isinstance(message, Appointed):
            self._state.appointed(message)
        else:
            logger.warning("the coordinator pushed %s, which means nothing here", type(message).__name__)

    def _lost(self, reason: str) -> None:
        logger.debug("the line to the coordinator ended: %s", reason)
        with self._changed:
            self._changed.notify_all()
