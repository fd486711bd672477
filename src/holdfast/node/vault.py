"""The keeper's hold on storage: opened when first needed, by a worker thread, because a mount may hang.

One Vault per keeper; the root never changes during its life. Everything durable goes through tiers.storage.
"""

from __future__ import annotations

import threading

from holdfast.base.events import Events
from holdfast.tiers.cipher import KeySource
from holdfast.tiers.storage import Storage, open_storage


class Vault:
    """Opens the storage once and remembers it; a failed attempt is made again by the next caller."""

    def __init__(self, root: str, events: Events, *, encryption: KeySource | None = None) -> None:
        self._root = root
        self._encryption = encryption or KeySource()
        self.events = events
        self._lock = threading.Lock()
        self._storage: Storage | None = None

    def open(self) -> Storage:
        """The storage of the job.

        Raises:
            StorageError: it cannot be used, with the reason.
        """
        with self._lock:
            if self._storage is None:
                self._storage = open_storage(self._root, self.events, encryption=self._encryption)
            return self._storage

    def forget(self) -> None:
        """What was read of the root is not true any more: another job owns it."""
        with self._lock:
            self._storage = None
