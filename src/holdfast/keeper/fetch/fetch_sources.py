"""The places that one fetch reads bundles from: storage, the memory of another node, a node that hands on what arrives.

Every byte is proved before it counts: against the seal of the manifest or of the peer, which must be the one that all
ranks agreed on. What is proved is announced at once (`keeper.fetch.streaming_relay`), so that the next node need not wait for the rest.
One thread uses one of these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from holdfast.base.errors import CorruptError, HoldfastError, KeeperError, VersionNotFound
from holdfast.core.model import Seal, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.keeper.fetch.parity_rebuild import ParityReader
from holdfast.keeper.fetch.streaming_relay import IncomingBundle, IncomingBundles
from holdfast.keeper.replication.image_transfer import PeerReader, require
from holdfast.keeper.rpc.messages import Assembly
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.node_report import greeting
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.manifest import BundleFile

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class FetchTarget:
    """A bundle to fetch, and where in the slot it goes.

    Attributes:
        came_from: where it really came from: a bundle of storage that another node handed on is a peer's.
        seconds: what that took.
    """

    fetch: Fetch
    offset: int
    landing: IncomingBundle | None = None
    came_from: Source = Source.STORAGE
    seconds: float = 0.0


class OpenPlaces:
    """Opens what one fetch reads from, each once: other keepers, and a version's manifest in storage.

    Args:
        lazy_storage: opened at first use.
        stopping: asked before each chunk.

    Attributes:
        parity: reads what only parity has.
    """

    def __init__(self, state: NodeState, lazy_storage: LazyStorage, stopping: Callable[[], bool]) -> None:
        self._state = state
        self._assembly: Assembly | None = None
        self._stopping = stopping
        self._lazy_storage = lazy_storage
        self._peers: dict[int, PeerReader] = {}
        self._stored: dict[str, BundleFile] = {}
        self.parity = ParityReader(self.peer)

    def peer(self, node: int) -> PeerReader:
        """Return the connection to a node's keeper.

        Raises:
            KeeperError: the job has no such node. KeeperLost: nobody answers there.
        """
        if node not in self._peers:
            assembly = self._assembly or self._state.assembly
            if assembly is None or not 0 <= node < len(assembly.addresses):
                raise KeeperError(f"node {node} is not part of the job")
            hello = greeting(self._state, assembly)
            self._peers[node] = PeerReader(
                assembly.addresses[node], hello, self._stopping, self._state.security, urgent=True
            )
        return self._peers[node]

    def stored(self, version: Version, bundle_id: str) -> BundleFile:
        """Return what the manifest says of a bundle's file.

        Raises:
            VersionNotFound: nothing.
        """
        self._stored = self._stored or self._lazy_storage.files(version)
        if bundle_id not in self._stored:
            raise VersionNotFound(f"the manifest of {version} does not list bundle {bundle_id}")
        return self._stored[bundle_id]

    def close(self) -> None:
        """Ends the connections."""
        for peer in self._peers.values():
            peer.close()


class Sources(OpenPlaces):
    """Reads whole bundles for one fetch; arguments as of OpenPlaces.

    Args:
        incoming: told of what arrives, for those who wait for the same.
        assembly: where the keepers are, if the job has not come together here yet.
    """

    def __init__(
        self,
        state: NodeState,
        lazy_storage: LazyStorage,
        incoming: IncomingBundles,
        stopping: Callable[[], bool],
        assembly: Assembly | None = None,
    ) -> None:
        super().__init__(state, lazy_storage, stopping)
        self._assembly = assembly
        self._events = lazy_storage.events
        self._incoming = incoming
        self.progress: Callable[[int], None] = lambda _: None

    def read(self, version: Version, spot: FetchTarget, view: memoryview) -> Seal:
        """Fills `view` with the bundle and proves it; returns its seal with chunk digests."""
        fetch, started = spot.fetch, time.perf_counter()
        try:
            spot.came_from = fetch.source
            if fetch.source is Source.STORAGE:
                return self._from_storage_or_relay(version, spot, view)
            if fetch.source is Source.PEER and fetch.node is not None:
                with self._span("restore.peer", version, spot):
                    return self._from_peer(version, fetch, fetch.node, view)
            if fetch.source is Source.PARITY:
                with self._span("restore.parity", version, spot):
                    return self.parity.read(version, fetch, 0, view, self.progress)
        finally:
            spot.seconds = time.perf_counter() - started
        raise VersionNotFound(f"bundle {fetch.ref.bundle_id} of {version} is not on this node any more")

    def _from_storage_or_relay(self, version: Version, spot: FetchTarget, view: memoryview) -> Seal:
        via = spot.fetch.via
        if via is not None:
            try:
                with self._span("node.passed_on", version, spot):
                    seal = self._from_relay(version, spot, via, view)
            except HoldfastError as error:
                if self._stopping():
                    raise
                self._events.count("relay_fallbacks", 1)
                logger.warning(
                    "node %d did not hand bundle %s on (%s); it is read from storage",
                    via,
                    spot.fetch.ref.bundle_id,
                    error.what,
                )
            else:
                spot.came_from = Source.PEER
                return seal
        with self._span("node.read", version, spot):
            return self._from_storage(version, spot, view)

    def _span(self, name: str, version: Version, spot: FetchTarget) -> AbstractContextManager[object]:
        ref = spot.fetch.ref
        return self._events.span(name, version=str(version), bundle=ref.bundle_id, size_bytes=spot.fetch.seal.length)

    def _from_storage(self, version: Version, spot: FetchTarget, view: memoryview) -> Seal:
        storage, file = self._lazy_storage.open(), self.stored(version, spot.fetch.ref.bundle_id)
        where = storage.bundles.where(version, file)
        image_format.check_length(len(view), file.seal, where)
        self._known(spot, file.seal, where)
        proof = _Proof(view, file.seal, where, lambda count: self._proved(spot, count))
        proof.done = spot.landing.ready if spot.landing is not None else 0  # what a failed relay already brought
        storage.bundles.read_into(version, file, view, proof.arrived)
        image_format.check_digest(tuple(proof.digests), file.seal, where)
        return file.seal

    def _from_relay(self, version: Version, spot: FetchTarget, node: int, view: memoryview) -> Seal:
        seal = self.peer(node).read_landing_into(
            version,
            spot.fetch.ref.bundle_id,
            view,
            lambda seal: self._known(spot, seal, f"node {node}"),
            lambda count: self._proved(spot, count),
        )
        self._events.count("relay_received_bytes", len(view))
        return seal

    def _from_peer(self, version: Version, fetch: Fetch, node: int, view: memoryview) -> Seal:
        bundle_id, where = fetch.ref.bundle_id, f"node {node}"
        try:
            peer = self.peer(node)
            seal = require(peer.seals(version, (bundle_id,)), bundle_id, where)
            peer.read_into(version, seal, view, self.progress)
        except HoldfastError as error:
            what = f"node {node}, bundle {bundle_id}: {error.what}"
            raise type(error)(what, where=error.where, remedy=error.remedy) from error
        return seal

    def _known(self, spot: FetchTarget, seal: Seal, where: str) -> None:
        if seal.digest != spot.fetch.seal.digest:
            raise CorruptError(f"bundle {seal.bundle_id} there is not the one that was agreed on", where=where)
        if spot.landing is not None:
            self._incoming.known(spot.landing, seal)

    def _proved(self, spot: FetchTarget, count: int) -> None:
        self.progress(count)
        if spot.landing is not None:
            self._incoming.proved(spot.landing, count)


class _Proof:
    """Checks chunks of `view` as its bytes arrive from the start on, and tells of each once."""

    def __init__(self, view: memoryview, seal: Seal, where: str, tell: Callable[[int], None]) -> None:
        self._view = view
        self._seal = seal
        self._where = where
        self._tell = tell
        self._count = 0
        self.digests: list[str] = []
        self.done = 0

    def arrived(self, count: int) -> None:
        """So many more bytes are there."""
        self._count += count
        while True:
            at = len(self.digests) * image_format.CHUNK_BYTES
            end = min(at + image_format.CHUNK_BYTES, len(self._view))
            if at >= len(self._view) or end > self._count:
                return
            digest = image_format.chunk_digest(self._view[at:end])
            image_format.check_chunk(len(self.digests), digest, self._seal, self._where)
            self.digests.append(digest)
            if end > self.done:
                self._tell(end - max(at, self.done))
