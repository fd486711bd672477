"""This rank's tie to its node's keeper: made at restore, noticed when it tears, mended behind training's back.

When the keeper dies the slots stay mapped here. The memory level is then reported lost, once; the next save asks for a
new keeper, which one thread of ours starts or finds, tells about the job, and hands the slots to. Until then saves are
given up with a reason, and every version given up meanwhile is announced at the next save: the other ranks hold it in a
slot that the guard would otherwise never release.

Other nodes know their peers' keepers by the ports that were published when the job came together. So every rank holds
the port of its keeper: whoever replaces it listens there again, whatever else the machine starts meanwhile.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, CorruptError, HoldfastError, KeeperLost, LevelNotReached
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.core.model import BundleRef, Level, RankLayout, Version
from holdfast.core.pipeline.idle_stats import Idle
from holdfast.core.scheduling.step_agreement import Appointment
from holdfast.keeper.rpc.client import Assembly, KeeperClient, Slot
from holdfast.keeper.rpc.messages import Progress
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.keeper.rpc.viewer import CALL_TIMEOUT_S
from holdfast.tiers.memory.slots import read_header
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.wire import tcp

logger = logging.getLogger(__name__)

# The overwrite guard can be held up by at most as many versions as there are slots; more need not be announced.
MAX_SKIPPED = 16
JOIN_TIMEOUT_S = 30.0
# How long one question to a silent keeper waits; it is asked again.
ASK_S = 1.0
# One that answers at all does so within this; less it is not given, however short a wait is.
LEAST_ASK_S = 0.2
# A keeper that is silent for so long is as good as none.
SILENT_S = 10.0
# Why a version that this rank had copied never becomes captured.
LOST = "its keeper died before it was sealed"
# How long a restore waits for a new keeper to know what was captured; the coordinator may be another one.
RECOLLECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Says what an incarnation resumed from; the arguments of `KeeperClient.resume`.

    Attributes:
        table: every bundle of the job at `version`, for keepers that come later: nobody else tells them.
    """

    incarnation: int
    version: Version | None
    table: tuple[BundleRef, ...] = ()


@dataclass(frozen=True, slots=True)
class _KeeperKnowledge:
    """Holds what a keeper knows of the incarnation that saves."""

    assembly: Assembly | None = None
    layout: RankLayout | None = None
    shared: tuple[str, ...] = ()
    resumed: Origin | None = None

    @property
    def incarnation(self) -> int:
        """Its number; 0 before the job came together."""
        return self.assembly.incarnation if self.assembly is not None else 0


class Unannounced:
    """Versions that this rank gave up while nobody could be told."""

    def __init__(self) -> None:
        self._versions: deque[tuple[Version, str]] = deque(maxlen=MAX_SKIPPED)

    def __contains__(self, version: Version) -> bool:
        return any(each[0] == version for each in tuple(self._versions))

    def add(self, version: Version, reason: str = "the keeper of its node was lost") -> None:
        """`version` was given up."""
        self._versions.append((version, reason))

    def take_back(self, version: Version) -> bool:
        """Return whether `version` was given up without anybody hearing of it: then it may be saved after all."""
        found = next((each for each in self._versions if each[0] == version), None)
        if found is not None:
            self._versions.remove(found)
        return found is not None

    def announce(self, client: KeeperClient, before: Version | None = None) -> None:
        """Tells what was given up meanwhile; the others hold those versions in slots that they cannot reuse before.
        With `before`, only of older ones, for this one may be come back to.
        """
        for told in tuple(self._versions):
            if before is None or told[0] < before:
                client.abandon(*told)
                with suppress(ValueError):  # another thread has just told it
                    self._versions.remove(told)


class KeeperLink:
    """The connection of one rank.

    Args:
        root: checkpoint path or URL, the same on every rank.
        on_appointment: called in the reader thread with every agreed step.
    """

    def __init__(
        self, root: str, config: Config, *, rank: int, events: Events, on_appointment: Callable[[Appointment], None]
    ) -> None:
        self._root = root
        self._config = config
        self._encryption = KeySource.of(config)
        self._rank = rank
        self._events = events
        self._on_appointment = on_appointment
        self._client: KeeperClient | None = None
        self._lock = threading.RLock()  # a signal's handler may close in between
        self._mending: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        self._behind: list[threading.Thread] = []
        self._closed = False
        self._reported = False
        self._unmended = ""
        self._silent_since_s = 0.0
        self.unannounced = Unannounced()
        self._slots: tuple[Slot, ...] = ()
        self.assembly: Assembly | None = None
        self.layout: RankLayout | None = None
        self.shared: tuple[str, ...] = ()  # registered with the layout
        self.begun: tuple[RankLayout, ...] = ()  # of versions that slots may hold, the newest last
        self.resumed: Origin | None = None
        self._before = _KeeperKnowledge()
        self._unsealed: tuple[Version, ...] = ()  # begun with keepers that died before they were whole
        self._captured: Version | None = None  # in slots that were given to another keeper, which may not know it yet
        self._page: Callable[[], tuple[int, ...]] = tuple
        self._port: tuple[str, socket.socket] | None = None

    @property
    def client(self) -> KeeperClient | None:
        client = self._client
        return client if client is not None and client.alive else None

    @property
    def last_client(self) -> KeeperClient | None:
        """The connection of now or, where it ended, the last one: it remembers what was announced."""
        return self._client

    def open(self, *, patience_s: float = 0.0) -> KeeperClient:
        """Starts or finds the keeper of this node and connects. If the one before died with slots of saves in them, this one is
        told of the incarnation that they are of, so that it knows what was captured. `patience_s`: as `ensure_keeper` has it.

        Raises:
            KeeperError: it did not start. InUse: another process is this rank. ConfigError: unfit runtime directory.
        """
        self._closed = False
        self._detach()
        client = self._client = self._connect(patience_s)
        if self._slots and self._saved.resumed is not None:
            try:
                self._tell(client, self._saved)
            except KeeperLost:
                raise
            except HoldfastError as error:
                logger.warning("what was captured is not known to the new keeper: %s", error)
        return client

    def recollect(self) -> None:
        """Waits a moment until the keeper that was told what was captured says so itself: all ranks must have told it."""
        version, self._captured = self._captured, None
        client = self.client
        if client is None or version is None or self._saved.incarnation != version.incarnation:
            return
        try:
            client.announced.wait(version, Level.CAPTURED, RECOLLECT_S)
        except LevelNotReached as error:
            pass_on(error)
            logger.warning("what was captured is not known to the new keeper: %s", error)

    def assembled(self, assembly: Assembly) -> None:
        """The job came together for a restore. Until that is done, and `resumed` is set, saves are of the incarnation before."""
        self._before = self._saved
        self.assembly, self.layout, self.resumed = assembly, None, None
        self.begun = ()  # of other ranks, perhaps

    @property
    def _saved(self) -> _KeeperKnowledge:
        """Return what a keeper must know of the incarnation that saves are of."""
        if self.resumed is None:
            return self._before
        return _KeeperKnowledge(self.assembly, self.layout, self.shared, self.resumed)

    def hand_over(self, client: KeeperClient) -> None:
        """Gives the slots of a keeper that died to this one, which must know the job and the layout; if there are any."""
        if self._slots:
            client.adopt(self._slots)
            self._slots = ()

    def go_without_keeper(self, *, finished: bool) -> None:
        """The job goes on without keepers; until `open` none is looked for. `finished`: what this one holds may go."""
        silent = self.silent
        with self._lock:
            self._closed = True
        self._say_goodbye(finished=finished, silent=silent)
        self._let_port_go()
        self._client = None

    def assemble(self, assembly: Assembly, key_id: str) -> None:
        """Tells the keeper who belongs to the job, and the key that it has; errors as `KeeperClient.assemble` and `require`."""
        self._encryption = replace(self._encryption, expected=key_id)
        self.require().assemble(assembly, self._encryption)

    def require(self) -> KeeperClient:
        """The connection.

        Raises:
            KeeperLost: there is none now.
        """
        client = self.client
        if client is None:
            raise KeeperLost("the keeper of this node is gone", remedy="a new one is started at the next save")
        return client

    @property
    def silent(self) -> bool:
        """Return whether the keeper did not answer a save and has not answered since: it is frozen, or starved."""
        return self._asking is not None and self._asking.is_alive()

    @property
    def trouble(self) -> str:
        """Return why there will be no keeper soon; empty if there is one, or one may just be starting."""
        if self.client is None:
            return self._unmended
        if self.silent and time.monotonic() - self._silent_since_s > SILENT_S:
            return f"the keeper of this node has not answered for {SILENT_S:g} s"
        return ""

    def heard_nothing(self, client: KeeperClient) -> None:
        """The keeper lives and did not answer in time. Until it does, nobody waits for it again."""
        with self._lock:
            if self._closed or self.silent or not client.alive:
                return
            logger.error("the memory level is lost: the keeper of this node does not answer; training goes on")
            self._events.emit("memory_level_lost", reason="the keeper does not answer", rank=self._rank)
            self._silent_since_s = time.monotonic()
            self._asking = threading.Thread(target=self._ask, args=(client,), name="holdfast asking", daemon=True)
            self._asking.start()

    def _ask(self, client: KeeperClient) -> None:
        while not self._closed and client.alive:
            if client.answers(ASK_S):
                logger.warning("the memory level is back: the keeper of this node answers again")
                self._events.emit("memory_level_back", rank=self._rank, pid=client.welcome.pid)
                return

    def went_on(self, version: Version) -> None:
        """Training is at `version`: nobody comes back to what was given up before it, and other ranks need not wait."""
        self._note("what was given up", lambda client: self.unannounced.announce(client, version))

    def note_cadence(self, reason: str) -> None:
        """Note how often this rank saves, and why, for `holdfast status`."""
        self._note("the cadence", lambda client: client.note_cadence(reason))

    def note_idle(self, idle: Idle) -> None:
        """Note how long this rank waits in a step and what fits there, for `holdfast status`. In any thread."""
        self._note("the waits", lambda client: client.note_idle(idle))

    def _note(self, what: str, tell: Callable[[KeeperClient], None]) -> None:
        client = self.client
        if client is not None:
            try:
                tell(client)
            except KeeperLost as error:
                pass_on(error)
                logger.info("the keeper did not hear of %s: %s", what, error)

    def show_waits(self, page: Callable[[], tuple[int, ...]]) -> None:
        """The keeper, and each that replaces it, works in the waits that the page of these descriptors shows; (): none."""
        self._page = page
        client = self.client
        if client is not None:
            self._show(client)

    def _show(self, client: KeeperClient) -> None:
        page = self._page()
        try:
            if page:
                client.show_waits(page)
        except HoldfastError as error:
            logger.info("the keeper's work keeps to no waits: %s", error)

    def mend(self) -> None:
        """Starts to look for a new keeper unless that is under way. Returns at once."""
        with self._lock:
            if self._closed or self.client is not None or (self._mending is not None and self._mending.is_alive()):
                return
            mending = self._mending = threading.Thread(target=self._mend, name="holdfast-keeper", daemon=True)
            mending.start()

    def wait_mended(self, timeout_s: float) -> bool:
        """Return whether a keeper is there, after an attempt to replace a dead one, also one that died this moment. One that a
        signal stopped is continued.
        """
        client, deadline = self.client, time.monotonic() + timeout_s
        if client is not None and not client.answers(min(ASK_S, max(LEAST_ASK_S, timeout_s))):
            if client.wake() and self._asking is not None:
                self._asking.join(max(0.0, min(ASK_S, deadline - time.monotonic())))  # it hears the answer
            until = min(deadline, time.monotonic() + ASK_S)
            while client.alive and time.monotonic() < until:  # a keeper that is frozen stays
                time.sleep(0.01)
        self.mend()
        thread = self._mending
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.client is not None

    def close(self, *, finished: bool) -> None:
        """Says goodbye and unmaps the slots; `finished`: this rank will not come back."""
        silent = self.silent
        with self._lock:
            self._closed = True
        if self._mending is not None and self._mending.is_alive():
            self._mending.join(JOIN_TIMEOUT_S)
        if self._asking is not None:
            self._asking.join(JOIN_TIMEOUT_S)
        self._say_goodbye(finished=finished, silent=silent)
        for slot in self._slots:
            slot.close()
        self._let_port_go()

    def behind(self, work: Callable[[], None], name: str) -> None:
        """Does `work`, which talks to the keeper, in a thread that `close` joins; it MUST end when the connection does."""
        self._behind = [thread for thread in self._behind if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._behind.append(thread)

    def _say_goodbye(self, *, finished: bool, silent: bool) -> None:
        """`silent`: it has been waited for in vain already, and reads our goodbye when it wakes up."""
        client = self.client
        if client is not None:
            try:
                client.goodbye(finished=finished, timeout_s=ASK_S if silent else CALL_TIMEOUT_S)
            except HoldfastError as error:
                logger.warning("the keeper did not take our goodbye: %s", error)
                client.wake()  # it reads it, and ends with what it holds
        if self._client is not None:
            self._client.close()
        for thread in self._behind:
            thread.join(JOIN_TIMEOUT_S)
        self._behind.clear()

    def _connect(self, patience_s: float = 0.0) -> KeeperClient:
        try:
            client = self._greet(patience_s)
        except KeeperLost as error:  # it answered, and then its time was over: the job before was its last
            pass_on(error)
            logger.info("the keeper that was found has ended (%s); the next one is asked", error)
            client = self._greet(patience_s)
        try:
            client.on_lost(self._lost)
            client.announced.on_appointment(self._on_appointment)
            self._hold_port(client.welcome.address)
        except BaseException:  # of a signal's handler, for one: nobody else would end its thread
            client.close()
            raise
        return client

    def _hold_port(self, address: str) -> None:
        if not address.startswith("tcp:") or (self._port is not None and self._port[0] == address):
            return
        self._let_port_go()
        host, port = tcp.parse(address)
        try:
            self._port = address, tcp.hold(self._config.listen or host, port)
        except (OSError, ConfigError) as error:
            pass_on(error)
            logger.info("port %d is not held for the next keeper of this node: %s", port, error)

    def _let_port_go(self) -> None:
        if self._port is not None:
            self._port[1].close()
            self._port = None

    def _greet(self, patience_s: float) -> KeeperClient:
        place = ensure_keeper(self._root, self._config, patience_s=patience_s)
        return KeeperClient.connect(place.socket, job=place.job, rank=self._rank)

    def _lost(self, reason: str) -> None:
        with self._lock:
            if self._reported or self._closed:
                return
            self._reported = True
        logger.error("the memory level is lost: the keeper of this node is gone (%s); training goes on", reason)
        self._events.emit("memory_level_lost", reason=reason, rank=self._rank)

    def _mend(self) -> None:
        try:
            if not self._closed:
                self._rejoin()
        except Exception as error:  # noqa: BLE001 - the top of the thread: the next save starts another one
            logger.warning("no new keeper yet: %s", error)
            self._unmended = f"no keeper can be started: {error}"
            self._events.emit("keeper_not_replaced", reason=str(error), rank=self._rank)

    def _detach(self) -> None:
        """Keeps the slots of the keeper that was, for the next one."""
        if self._client is not None:
            self._captured = self._client.announced.captured or self._captured
            slots = self._client.detach()
            begun = ((slot, self._client.begun.get(slot.slot_id)) for slot in slots)
            lost = (version for slot, version in begun if version is not None and not _holds(slot, version))
            self._unsealed = (*self._unsealed, *lost)
            self._slots = (*self._slots, *slots)
            self._client = None

    def _tell(self, client: KeeperClient, told: _KeeperKnowledge) -> None:
        """A new keeper gets to know the job and the layout, and gets the slots of the one before."""
        if told.assembly is not None:
            client.assemble(told.assembly, self._encryption)
        for earlier in self.begun:  # a version whose layout nobody knows would keep its slot for ever
            if told.layout is not None and earlier != told.layout:
                client.register(earlier)
        if told.layout is not None:
            client.register(told.layout, told.shared)
        self.hand_over(client)
        if told.resumed is not None:
            client.resume(told.resumed.incarnation, told.resumed.version, told.resumed.table)

    def _rejoin(self) -> None:
        if self._client is not None:  # who sends may find out before who reads, and that one is stopped now
            self._lost("its connection broke")
        self._detach()
        client = self._connect()
        try:  # nobody may save before the new keeper knows the job and has the slots
            self._tell(client, _KeeperKnowledge(self.assembly, self.layout, self.shared, self.resumed))
            self._show(client)
            for version in self._unsealed:
                if version not in self.unannounced:  # else it may be saved after all
                    client.abandon(version, LOST)
                    client.announced.take(Progress(version=version, reached=(), reason=LOST, abandoned=True))  # now
        except BaseException:
            self._slots = (*self._slots, *client.detach())
            raise
        self._unsealed = ()
        self._reported, self._unmended = False, ""
        self._client = client
        logger.warning("the memory level is back: a new keeper (process %d) adopted the slots", client.welcome.pid)
        self._events.emit("memory_level_back", rank=self._rank, pid=client.welcome.pid)


def _holds(slot: Slot, version: Version) -> bool:
    """Return whether a slot that a keeper has left holds `version` whole."""
    try:
        header = read_header(slot)
    except CorruptError:
        return False
    return header is not None and header.version == version
