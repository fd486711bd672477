"""What a rank has fetched of a version, and which copies turned out to be bad.

Used by `train.restore` and `train.relayout`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.errors import CorruptError, KeeperLost, StorageError, VersionNotFound
from holdfast.core.model import Version
from holdfast.core.recovery import Fetch
from holdfast.node.client import KeeperClient, Located
from holdfast.train.live import Group, LiveTensor

logger = logging.getLogger(__name__)

_BAD_COPY = (CorruptError, VersionNotFound, StorageError, KeeperLost)


@dataclass(frozen=True, slots=True)
class Fault:
    """A copy that cannot be used: of a bundle, on a node (None: storage)."""

    bundle_id: str
    node: int | None
    reason: str


@dataclass(slots=True)
class Loaded:
    """What one attempt brought this rank.

    Attributes:
        by_rank: in another layout, what became of state that belongs to single ranks, one line each.
    """

    faults: list[Fault] = field(default_factory=list)
    tensors: Mapping[str, LiveTensor] = field(default_factory=dict)
    values: dict[Group, Mapping[str, Any]] = field(default_factory=dict)
    located: list[Located] = field(default_factory=list)
    fill_seconds: float = 0.0
    by_rank: tuple[str, ...] = ()


class Fetcher:
    """Has bundles, or chunks of them, brought to this node."""

    def __init__(self, client: KeeperClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def obtain(self, version: Version, fetches: Iterable[Fetch], faults: list[Fault]) -> list[Located]:
        """All at once; if that fails, one by one, to know which copies are bad."""
        fetches = tuple(fetches)
        try:
            return list(self._client.obtain(version, fetches, timeout_s=self._timeout_s)) if fetches else []
        except _BAD_COPY as error:
            if not self._client.alive:
                raise
            logger.warning("fetching %s: %s; trying its bundles one by one", version, error)
        located: list[Located] = []
        for fetch in fetches:
            try:
                located += self._client.obtain(version, [fetch], timeout_s=self._timeout_s)
            except _BAD_COPY as error:
                if not self._client.alive:
                    raise
                faults.append(Fault(fetch.ref.bundle_id, fetch.node, error.what))
        return located
