"""Decides how a job saves: with memory of its own, or, where that cannot be had and need not be, straight to storage.

Decided once per restore, by all ranks together, because a version is made of what all of them save.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

from holdfast.base.config import Config
from holdfast.base.errors import KeeperError, KeeperLost, MemoryRefused
from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.restore.fetcher import Holder
from holdfast.checkpoint.restore.storage_source import StorageSource
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.overhead_budget import Budget
from holdfast.checkpoint.save.save_schedule import Schedule
from holdfast.checkpoint.save.storage_only_schedule import MeetingSchedule
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.checkpoint.state.training_state import State
from holdfast.keeper.rpc.client import Inventory
from holdfast.keeper.rpc.paths import RuntimePaths, place_of
from holdfast.tiers.storage.version_store import Storage

# What all of them can do is what a checkpointer asks of each; `memory` is the one that saves to memory, or None.
AnySaver: TypeAlias = Saver | DirectSaver


def reserved(
    saver: AnySaver | None,
    *,
    state: State,
    link: KeeperLink,
    job: Job,
    storage: Storage,
    config: Config,
    events: Events,
) -> AnySaver:
    """Return what saves from now on; `saver` is what did so before. Collective.

    Raises:
        MemoryRefused, KeeperError: memory is required, and cannot be had. UsageError: a value that cannot be saved; names it.
    """
    before = saver.memory if saver is not None else None
    group, reason = job.group, job.no_keeper
    if not reason and (error := _namesakes(job, place_of(job.assembly.root, config)) or _cut_off(job, link)):
        if config.require_memory:
            raise error
        reason = str(error)
    if saver is not None and (before is None or reason):
        saver.close()  # without memory before: it may be had again
    if not reason:
        kept = saver = before or Saver(state, link, job.topology, rank=group.rank, config=config, events=events)
        try:
            collectives.together(group, lambda: _reserve(kept, wait=config.require_memory))
        except BaseException as error:
            if saver is not before or not isinstance(error, KeeperLost):  # else the slots go to the next keeper
                saver.close()
            if config.require_memory or not isinstance(error, MemoryRefused):
                raise
            reason = str(error)
        else:
            return saver
    return DirectSaver(state, link, job, storage, reason=reason, config=config, events=events).begin_together()


def _namesakes(job: Job, place: RuntimePaths) -> KeeperError | None:
    """Return why no version in memory would ever be whole: a node has several keepers, as machines of one name. Collective."""
    rows = collectives.gather_json(job.group, place.identity())
    firsts: list[dict[str, int]] = [{} for _ in job.topology.nodes]
    for rank, node in enumerate(job.topology.node_of):
        if rows[rank]:
            firsts[node].setdefault(rows[rank], rank)
    for label, found in zip(job.topology.nodes, firsts, strict=True):
        if len(found) > 1:
            first, second, *_ = sorted(found.values())
            return KeeperError(
                f"ranks {first} and {second} have different keepers, and both call their node {label}",
                remedy="give every machine or launcher a --node-label, and the ranks of one a common runtime directory",
            )
    return None


def _cut_off(job: Job, link: KeeperLink) -> KeeperError | None:
    """Return why no version in memory would ever be whole: rank 0's keeper cannot reach one that runs. Collective.

    None if it reaches all. One that may only be slow counts as reached where anything is in memory: it is waited for.
    """
    nodes, group = job.topology.nodes, job.group
    if len(nodes) == 1:
        return None

    def ask() -> bytes:
        client = link.require()
        found = client.inventory()
        if found.unheard and not found.held:
            found = client.inventory()
        slow = set(found.unheard) if found.held else set()
        return json.dumps([one for one in found.silent if one[0] not in slow]).encode()

    silent = dict(json.loads(collectives.share(group, ask)))
    runs = job.topology.node_of[group.rank] not in silent or (link.client is not None and link.client.alive)
    if not silent or not collectives.unanimous(group, runs):
        return None
    node, error = min(silent.items())
    more = f", nor {len(silent) - 1} others" if len(silent) > 1 else ""
    return KeeperError(
        f"the keeper of {nodes[job.topology.node_of[0]]} cannot reach that of {nodes[node]}{more}: {error}",
        remedy="give every node --listen ADDRESS --secret-file FILE (docs/security.md)",
    )


def _reserve(saver: Saver, *, wait: bool) -> None:
    """Reserves; with `wait` every page is there when it returns, for nobody goes on with storage alone later.

    Raises:
        MemoryRefused: the budget does not allow it, or the kernel has no room.
    """
    saver.reserve()
    if wait and not saver.await_slots(None):
        raise MemoryRefused(saver.refused or "the memory of this rank is not made in time")


def holder_of(saver: AnySaver, link: KeeperLink, job: Job, storage: Storage) -> Holder:
    """Return where copies are had from: the keepers, or storage alone if there are none, or if they hold nothing and
    have too little memory to bring anything. Collective.
    """
    if job.no_keeper:
        return StorageSource(storage)
    client = link.last_client
    assert client is not None, "what it was reserved with; that it ended since, all ranks hear together"
    if saver.memory is None:
        held = collectives.share(job.group, lambda: b"copies" if _may_hold(client.inventory()) else b"")
        if not held:
            return StorageSource(storage)
    return client


def _may_hold(inventory: Inventory) -> bool:
    """Return whether keepers have copies, or some that do not answer may have."""
    return bool(inventory.held or inventory.unheard)


def schedule_of(
    saver: AnySaver,
    config: Config,
    job: Job,
    *,
    missed: Callable[[int], None],
    events: Events,
    bubbles: Bubbles | None,
    link: KeeperLink,
) -> Schedule | MeetingSchedule:
    """Return when `saver` saves."""
    if saver.memory is None:
        return MeetingSchedule(config, job.group, job.assembly.root)
    budget = None
    if config.overhead:
        budget = Budget(config.overhead, group=job.group, events=events, bubbles=bubbles, tell=link.note_cadence)

    def writing() -> bool:
        due = link.client.announced.newest_due if link.client is not None else None
        return due is not None and due[0].incarnation == job.incarnation and due[1].is_written

    return Schedule(
        config, rank=job.group.rank, world_size=job.group.world_size, missed=missed, budget=budget, writing=writing
    )
