"""Holds what rank 0 finds out before a restore, and the one decision that all ranks get.

The keepers tell what they hold, storage tells what is committed; core.recovery decides. A manifest that is damaged
does not hide the other versions: it is one reason among those that are reported. One that cannot be read for now may
be good: its version is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from holdfast.base.errors import CorruptError, HoldfastError, KeeperLost, StorageError, VersionNotFound
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.restore.fetcher import Holder
from holdfast.core.model import Topology, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.begin_anew import may_begin_anew
from holdfast.core.recovery.version_choice import Choice, ChoiceDeferred, Copy, Facts, Quarantine, Stored, Unreachable
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.rpc.client import Inventory
from holdfast.tiers.backends.parallel_streams import MOST_STREAMS, StreamCount, Streams
from holdfast.tiers.storage.manifest import stored_of
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what to load.

    Attributes:
        choice: the version and its copies, or None.
        reason: one sentence why, with what was refused.
        exists: whether there is any version at all, usable or not. What the ranks of a job were saving when it ended, and no
            keeper ever heard that all of it was captured, is none.
        lost: why the job may begin anew although versions exist; empty: it may not.
        awaited: what cannot be reached and may be newer than all that can; then there is no choice.
        pause_s: for so long all ranks wait before they ask again; 0: this is the answer.
    """

    choice: Choice | None
    reason: str
    exists: bool
    awaited: ChoiceDeferred | None = None
    pause_s: float = 0.0
    lost: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Verdict)


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Copies and keepers that a plan leaves out, as far as this rank knows.

    Attributes:
        quarantine: proven bad, or passed over.
        away: copies that could not be had in the last rounds, with the error.
        ignores_silent: keepers that do not answer have been waited for.
    """

    quarantine: Quarantine = field(default_factory=Quarantine)
    away: Mapping[Copy, HoldfastError] = field(default_factory=dict)
    ignores_silent: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """Holds what rank 0 found, once per plan.

    Attributes:
        useless: committed versions whose manifest is damaged or another job's, with the fault.
        unread: committed versions whose manifest could not be read, with the error.
    """

    inventory: Inventory
    stored: Mapping[Version, Stored]
    useless: Mapping[Version, HoldfastError] = field(default_factory=dict)
    unread: Mapping[Version, HoldfastError] = field(default_factory=dict)

    @property
    def versions(self) -> set[Version]:
        """All that anybody knows of, usable or not."""
        return {*self.stored, *self.useless, *self.unread, *(row.version for row in self.inventory.held)}


def find(client: Holder, storage: Storage, *, timeout_s: float) -> Findings:
    """Asks all keepers and storage.

    Args:
        client: this node's keeper, or what stands in for it.
        storage: where durable versions are.
        timeout_s: how long storage may tell nothing.

    Raises:
        StorageError: the path refuses, or is not the job's directory any more.
        StorageBusy: it told nothing for this time.
    """
    inventory = client.inventory()
    for node, reason in inventory.silent:
        logger.warning("the keeper of node %d does not answer (%s)", node, reason)
    limit = ReadLimit(timeout_s, 0, storage.where)
    return limit.run(lambda: _find_stored(inventory, storage, limit.moved))


def _find_stored(inventory: Inventory, storage: Storage, moved: Callable[[int], None]) -> Findings:
    stored: dict[Version, Stored] = {}
    useless: dict[Version, HoldfastError] = {}
    unread: dict[Version, HoldfastError] = {}

    def look(version: Version) -> int:
        try:
            stored[version] = _read(storage, version)
        except VersionNotFound as error:  # never committed, retired meanwhile, or late in showing up
            if storage.is_committed(version):
                unread[version] = StorageError("the manifest is listed and cannot be found", where=error.where)
        except HoldfastError as error:
            found = useless if error.condemns else unread
            found[version] = error
        return 1

    with Streams(StreamCount(), MOST_STREAMS, moved) as streams:
        for version in storage.named():
            streams.put(partial(look, version))
    storage.require_job(storage.job_id())  # an empty mount point lists nothing either
    return Findings(inventory, stored, useless, unread)


def _read(storage: Storage, version: Version) -> Stored:
    """Reads a manifest, a second time before it counts as damaged: the first may have been a bad read."""
    try:
        return stored_of(storage.manifest(version))
    except CorruptError:
        return stored_of(storage.manifest(version))


def planned(job: Job, out: Exclusions) -> Facts:
    """Returns the facts that every rank has, to plan with once a version is chosen."""
    return Facts(
        (), {}, {}, job.lineage, job.topology,
        quarantine=out.quarantine, unreachable=Unreachable(copies=_texts(out.away)), ranks_per_reader=job.ranks_per_reader,
    )  # fmt: skip


def decide(findings: Findings, job: Job, out: Exclusions, *, wanted: Version | None) -> Verdict:
    """Rank 0: the verdict.

    Raises:
        HoldfastError: a version is there, but its manifest is of no use, no keeper holds it, and nothing else is usable (or
            `wanted` is this one). Of the class that says why.
    """
    decision = version_choice.choose_version(_facts(findings, job, out), wanted=wanted)
    reasons = [decision.reason]
    reasons += [f"{version} refused: {error}" for version, error in sorted(findings.useless.items(), reverse=True)]
    if out.ignores_silent and findings.inventory.unheard:
        reasons.append(f"{_labels(findings.inventory.unheard, job.topology)} did not answer: what it holds is left out")
    reason = "; ".join(reasons)
    exists = bool(findings.stored or findings.useless or findings.unread or _is_any_whole(findings.inventory))
    if isinstance(decision.value, ChoiceDeferred):
        return Verdict(None, reason, exists, decision.value)
    if decision.value is None:
        _require_something(findings, reason, out, job.lineage, wanted=wanted)
    return Verdict(
        decision.value, reason, exists, lost="" if decision.value else _lost(findings, _facts(findings, job, out))
    )


def _lost(findings: Findings, facts: Facts) -> str:
    inventory = findings.inventory
    decision = may_begin_anew(
        facts,
        dict(inventory.levels),
        in_storage=bool(findings.stored or findings.useless or findings.unread),
        silent=bool(inventory.silent),
        condemned=inventory.condemned,
    )
    return decision.reason if decision.value else ""


def require_known(findings: Findings, found: Verdict, topology: Topology) -> None:
    """Refuse unless it is known that there is no version, if there seems to be none.

    Raises:
        KeeperLost: a keeper may hold one, and does not answer.
    """
    silent = findings.inventory.unheard
    if found.choice is None and not found.exists and silent:
        raise KeeperLost(
            f"nothing is found, but {_labels(silent, topology)} does not answer and may hold a version",
            remedy="see its log; if it hangs, end it; restore(fresh=True) begins anew whatever it holds",
        )


def _require_something(
    findings: Findings, reason: str, out: Exclusions, lineage: Lineage, *, wanted: Version | None
) -> None:
    useless = findings.useless
    if wanted is not None and wanted in useless:
        raise useless[wanted]
    if useless and wanted is None and not out.quarantine.copies:
        fault = useless[max(useless)]
        raise type(fault)(
            f"versions exist, but none can be used: {reason}", where=fault.where, remedy=remedies(fault.remedy, lineage)
        )


def remedies(first: str, lineage: Lineage) -> str:
    """Returns what can be done where versions exist and none can be used; `first` is about the fault itself."""
    cut = [] if lineage.cut is None else [CUT.format(lineage.cut)]
    return "; ".join([first, *cut, BEGIN_ANEW])


CUT = (
    "if this is a place that `save(also_to=..)` copies to, save to it once more: that writes what is missing of incarnation "
    '{}; or name the version: restore(version="..")'
)
BEGIN_ANEW = "restore(fresh=True) starts a new lineage and leaves these alone, until `holdfast rm` removes them"


def _facts(findings: Findings, job: Job, out: Exclusions) -> Facts:
    inventory = findings.inventory
    silent = () if out.ignores_silent else tuple(job.topology.nodes[node] for node in findings.inventory.unheard)
    unread = {version: str(error) for version, error in findings.unread.items()}
    return Facts(
        inventory.copies, inventory.tables, findings.stored, job.lineage, job.topology,
        frozenset(version for version, _ in inventory.suspects), out.quarantine, Unreachable(unread, _texts(out.away), silent),
        parity=inventory.parity,
    )  # fmt: skip


def _texts(away: Mapping[Copy, HoldfastError]) -> dict[Copy, str]:
    return {copy: error.what for copy, error in away.items()}


def _labels(nodes: Sequence[int], topology: Topology) -> str:
    return f"the keeper of {', '.join(topology.nodes[node] for node in nodes)}"


def _is_any_whole(inventory: Inventory) -> bool:
    """Return whether memory may hold a version that was captured: of such a one keepers have the table of its bundles.

    In doubt it does: a keeper that does not answer may have the table, and what is suspected was looked at.
    """
    versions = {row.version for row in inventory.held}
    known = inventory.tables.keys() | dict(inventory.levels).keys()
    return bool(versions & known or (versions and (inventory.silent or inventory.suspects)))


def encode(verdict: Verdict) -> bytes:
    """The verdict, to be told to all."""
    return _encoder.encode(verdict)


def decode(data: bytes) -> Verdict:
    """The verdict of rank 0."""
    return _decoder.decode(data)
