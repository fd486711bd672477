"""Tells what a simulated recovery knows, and whether what it chose is good: the facts for core.recovery, and the truth
beside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import BundleRef, RankLayout, Seal, Topology, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch, MemoryCopy, Quarantine, Stored, Unreachable
from holdfast.core.versions.lineage import Lineage
from holdfast.testing.simulator.clock import Violation
from holdfast.testing.simulator.network import Storage
from holdfast.testing.simulator.observer import Observer
from holdfast.testing.simulator.simulated_keeper import Keeper


class Job(Protocol):
    """Holds what of the job a recovery looks at."""

    keepers: list[Keeper]
    layouts: dict[int, RankLayout]
    observer: Observer
    storage: Storage
    table: tuple[BundleRef, ...]
    topology: Topology


def facts(job: Job, quarantine: Quarantine) -> Facts:
    """All that keepers and storage tell."""
    memory = [
        MemoryCopy.at(version, keeper.node, rank, Seal(bundle_id, 1, held.seals[bundle_id]))
        for keeper in job.keepers
        for version, rank, bundle_id, held in keeper.copies()
    ]
    stored = {
        version: Stored(version, job.topology.world_size, job.table, {b: Seal(b, 1, d) for b, d in content.items()})
        for version, content in job.storage.manifests.items()
        if not job.storage.unreadable
    }
    unread = dict.fromkeys(job.storage.manifests.keys() - stored.keys(), "the path refuses")
    tables = {version: table for keeper in job.keepers for version, table in keeper.tables.items()}
    suspects = frozenset(version for keeper in job.keepers for version in keeper.suspects)
    lineage = Lineage(dict(job.storage.resumed))
    unreachable = Unreachable(manifests=unread)
    parity = [PieceCopy.of(keeper.node, piece) for keeper in job.keepers for piece in keeper.parity.values()]
    return Facts(memory, tables, stored, lineage, job.topology, suspects, quarantine, unreachable, parity=parity)


def older(job: Job, newest: Version | None, quarantine: Quarantine) -> Version | None:
    """The version before the newest, if there is one that is good."""
    if newest is None:
        return None
    known = facts(job, replace(quarantine, versions={**quarantine.versions, newest: "passed over"}))
    choice = version_choice.choose_version(known).value
    return choice.version if isinstance(choice, Choice) and not bad_copies(job, choice, known) else newest


def bad_copies(job: Job, choice: Choice, facts: Facts) -> set[tuple[Version, str, int | None]]:
    """Return, of the copies that ranks would load, those whose bytes are not what was sealed.

    Raises:
        Violation: bytes would be loaded that are not what was saved (S5).
    """
    bad: set[tuple[Version, str, int | None]] = set()
    for rank in job.layouts:
        for fetch in version_choice.fetches(choice, rank, facts):
            name = fetch.ref.bundle_id
            found = (
                _made(job, choice.version, fetch) if fetch.parity else _bytes_of(job, choice.version, name, fetch.node)
            )
            if found != fetch.seal.digest:
                bad.add((choice.version, name, fetch.node))
            elif found != job.observer.state.get((choice.version, name)):
                raise Violation("S5", f"{name} of {choice.version} is loaded; it is not what was saved")
    return bad


def _made(job: Job, version: Version, fetch: Fetch) -> str | None:
    """Return what comes out of parity: what the bundle was, if all that is needed is as it was then."""
    pieces = {node: job.keepers[node].parity.get(version) for node in fetch.parity if node >= 0}
    first = next(iter(pieces.values()))
    if first is None or any(piece is None or piece.covers != first.covers for piece in pieces.values()):
        return None
    for member, node in enumerate(fetch.parity):
        for seal in first.covers[member] if node >= 0 else ():
            if _bytes_of(job, version, seal.bundle_id, node) != seal.digest:
                return None
    lost = first.covers[fetch.parity.index(-1)]
    return next((seal.digest for seal in lost if seal.bundle_id == fetch.ref.bundle_id), None)


def _bytes_of(job: Job, version: Version, bundle_id: str, node: int | None) -> str | None:
    if node is None:
        return job.storage.manifests.get(version, {}).get(bundle_id)
    for held_version, _, name, held in job.keepers[node].copies():
        if held_version == version and name == bundle_id:
            return held.content.get(bundle_id)
    return None
