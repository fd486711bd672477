"""Removes what goes from storage after a commit: old versions as retention says, and what dead incarnations left half
done. The latter goes also where storage is full, for then no commit may come.

Decided by `core.versions.retention`, removed by `tiers.storage.version_store`. Called by whoever committed: the coordinator's keeper, or rank 0
of a job without keepers. A process may be paused between its decision and any removal, so whether it has a say is asked
right before each. Which versions are committed is remembered from one commit to the next, for a bucket is asked once for each of them;
those that a removal rests on are looked at
anew before it, and made durable: whoever committed one may have been killed before it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from holdfast.base.errors import Fenced, HoldfastError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.retention import rests_on, to_retire
from holdfast.keeper.rpc.messages import Assembly
from holdfast.tiers.storage.version_store import Storage


class RetentionRunner:
    """Retention over the commits of one process.

    Args:
        in_hand: versions whose commit this process has not ended; they stay until it has.
    """

    def __init__(self, events: Events, in_hand: Callable[[], Collection[Version]] = tuple) -> None:
        self._events = events
        self._in_hand = in_hand
        self._kept_s: float | None = None
        self._known: set[Version] = set()  # committed, as of the last look
        self._job_id = ""

    def after(self, storage: Storage, version: Version, assembly: Assembly, resumed_from: Version | None) -> None:
        """Applies retention when `version` was just committed.

        Raises:
            Fenced: a newer incarnation runs. It may have resumed from any version, so it alone says what goes.
            HoldfastError: something old was not removed; that costs space, nothing else.
        """

        def permit() -> None:
            storage.require_job(assembly.job_id)
            if storage.incarnations.highest() > assembly.incarnation:
                raise Fenced("a newer incarnation runs; this one removes nothing any more", where=storage.where)

        permit()
        storage.marks.break_holds(assembly.incarnation)
        marked = storage.marks.pins() | set(storage.marks.held())
        protected = marked | self._keep_by_time(storage, version, assembly.keep_every_s)
        old, unfinished = self._look(storage, version, assembly, protected, resumed_from)
        halves = _left_behind(storage, unfinished, assembly.incarnation)
        self._known -= set(old)
        faults: list[HoldfastError] = []
        for remove, gone in ((storage.retire, old), (storage.discard, halves)):
            for one in gone:
                try:
                    remove(one, permit=permit)
                except Fenced:
                    raise
                except HoldfastError as error:  # a damaged one stays, and keeps no other
                    faults.append(error)
                else:
                    self._events.emit("node.retired", version=str(one))
        permit()
        storage.incarnations.sweep(assembly.incarnation)
        if faults:
            raise faults[0]

    def _look(
        self,
        storage: Storage,
        version: Version,
        assembly: Assembly,
        protected: set[Version],
        resumed_from: Version | None,
    ) -> tuple[tuple[Version, ...], list[Version]]:
        """Returns the versions that may go, and those that are not whole."""
        if assembly.job_id != self._job_id:
            self._known, self._job_id = set(), assembly.job_id
        kept: dict[str, Any] = {
            "keep_last": assembly.keep_last,
            "keep_every": assembly.keep_every,
            "lineage": Lineage(dict(assembly.lineage)).with_(assembly.incarnation, resumed_from),
        }
        sure = {version}  # this one was committed just now
        while True:
            committed, unfinished = storage.look(self._known | {version})
            in_hand = self._in_hand()  # behind the look: what it showed is in hand still, or its commit has ended
            old = to_retire(committed, **kept, protected=protected.union(in_hand))
            doubted = rests_on(old, committed, **kept) - sure
            gone = {one for one in doubted if not storage.is_durable(one)}
            sure |= doubted
            self._known = set(committed) - gone
            if not gone:
                return old, unfinished

    def _keep_by_time(self, storage: Storage, version: Version, every_s: float) -> set[Version]:
        """Marks the version that was just committed if it is the one to be kept of its minutes. The mark is a file, so
        that it outlives us; time is only measured between two commits of one process, so that no clock is trusted.
        """
        if every_s <= 0:
            return set()
        now = time.monotonic()
        if self._kept_s is None or now - self._kept_s >= every_s:
            storage.marks.keep(version)
            self._kept_s = now  # behind the mark: a version that could not be marked is not that of its minutes
        return storage.marks.kept()


def make_room(storage: Storage, assembly: Assembly) -> list[Version]:
    """Removes what dead incarnations left half done, and nothing else; returns the versions that it was of.

    Raises:
        Fenced: the incarnation is not the newest that is registered: then an older one may still commit, or a newer one
            says what goes.
        HoldfastError: something was not removed.
    """

    def permit() -> None:
        storage.require_job(assembly.job_id)
        if storage.incarnations.highest() != assembly.incarnation:
            raise Fenced("another incarnation is the newest; this one removes nothing", where=storage.where)

    permit()
    halves = _left_behind(storage, storage.unfinished(), assembly.incarnation)
    for half in halves:
        storage.discard(half, permit=permit)
    storage.incarnations.sweep(assembly.incarnation)
    return halves


def _left_behind(storage: Storage, unfinished: Iterable[Version], incarnation: int) -> list[Version]:
    """Returns which of the versions that are not whole nobody completes: of incarnations below this one, and not marked.

    Another process may have begun to retire a marked one, and brings its commit back because of the mark. It looks for marks
    when the commit is gone, so they are looked for here when that was seen.
    """
    dead = [one for one in unfinished if one.incarnation < incarnation]
    marked = storage.marks.pins() | set(storage.marks.held()) if dead else set()
    return [one for one in dead if one not in marked]
