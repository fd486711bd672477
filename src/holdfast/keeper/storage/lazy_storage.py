"""The keeper's hold on storage: opened when first needed, by a worker thread, because a mount may hang.

One LazyStorage per keeper; the root never changes during its life. Everything durable goes through tiers.storage.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

# Manifests that are kept whole: of what is restored, and of what is tried next.
MAX_KEPT = 2


class LazyStorage:
    """Opens the storage once and remembers it; a failed attempt is made again by the next caller."""

    def __init__(self, root: str, events: Events, *, encryption: KeySource | None = None) -> None:
        self._root = root
        self._encryption = encryption or KeySource()
        self.events = events
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._incarnation = 0
        self._reading = threading.Lock()
        self._kept: dict[Version, tuple[Manifest, dict[str, BundleFile]]] = {}

    def use(self, encryption: KeySource, incarnation: int) -> None:
        """Writes and reads with this key from now on. The key of a file is read again at each start: it may be another one."""
        with self._lock:
            renewed = bool(encryption.setting) and incarnation > self._incarnation
            if encryption != self._encryption or renewed:
                self._storage = None
            self._encryption, self._incarnation = encryption, max(incarnation, self._incarnation)

    def open(self) -> Storage:
        """The storage of the job.

        Raises:
            StorageError: it cannot be used, with the reason.
        """
        with self._lock:
            if self._storage is None:
                self._storage = open_storage(self._root, self.events, encryption=self._encryption)
            return self._storage

    def files(self, version: Version) -> dict[str, BundleFile]:
        """The files of a version by bundle id. The parts of its manifest are read once for all ranks of this node.

        The root is read every time: as long as it names the same parts with the same digests, what they say is known.

        Raises:
            HoldfastError: as `Storage.manifest` does.
        """
        storage = self.open()
        with self._reading:
            root, kept = storage.root(version), self._kept.get(version)
            if kept is None or kept[0] != root:
                whole = storage.manifest(version)
                kept = replace(whole, bundles=()), {file.ref.bundle_id: file for file in whole.bundles}
                self._kept[version] = kept
                while len(self._kept) > MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
            return kept[1]

    def forget(self) -> None:
        """Forget what was read of the root: it is not true any more, for another job owns it."""
        with self._lock:
            self._storage = None
        with self._reading:
            self._kept.clear()
