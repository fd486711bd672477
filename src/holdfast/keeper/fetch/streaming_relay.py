"""Bundles that are still arriving on this node, and handing on what is proved of them: so storage is read once in a job.

A bundle that only storage holds is read by one node and goes down a tree (`core.recovery.broadcast_tree`). Each node of it announces what
it is fetching here, moves `ready` forward as chunks match their digests, and serves no byte beyond it: what is damaged
on one hop never reaches the next. When all are sealed the announcement ends and the slot pool serves them like any other copy.

Asked by the next node, chunk by chunk: the one who receives decides the pace. Whoever waits is told how much moves here at
all, so that a node that is busy with other bundles is not taken for a dead one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import Fenced, KeeperError, VersionNotFound
from holdfast.core.model import Seal, Version
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import Bulk, Hello, Landed
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.format.image import CHUNK_BYTES

PIN = "handing on"
SEND_CHUNK_TIMEOUT_S = 10.0
# The longest answer to "how far?" when nothing moves; shorter than anybody's patience with an answer.
WAIT_S = 1.0
# Failures that are remembered for those who ask later; each is forgotten when its bundle is fetched again.
MAX_FAILED = 1000


@dataclass(slots=True, eq=False)
class IncomingBundle:
    """One bundle on its way into a slot.

    Attributes:
        seal: with chunk digests, as soon as it is known.
        ready: bytes from its start that are proved.
        failed: why it will never be whole.
    """

    held: HeldSlot
    offset: int
    seal: Seal | None = None
    ready: int = 0
    failed: str = ""


class IncomingBundles:
    """All bundles that are landing on this node; one per keeper. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[tuple[Version, str], IncomingBundle] = {}
        self._failed: dict[tuple[Version, str], IncomingBundle] = {}
        self._moved = 0

    def begin(self, version: Version, bundle_id: str, held: HeldSlot, offset: int) -> IncomingBundle:
        """A fetch begins."""
        with self._changed:
            self._failed.pop((version, bundle_id), None)
            landing = self._under_way[version, bundle_id] = IncomingBundle(held, offset)
            self._changed.notify_all()
            return landing

    def known(self, landing: IncomingBundle, seal: Seal) -> None:
        """Take the seal that will prove it."""
        with self._changed:
            landing.seal = seal
            self._changed.notify_all()

    def proved(self, landing: IncomingBundle, num_bytes: int) -> None:
        """The next bytes of it matched their digest."""
        with self._changed:
            landing.ready += num_bytes
            self._moved += num_bytes
            self._changed.notify_all()

    def end(self, version: Version, incoming: dict[str, IncomingBundle], failed: str = "") -> None:
        """They are sealed, or will never be."""
        with self._changed:
            for bundle_id, landing in incoming.items():
                landing.failed = failed
                if self._under_way.get((version, bundle_id)) is landing:
                    del self._under_way[version, bundle_id]
                if failed:
                    self._failed[version, bundle_id] = landing
            while len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            self._changed.notify_all()

    def find(self, version: Version, bundle_id: str) -> IncomingBundle | None:
        """Return what is under way."""
        with self._changed:
            return self._under_way.get((version, bundle_id))

    def wait(self, check: Callable[[], object], timeout_s: float) -> int:
        """Until `check` holds (asked under the lock) or the time is over; returns all bytes that ever moved here."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not check():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._moved

    def peek(self, version: Version, bundle_id: str) -> IncomingBundle | None:
        """Return what is under way or failed last, for a `check`: the lock is held already."""
        return self._under_way.get((version, bundle_id)) or self._failed.get((version, bundle_id))


class RelayRequests:
    """Knows what the next node of a tree may ask. Several threads."""

    def __init__(self, state: NodeState, incoming: IncomingBundles) -> None:
        self._state = state
        self._incoming = incoming

    def ask(self, connection: Connection, request: messages.AskLanding) -> Landed:
        """Return how far a bundle has come.

        Raises:
            VersionNotFound: its fetch failed here; the asker goes to storage itself.
        """
        self._require_present(connection.greeted)
        version, bundle_id = request.version, request.bundle_id
        seen: IncomingBundle | None = None

        def news() -> bool:
            nonlocal seen
            now = self._incoming.peek(version, bundle_id)
            if seen is None:
                seen = now
            # Sealed, failed, or further than the asker knows.
            return seen is not None and (now is not seen or bool(seen.failed) or seen.ready > request.beyond)

        copy = self._held(version, bundle_id)
        # The slot pool's lock is not taken while this one is held: sealing ends the landing, and that wakes us.
        moved = self._incoming.wait(lambda: copy is not None or news(), WAIT_S)
        copy = self._held(version, bundle_id)
        if copy is not None:
            return Landed(id=request.id, ready=copy.length, moved=moved, seal=None if request.beyond else copy)
        if seen is None:
            return Landed(id=request.id, ready=0, moved=moved)
        if seen.failed:
            raise VersionNotFound(f"bundle {bundle_id} of {version} did not arrive here: {seen.failed}")
        return Landed(id=request.id, ready=seen.ready, moved=moved, seal=None if request.beyond else seen.seal)

    def pull(self, connection: Connection, request: messages.PullLanding) -> None:
        """Sends proved bytes; the reply and the bytes leave from the reader's own thread.

        Raises:
            VersionNotFound: they are not here (any more). KeeperError: no such piece, or it is not proved yet.
        """
        self._require_present(connection.greeted)
        end = request.start + request.length
        with self._state.lock:
            landing = self._incoming.find(request.version, request.bundle_id)
            copy = self._state.slot_pool.find(request.version, request.bundle_id)
            if copy is not None:
                held, offset, ready = copy[0], copy[1].offset, copy[1].seal.length
            elif landing is not None and not landing.failed:
                held, offset, ready = landing.held, landing.offset, landing.ready
            else:
                raise VersionNotFound(f"bundle {request.bundle_id} of {request.version} is not here (any more)")
            if not (0 <= request.start < end <= ready) or request.length > CHUNK_BYTES:
                raise KeeperError(f"bytes {request.start} to {end} of bundle {request.bundle_id} are not to be had")
            held.pins[PIN] += 1
        try:
            at = offset + request.start
            connection.channel.send_bulk(
                messages.encode(Bulk(id=request.id, length=request.length)),
                held.slot.view[at : at + request.length],
                timeout_s=SEND_CHUNK_TIMEOUT_S,
            )
        finally:
            self._state.unpin(held, PIN)

    def _held(self, version: Version, bundle_id: str) -> Seal | None:
        with self._state.lock:
            copy = self._state.slot_pool.find(version, bundle_id)
            return copy[1].seal if copy else None

    def _require_present(self, hello: Hello) -> None:
        """Refuse a request that is of another job, or of an incarnation that is over (S7)."""
        assembly = self._state.assembly
        if assembly is not None and hello.job_id != assembly.job_id:
            raise KeeperError(f"this keeper serves job {assembly.job_id}")
        if hello.incarnation < self._state.incarnation:
            raise Fenced(f"incarnation {hello.incarnation} is over; {self._state.incarnation} has begun")
