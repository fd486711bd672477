"""What rank 0 finds out before a restore, and the one decision that all ranks get.

The keepers tell what they hold, storage tells what is committed; core.recovery decides. A manifest that cannot be read
does not hide the others: it is one reason among those that are reported. Called by `train.restore`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.base.errors import HoldfastError, VersionNotFound
from holdfast.core import recovery
from holdfast.core.model import Version
from holdfast.core.recovery import Choice, Facts, MemoryCopy, Quarantine, Stored
from holdfast.node.client import Inventory
from holdfast.tiers.manifest import stored_of
from holdfast.tiers.storage import Storage
from holdfast.train.assembly import Job
from holdfast.train.fetched import Holder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to load.

    Attributes:
        choice: the version and its copies, or None.
        reason: one sentence why, with what was refused.
        exists: whether there is any version at all, usable or not. What the ranks of a job were saving when it ended, and no
            keeper ever heard that all of it was captured, is none.
    """

    choice: Choice | None
    reason: str
    exists: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Verdict)


@dataclass(frozen=True, slots=True)
class Findings:
    """What rank 0 found, once per restore.

    Attributes:
        unreadable: committed versions whose manifest cannot be used, with the fault.
    """

    inventory: Inventory
    stored: Mapping[Version, Stored]
    unreadable: Mapping[Version, HoldfastError] = field(default_factory=dict)


def find(client: Holder, storage: Storage) -> Findings:
    """Asks all keepers and storage."""
    inventory = client.inventory()
    for node, reason in inventory.silent:
        logger.warning("the keeper of node %d does not answer (%s); what it holds is left out", node, reason)
    stored: dict[Version, Stored] = {}
    unreadable: dict[Version, HoldfastError] = {}
    for version in storage.versions():
        try:
            manifest = storage.manifest(version)
        except VersionNotFound:
            continue  # retired meanwhile
        except HoldfastError as error:
            unreadable[version] = error
            continue
        stored[version] = stored_of(manifest)
    return Findings(inventory, stored, unreadable)


def facts_of(findings: Findings | None, job: Job, quarantine: Quarantine) -> Facts:
    """The facts for core.recovery; without findings, those that every rank has."""
    memory: tuple[MemoryCopy, ...] = ()
    if findings is None:
        return Facts(
            memory, {}, {}, job.lineage, job.topology, quarantine=quarantine, ranks_per_reader=job.ranks_per_reader
        )
    inventory = findings.inventory
    suspects = frozenset(version for version, _ in inventory.suspects)
    tables = dict(inventory.tables)
    return Facts(inventory.copies, tables, findings.stored, job.lineage, job.topology, suspects, quarantine)


def decide(findings: Findings, job: Job, quarantine: Quarantine, *, wanted: Version | None) -> bytes:
    """Rank 0: the verdict, encoded.

    Raises:
        HoldfastError: a version is there, but its manifest cannot be used, no keeper holds it, and nothing else is
            usable (or `wanted` is this one). Of the class that says why.
    """
    decision = recovery.choose_version(facts_of(findings, job, quarantine), wanted=wanted)
    reasons = [decision.reason]
    reasons += [f"{version} refused: {error}" for version, error in sorted(findings.unreadable.items(), reverse=True)]
    exists = bool(findings.stored or findings.unreadable or _is_any_whole(findings.inventory))
    if decision.value is None and findings.unreadable:
        if wanted is not None and wanted in findings.unreadable:
            raise findings.unreadable[wanted]
        if wanted is None and not quarantine.copies:
            fault = findings.unreadable[max(findings.unreadable)]
            raise type(fault)(
                f"versions exist, but none can be used: {'; '.join(reasons)}",
                where=fault.where,
                remedy=f"{fault.remedy}; restore(fresh=True) starts a new lineage and leaves these alone",
            )
    return _encoder.encode(Verdict(decision.value, "; ".join(reasons), exists))


def _is_any_whole(inventory: Inventory) -> bool:
    """Whether memory may hold a version that was captured: of such a one keepers have the table of its bundles.

    In doubt it does: a keeper that does not answer may have the table, and what is suspected was looked at.
    """
    versions = {copy.version for copy in inventory.copies}
    known = dict(inventory.tables).keys() | dict(inventory.levels).keys()
    return bool(versions & known or (versions and (inventory.silent or inventory.suspects)))


def decode(data: bytes) -> Verdict:
    """The verdict of rank 0."""
    return _decoder.decode(data)
