"""Coming back: one version on all ranks, each bundle from its cheapest copy, verified, or the same error everywhere.

Rank 0 gathers what keepers and storage have and decides. In the layout that was saved every rank wants whole bundles;
in any other (`checkpoint.restore.reshard`) boxes of them. It fetches them, checks every chunk against
the seal while it fills the live tensors, and votes (`checkpoint.restore.version_decision`). One NO and the plan is made again: the next source,
else the next older version. Only when all have loaded is the state applied, "resumed from" recorded, and saving allowed.
Every step can be interrupted: nothing is recorded before the end.

A fresh start is only: no manifest, no inventory. Versions that exist and cannot be used are an error, never a silent
start from nothing. Those that were in memory alone and went with their node are gone: then the job begins anew, aloud
(`core.recovery.begin_anew`). Nor does anything begin with objects of which an attempt has filled a part: a version may vanish while
it is read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.base.errors import CorruptError, HoldfastError, StorageFull, UsageError, VersionNotFound
from holdfast.base.events import Events
from holdfast.base.handler_errors import pass_on
from holdfast.base.progress_report import Meter, progress_text
from holdfast.base.terminal import some_of
from holdfast.checkpoint.device import chunk_staging
from holdfast.checkpoint.device.pinned_writes import PinnedWrites
from holdfast.checkpoint.entries.entries import Loading, left_out_text
from holdfast.checkpoint.entries.types import Group, LoadRecord, SavedTensor
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import FIRST_START, Job, RestoreRequest
from holdfast.checkpoint.restore import tensor_fill as fill
from holdfast.checkpoint.restore.fetcher import Fault, Fetcher, Holder, Loaded, fault_of
from holdfast.checkpoint.restore.reshard import OtherLayout
from holdfast.checkpoint.restore.storage_source import StorageSource
from holdfast.checkpoint.restore.tensor_fill import Source
from holdfast.checkpoint.restore.version_decision import Decisions
from holdfast.checkpoint.restore.version_vote import Verdict, remedies
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors.peer_restore import LiveFill
from holdfast.checkpoint.survivors.survivor_state import remains
from holdfast.core.layout import reshard
from holdfast.core.model import BundleRef, Version
from holdfast.core.recovery import shared_reading, version_choice
from holdfast.core.recovery.version_choice import Choice, Fetch
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.storage.shared_reads import SharedReads
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)


_SOURCES = {
    "slot": "its own slot", "node": "its node's memory", "peer": "another node's memory", "parity": "parity on other nodes", "storage": "storage",
    "cache": "what another rank of its node had read from storage",
    "preloaded": "its keeper, which fetched it while the trainers started", "live": "what it still held", "twin": "a twin's live state", "note": "its own note",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Says what a restore did on this rank.

    Attributes:
        version: what was loaded; None after a fresh start.
        reason: why this version, and why not the newer ones.
        bytes: bytes of images by source: `slot` (own), `node`, `preloaded` (fetched by this node's keeper while the trainers
            started), `peer`, `parity` (of other nodes), `storage`, `cache` (the machine's page cache, into which another rank of the node had read
            it from storage); after a failure of others also `live` (what this process still held), `twin`
            (a twin's live state), `note` (what this rank left behind itself).
        bundles: number of bundles by source.
        seconds: by source, until the bundles were present on this node; `fill`: verifying and copying them; `total`.
        refused: copies that failed, one line each, over all ranks.
        not_loaded: of a restore that was not strict: entries and values that the version lacks; they are as they were.
        not_used: those of the version that no object takes.
        misfit: those that both have and that differ, with the difference; they are as they were.
        left_out: parameters and buffers that are not saved (`exclude`): they are as the script made them.
        sources: by bundle, where its bytes came from and why from there.
        why: the same in one sentence.
        info: what this rank's caller wrote beside the save.
        by_rank: after a change of layout, what became of state that belongs to single ranks (random numbers, positions of
            loaders), one line each.
    """

    version: Version | None
    reason: str
    bytes: Mapping[str, int] = field(default_factory=dict)
    bundles: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    not_loaded: tuple[str, ...] = ()
    not_used: tuple[str, ...] = ()
    misfit: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    by_rank: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Return where most of the bytes came from, in one phrase; for the record of an incident."""
        if self.version is None:
            return "nothing: it begins anew"
        found = {name: count for name, count in self.bytes.items() if name != "note" or len(self.bytes) == 1}
        return _SOURCES[max(found, key=lambda name: found[name], default="slot")]

    def tell(self, events: Events) -> None:
        """Tell observers and the timeline."""
        events.emit("restored", version=str(self.version), seconds=self.seconds["total"], reason=self.reason)

    def __str__(self) -> str:
        if self.version is None:
            return f"started afresh: {self.reason}"
        sources = ", ".join(f"{self.bytes[name]} bytes from {name}" for name in self.bytes)
        bad = f"; refused: {' | '.join(self.refused)}" if self.refused else ""
        bad += f"; not saved, and as they were made: {some_of(self.left_out)}" if self.left_out else ""
        bad += f"; of single ranks: {' | '.join(self.by_rank)}" if self.by_rank else ""
        return f"resumed from {self.version} in {self.seconds.get('total', 0):.2f} s ({self.why or sources}; {self.reason}){bad}"


@dataclass(slots=True)
class _Fitting:
    """Holds what one attempt brought, before anything of it is loaded.

    Attributes:
        nodes: where each bundle came from.
        loading: which entry goes where; None if a copy was bad.
    """

    loaded: Loaded
    sources: list[Source]
    nodes: Mapping[str, int | None]
    loading: Loading | None = None


class Restorer:
    """One restore of one rank. Collective: every rank makes the same calls.

    Args:
        asked: what of; where it is not strict, what fits is loaded and the rest is reported.
        timeout_s: how long fetching the bundles may take, and how long storage is waited for that cannot be read.
        node_directory: of the ranks of this node and their keeper; None: what several of them want is not read together.

    Attributes:
        recorded: the saved version that this incarnation descends from.
        fleeting: the version that was loaded, if memory alone holds it: None if storage has it too, or nothing was loaded.
        table: every bundle of the job at that version; empty if that is not known.
        decisions: which version it is.
    """

    def __init__(
        self,
        job: Job,
        client: Holder,
        *,
        state: State,
        storage: Storage,
        asked: RestoreRequest,
        timeout_s: float,
        node_directory: Path | None = None,
    ) -> None:
        self._job = job
        self._client = client
        self._state = state
        self._storage = storage
        self._asked = asked
        self._fetcher = Fetcher(client, timeout_s=timeout_s)
        self._straight = Fetcher(StorageSource(storage), timeout_s=timeout_s)
        self.decisions = Decisions(job, client, storage, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._node_directory = node_directory
        self._shared: SharedReads | None = None
        self._num_attempts = 0
        self._read_bytes = 0
        self.recorded: Version | None = None
        self.fleeting: Version | None = None
        self.table: tuple[BundleRef, ...] = ()

    def run(self, *, live: bool) -> RestoreReport:
        """Loads the newest usable version, or that which was asked for, or nothing if there is nothing or none is wanted.

        With `live`, what survivors still hold of a newer step is taken instead, if that is enough for all.

        Raises:
            VersionNotFound: versions exist, none can be used; says why for each. CorruptError: every copy was bad.
            MismatchError: the objects are not those that were saved. On every rank the same class.
        """
        started = time.perf_counter()
        report: RestoreReport | None = None
        wanted = self._asked.version or self._job.wish.version
        if self._asked.fresh:
            collectives.together(self._job.group, self._state.require_untouched)
            report = RestoreReport(
                None,
                "asked for a fresh start; the newest versions of the run before stay until `holdfast rm` removes them",
            )
        else:
            collectives.together(self._job.group, self._await_pinned)
            report = self._living() if live and wanted is None else None
            remains.forget()  # what was not used is about to be overwritten
            if report is None:
                report = self._newest(wanted)
                self.recorded = report.version
        self._resume(self.recorded)
        report = replace(report, seconds={**report.seconds, "total": time.perf_counter() - started})
        logger.info("%s", report)
        return report

    # For who loads piece by piece (`adapters.dcp`).

    def choose(self, wanted: Version | None) -> Choice | None:
        """The newest usable version, or `wanted`; None if there is none at all. Collective.

        Raises:
            HoldfastError: versions exist, and none can be used; says why for each.
        """
        found = self.decisions.choose(wanted)
        if found.choice is None:
            self._nothing(found, wanted)
        return found.choice

    def reading(self, choice: Choice) -> OtherLayout:
        """Reads what is wanted of a version, whatever layout it has."""
        return OtherLayout(
            self._job.group,
            self._state,
            self._fetcher,
            facts=self.decisions.facts,
            vote=lambda faults: self.decisions.vote(choice, faults),
            strict=self._asked.strict,
        )

    def _living(self) -> RestoreReport | None:
        """Restore from what the survivors hold, where that is newer than all that was saved; None: it is not, or not
        enough.

        What is recorded is the saved version: the lineage holds what can be found again. For that it need not be read.
        """
        fill = LiveFill(self._job, self._state)
        offers = fill.offers()
        if all(offer.live is None for offer in offers):
            return None
        found = self.decisions.newest_saved()
        saved = found.choice or found.awaited
        if saved is None and found.exists and not found.lost:
            return None  # an error, which the usual way tells
        self.recorded = saved.version if saved is not None else None
        self.table = found.choice.bundles if found.choice is not None else ()
        filled = fill.run(offers, self.recorded)
        if filled is None:
            return None
        return RestoreReport(filled.version, filled.reason, bytes=filled.bytes, seconds={"fill": filled.seconds})

    def _newest(self, wanted: Version | None) -> RestoreReport:
        while True:
            found = self.decisions.choose(wanted)
            if found.choice is None:
                return self._nothing(found, wanted)
            report = self._attempt(found, found.choice)
            if report is not None:
                self.table = found.choice.bundles
                self.fleeting = None if found.choice.in_storage else found.choice.version
                return report

    def _attempt(self, found: Verdict, choice: Choice) -> RestoreReport | None:
        """The report, or None if some rank found a bad copy."""
        self._read_bytes = 0
        self._num_attempts += 1
        try:
            if collectives.unanimous(self._job.group, self._is_layout(choice)):
                fitting = collectives.together(self._job.group, lambda: self._fitting(choice))
                loaded = fitting.loaded
                if not self.decisions.vote(choice, loaded.faults):
                    return None
                # It fits on every rank. Before that none may change anything: a script may go on with what it has.
                collectives.together(self._job.group, lambda: self._fill(choice, fitting))
                if not self.decisions.vote(choice, loaded.faults):
                    return None
            else:
                other = self._load_elsewhere(choice)
                if other is None:
                    return None
                loaded = other
            record = collectives.together(self._job.group, lambda: self._state.apply(loaded.values, loaded.tensors))
            return self._report(choice, found.reason, loaded, record)
        finally:
            if self._shared is not None:
                self._shared.close()
                self._shared = None
            if self._client.alive:
                self._client.release()

    def _nothing(self, found: Verdict, wanted: Version | None) -> RestoreReport:
        refused = self.decisions.refused
        if not found.exists and wanted is None:
            if self._asked.required:
                raise VersionNotFound(
                    f"a checkpoint was expected, and there is none: {found.reason}",
                    where=self._storage.where,
                    remedy=FIRST_START,
                )
            collectives.together(self._job.group, self._state.require_untouched)
            return RestoreReport(None, found.reason)
        if found.lost and wanted is None and not self._asked.required:
            collectives.together(self._job.group, self._state.require_untouched)
            logger.error("%s: the job begins anew, and all that was trained is lost: %s", found.lost, found.reason)
            return RestoreReport(None, f"{found.lost}; {found.reason}")
        kind = CorruptError if refused else VersionNotFound
        what = f"{wanted} cannot be used" if wanted else "versions exist, but none can be used"
        raise kind(
            f"{what}: {'; '.join([found.reason, *refused])}",
            where=self._storage.where,
            remedy=remedies("repair or remove what is named", self._job.lineage),
        )

    # One attempt, on this rank.

    def _await_pinned(self) -> None:
        """Waits for what the script queued for pinned memory of the state, so that it does not come behind what is loaded."""
        if not PinnedWrites().end(self._state.gather(), chunk_staging.TAKE_S):
            raise UsageError(
                f"a device does not come to what it writes to pinned memory of the state within {chunk_staging.TAKE_S:g} s",
                remedy="synchronize the device before restore(), or start this process anew",
            )

    def _is_layout(self, choice: Choice) -> bool:
        """Return whether this rank would save the very bundles of the version: then each is loaded whole."""
        group = self._job.group
        if choice.world_size != group.world_size:
            return False
        refs = [ref for ref in choice.bundles if ref.has(group.rank)]
        now = self._state.gather()
        if reshard.is_layout(refs, [live.shard for live in now.tensors.values()], now.still):
            return True
        later = self._state.predict()  # the version has optimizer state, and these objects do not yet
        return later is not None and reshard.is_layout(refs, later.values(), now.still)

    def _load_elsewhere(self, choice: Choice) -> Loaded | None:
        """Load from any other layout; None if some rank found a bad copy."""
        logger.info("loading %s, saved by %d ranks, into another layout", choice.version, choice.world_size)
        other = self.reading(choice)
        num_bytes = sum(live.local.nbytes for live in self._state.gather().tensors.values())
        meter = _meter(choice.version, num_bytes)
        loaded = other.load(choice, meter.add)
        if loaded is not None:
            rank, nodes = self._job.group.rank, self._job.topology.nodes
            facts = self.decisions.facts
            refs = {item.ref.bundle_id: item.ref for item in loaded.located}
            loaded.ways = {
                name: version_choice.way(version_choice.cheapest(ref, choice, rank, facts), nodes)
                for name, ref in refs.items()
            }
        return loaded

    def _fitting(self, choice: Choice) -> _Fitting:
        facts = self.decisions.facts
        fetches = version_choice.fetches(choice, self._job.group.rank, facts)
        nodes_of = self._job.topology.nodes
        planned = {fetch.ref.bundle_id: version_choice.way(fetch, nodes_of) for fetch in fetches}
        sizes = {fetch.ref.bundle_id: fetch.seal.length for fetch in fetches}
        logger.info("loading %s: %s", choice.version, version_choice.explain(planned, sizes))
        loaded = Loaded()
        straight = [fetch for fetch in fetches if fetch.is_straight]
        together = self._read_together(choice, fetches)
        read_here = {fetch.ref.bundle_id for fetch in (*straight, *together)}
        others = [fetch for fetch in fetches if fetch.ref.bundle_id not in read_here]
        loaded.located = self._fetcher.obtain(choice.version, others, loaded.faults)
        loaded.located += self._straight.obtain(choice.version, straight, loaded.faults)
        if self._shared is not None:
            between_us = Fetcher(StorageSource(self._storage, self._shared), timeout_s=self._timeout_s)
            loaded.located += between_us.obtain(choice.version, together, loaded.faults)
        loaded.ways = _ways(fetches, loaded.located, nodes_of)
        sources = list(_readable(fetches, loaded.located, loaded.faults))
        fitting = _Fitting(loaded, sources, {fetch.ref.bundle_id: fetch.node for fetch in fetches})
        if loaded.faults:
            return fitting
        try:
            for source in sources:
                _take_values(source, loaded.values)
            fitting.loading = self._state.fitting(_saved(sources), loaded.values, strict=self._asked.strict)
        except HoldfastError:
            # What does not fit may be damaged: only bytes that are proven may accuse the objects.
            loaded.faults += [Fault(name, fitting.nodes[name], why) for name, why in _damaged(sources).items()]
            if not loaded.faults:
                raise
        return fitting

    def _read_together(self, choice: Choice, fetches: Sequence[Fetch]) -> list[Fetch]:
        """Return what this rank reads from storage with others of its node; then there is a way to take turns."""
        rank, node_of = self._job.group.rank, self._job.topology.node_of
        found = [fetch for fetch in fetches if shared_reading.is_read_together(fetch, node_of) and fetch.file]
        if not found or self._node_directory is None:
            return []
        if not self._storage.bundles.has_page_cache(choice.version, found[0].file):
            return []
        sizes = shared_reading.chunks_of_all(choice.seals, image_format.CHUNK_BYTES)
        plan = shared_reading.plan_reading(rank, node_of, sizes)
        name = f"reading-{choice.version}-{self._job.incarnation}-{self._num_attempts}"
        try:
            self._shared = SharedReads(self._node_directory / name, plan, timeout_s=self._timeout_s)
        except OSError as error:
            pass_on(error)
            logger.info(
                "the ranks of this node cannot take turns at storage, so their keeper reads for them: %s", error
            )
            return []
        return found

    def _fill(self, choice: Choice, fitting: _Fitting) -> None:
        assert fitting.loading is not None
        if self._shared is not None:
            self._shared.remove()  # every rank has it open, or never will
        loaded = fitting.loaded
        loaded.tensors = self._state.create(fitting.loading)
        num_bytes = sum(located.seal.length for located in loaded.located)
        started = time.perf_counter()
        meter = _meter(choice.version, num_bytes)
        bad = fill.fill(fitting.sources, loaded.tensors, meter.add, patience_s=self._timeout_s)
        loaded.fill_seconds = time.perf_counter() - started
        self._read_bytes = sum(item.unread.stored_bytes for item in loaded.located if item.unread is not None)
        loaded.faults += [fault_of(name, fitting.nodes[name], why) for name, why in bad.items()]

    # The end.

    def _resume(self, version: Version | None) -> None:
        """Everybody has loaded it: it is recorded, then saving may begin."""
        group, incarnation = self._job.group, self._job.incarnation
        collectives.together(group, lambda: self._record(incarnation, version) if group.rank == 0 else None)
        num_bytes = self._read_bytes
        collectives.together(group, lambda: self._client.resume(incarnation, version, self.table, read_bytes=num_bytes))

    def _record(self, incarnation: int, version: Version | None) -> None:
        wish = self._job.wish
        try:
            wish.record(self._storage, incarnation, version)
            self._storage.incarnations.record_resumed(incarnation, version, self._job.lineage.resumed)
        except StorageFull as error:
            if version is None or wish.version is not None:  # nothing would be lost by stopping here
                raise
            # The keepers know it, and it is recorded before anything of this incarnation is committed.
            logger.warning("what incarnation %d resumed from is recorded later: %s", incarnation, error)

    def _report(self, choice: Choice, reason: str, loaded: Loaded, record: LoadRecord) -> RestoreReport:
        num_bytes: Counter[str] = Counter()
        bundles: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        seconds: dict[str, float] = {"fill": loaded.fill_seconds}
        for item in loaded.located:
            name = item.source.name.lower()
            cached = item.unread.cached_bytes if item.unread is not None else 0
            if cached:
                num_bytes["cache"] += cached
            if cached < len(item.view):
                num_bytes[name] += len(item.view) - cached
            bundles[name] += 1
            sizes[item.ref.bundle_id] += len(item.view)
            seconds[name] = max(seconds.get(name, 0.0), item.seconds)
        left_out = left_out_text(record)
        if left_out:
            logger.warning("%s does not fit these objects, and strict is off: %s", choice.version, left_out)
        return RestoreReport(
            choice.version,
            reason,
            bytes=dict(num_bytes),
            bundles=dict(bundles),
            seconds=seconds,
            refused=tuple(self.decisions.refused),
            not_loaded=record.not_loaded,
            not_used=record.not_used,
            misfit=record.misfit,
            left_out=record.left_out,
            by_rank=loaded.by_rank,
            sources=loaded.ways,
            why=version_choice.explain(loaded.ways, sizes),
        )


def _meter(version: Version, num_bytes: int) -> Meter:
    """Return what says in the log how far so many bytes are."""
    what = "verifying and copying %s: %s"
    return Meter(num_bytes, lambda done, seconds: logger.info(what, version, progress_text(done, num_bytes, seconds)))


def _ways(fetches: Iterable[Fetch], located: Iterable[Located], nodes: Sequence[str]) -> dict[str, str]:
    """Return where each bundle came from, and why; a plan that was not kept is named."""
    planned = {fetch.ref.bundle_id: fetch for fetch in fetches}
    found: dict[str, str] = {}
    for item in located:
        fetch = planned[item.ref.bundle_id]
        text = version_choice.way(fetch, nodes)
        handed_on = fetch.via is not None and item.source is version_choice.Source.PEER
        if item.source is not fetch.source and not handed_on:
            text = f"from {item.source.name.lower()}; the plan was: {text}"
        found[item.ref.bundle_id] = text
    return found


def _readable(fetches: Iterable[Fetch], located: Iterable[Located], faults: list[Fault]) -> Iterable[Source]:
    nodes = {fetch.ref.bundle_id: fetch.node for fetch in fetches}
    seals = {fetch.ref.bundle_id: fetch.seal for fetch in fetches}
    for item in located:
        name = item.ref.bundle_id
        try:
            if item.seal.digest != seals[name].digest:
                raise CorruptError("the copy is not the one that was agreed on")
            yield fill.read_sources([item])[0]
        except CorruptError as error:
            if not error.condemns:
                raise
            faults.append(Fault(name, nodes[name], error.what))


def _take_values(source: Source, values: dict[Group, Mapping[str, Any]]) -> None:
    entry = source.image.values
    if entry is not None:
        raw = bytes(source.located.view[entry.start : entry.end])
        values[source.located.ref.ranks] = value_codec.decode(raw, where=source.image.bundle_id)


def _saved(sources: Iterable[Source]) -> dict[str, SavedTensor]:
    """Entries by name; the pieces of a name may lie in several images."""
    found: dict[str, SavedTensor] = {}
    for source in sources:
        for entry in source.image.entries:
            pieces = found[entry.name].pieces if entry.name in found else ()
            found[entry.name] = SavedTensor(entry.dtype, entry.global_shape, (*pieces, entry.extent))
    return found


def _damaged(sources: Iterable[Source]) -> dict[str, str]:
    damaged: dict[str, str] = {}
    for source in sources:
        if source.located.unread is not None:
            continue  # what has been read of it, the header and the values, is proved
        try:
            image_format.verify(source.located.view, source.located.seal, source.image.bundle_id)
        except CorruptError as error:
            damaged[source.image.bundle_id] = error.what
    return damaged
