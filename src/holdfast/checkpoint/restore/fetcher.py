"""Knows what a rank has fetched of a version, and which copies turned out to be bad.

Used by `checkpoint.restore.restorer`, and in another layout by `checkpoint.restore.bundle_headers` and `checkpoint.restore.reshard`, which fetch chunks of bundles.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from holdfast.base.errors import CorruptError, HoldfastError, KeeperLost
from holdfast.checkpoint.entries.types import Group, LiveTensor
from holdfast.core.layout.reshard import Runs
from holdfast.core.model import BundleRef, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch
from holdfast.keeper.rpc.client import Inventory, Located
from holdfast.tiers.format import image as image_format

logger = logging.getLogger(__name__)

# What is asked for when the time is over is given this long: it may be here already.
MIN_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A copy that could not be used: of a bundle, on a node (None: storage).

    Attributes:
        kind: the class of error that was met. It says whether the copy is bad, or could only not be reached.
    """

    bundle_id: str
    node: int | None
    reason: str
    kind: type[HoldfastError] = CorruptError


def fault_of(bundle_id: str, node: int | None, error: HoldfastError) -> Fault:
    """Return what was met with a copy; of one that may be good also where."""
    place = "" if error.condemns or not error.where else f" [{error.where}]"
    return Fault(bundle_id, node, error.what + place, type(error))


@dataclass(slots=True)
class Loaded:
    """Holds what one attempt brought this rank.

    Attributes:
        ways: where each bundle came from and why from there.
        by_rank: in another layout, what became of state that belongs to single ranks, one line each.
    """

    faults: list[Fault] = field(default_factory=list)
    tensors: Mapping[str, LiveTensor] = field(default_factory=dict)
    values: dict[Group, Mapping[str, Any]] = field(default_factory=dict)
    located: list[Located] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)
    fill_seconds: float = 0.0
    by_rank: tuple[str, ...] = ()


class Holder(Protocol):
    """Gives copies: the keeper of this node, or storage alone."""

    @property
    def alive(self) -> bool:
        """Return whether it can still be asked."""

    def answers(self, timeout_s: float) -> bool:
        """Return whether it answers at all within this time."""

    def inventory(self, *, wide: bool = True) -> Inventory:
        """Return what memory holds, on all nodes that can be reached (`wide=False`: only on this one)."""

    def obtain(self, version: Version, fetches: Sequence[Fetch], *, timeout_s: float) -> tuple[Located, ...]:
        """These bundles, readable here."""

    def release(self) -> None:
        """They are no longer read."""

    def quarantine(self, version: Version, bundle_id: str, *, node: int | None, reason: str) -> None:
        """A copy is bad."""

    def resume(
        self, incarnation: int, version: Version | None, table: Sequence[BundleRef] = (), *, read_bytes: int = 0
    ) -> None:
        """All ranks loaded `version`, which consists of the bundles of `table`; `read_bytes` this one from storage itself."""


class Fetcher:
    """Has bundles, or chunks of them, brought to this node.

    Args:
        timeout_s: how long all that one call asks for may take, and once more if it is asked for one by one.
    """

    def __init__(self, client: Holder, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def obtain(self, version: Version, fetches: Iterable[Fetch], faults: list[Fault]) -> list[Located]:
        """All at once; if that fails, one by one, to know which copies cannot be used: those go to `faults`.

        Raises:
            HoldfastError: what is no other for another copy or at another time: the keeper of this node is gone or does not
                answer, there is no room, the key is missing, the copy was written by a newer holdfast.
        """
        fetches = tuple(fetches)
        try:
            return list(self._client.obtain(version, fetches, timeout_s=self._timeout_s)) if fetches else []
        except HoldfastError as error:
            self._require_mendable(error)
            logger.info("fetching %s: %s; trying its bundles one by one", version, error)
        located: list[Located] = []
        deadline = time.monotonic() + self._timeout_s
        for fetch in fetches:
            try:
                left_s = max(MIN_TIMEOUT_S, deadline - time.monotonic())
                located += self._client.obtain(version, [fetch], timeout_s=left_s)
            except HoldfastError as error:
                self._require_mendable(error)
                faults.append(fault_of(fetch.ref.bundle_id, fetch.node, error))
        return located

    def _require_mendable(self, error: HoldfastError) -> None:
        """Raises the error unless another copy may be good, or this one may be had later.

        That the keeper of this node hangs says nothing of any copy: nobody could bring one.
        """
        if not self._client.alive or not (error.condemns or error.retryable):
            raise error
        if isinstance(error, KeeperLost) and not self._client.answers(ANSWER_TIMEOUT_S):
            raise error


def fetch_of(choice: Choice, ref: BundleRef, rank: int, facts: Facts, runs: Runs) -> Fetch:
    """These chunks of a bundle from the cheapest copy for `rank`."""
    return replace(version_choice.cheapest(ref, choice, rank, facts), chunks=runs)


def prove_seal(choice: Choice, item: Located) -> None:
    """The digests of its chunks are those of the image that was agreed on: then each chunk can be proved alone.

    Raises:
        CorruptError: they are not.
    """
    if image_format.image_digest(item.seal.chunk_digests) != choice.seals[item.ref.bundle_id].digest:
        raise CorruptError("the copy is not the one that was agreed on")


def by_bundle(located: Iterable[Located]) -> dict[str, list[Located]]:
    """All that was fetched of each bundle."""
    found: dict[str, list[Located]] = defaultdict(list)
    for item in located:
        found[item.ref.bundle_id].append(item)
    return found


def chunks_of(parts: Iterable[Located], runs: Runs) -> dict[int, memoryview]:
    """These chunks of one image, in order."""
    there: dict[int, memoryview] = {}
    for part in parts:
        there.update(enumerate(image_format.chunks(part.view), part.chunks[0] if part.chunks else 0))
    return {chunk: there[chunk] for first, end in runs for chunk in range(first, end)}
