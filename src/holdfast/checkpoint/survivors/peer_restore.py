"""Going on from what the survivors hold: their own live state stays, and a twin's goes to the process that is new.

    every rank   tells what it has (`core.recovery.survivor_vote`): a note of its small state, and whether its parameters are live
    all          conclude the same step, or none, and then what was saved is restored as usual
    every rank   finds what it holds at that step, and which twin gives it what is not live here; one NO ends it
    twin -> new  parameters and optimizer state, over the job's own groups, each part with a digest
    all          vote once more; only then values (learning rates, random numbers, places in the data) are taken over

Nothing is recorded here, and whatever fails before the last vote leaves the usual way open: it fills every tensor
anew. A broken group raises out of here, as out of any collective.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from holdfast.base.errors import CorruptError, HoldfastError, LevelNotReached, MismatchError
from holdfast.checkpoint.device import accelerator, chunk_staging
from holdfast.checkpoint.entries.entries import Loading
from holdfast.checkpoint.entries.sharding import bits_of
from holdfast.checkpoint.entries.types import Group, LiveTensor, SavedTensor
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors.step_snapshot import StepSnapshot, as_bytes, lasting
from holdfast.checkpoint.survivors.survivor_state import notes_of, remains
from holdfast.core.model import Shard, Version
from holdfast.core.recovery import survivor_vote
from holdfast.core.recovery.survivor_vote import Offer

logger = logging.getLogger(__name__)

# Small tensors travel together; a larger one goes alone.
PARCEL_BYTES = 32 << 20
DIGEST_BYTES = 16


@dataclass(slots=True)
class Filled:
    """Says what came of it on this rank.

    Attributes:
        version: the step that the job goes on from.
        reason: whose memory it was live in.
        bytes: by source: `live` (stayed here), `twin` (came from one), `note` (left by this worker slot).
    """

    version: Version
    reason: str
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """One rank's part: what it holds, what goes where."""

    note: StepSnapshot
    shards: Mapping[str, Shard]
    values: dict[Group, Mapping[str, Any]]
    loading: Loading
    live: bool
    gets: Mapping[int, list[str]]
    gives: Mapping[int, list[str]]
    targets: Mapping[str, LiveTensor] = field(default_factory=dict)


class LiveFill:
    """One attempt of one rank. Collective."""

    def __init__(self, job: Job, state: State) -> None:
        self._job, self._group, self._state = job, job.group, state
        self._id = job.assembly.job_id
        self._notes = notes_of(self._id, job.group.rank, job.group.world_size)

    def offers(self) -> list[Offer]:
        """Return what every rank has, by rank."""
        mine = remains.offer(self._id, self._notes)
        row = [str(mine.live or ""), [str(version) for version in mine.notes], mine.why]
        return [
            Offer(Version.parse(live), tuple(v for v in map(Version.parse, noted) if v is not None), why)
            for live, noted, why in collectives.gather_json(self._group, row)
        ]

    def run(self, offers: Sequence[Offer], newest: Version | None) -> Filled | None:
        """Fills everything, or changes nothing that a restore does not fill anew. `newest`: what was saved last."""
        decision = survivor_vote.agree(offers, newest=newest, lineage=self._job.lineage)
        if decision.value is None:
            logger.info("the job goes on from what was saved: %s", decision.reason)
            return None
        started = time.perf_counter()
        plan = self._planned(decision.value, [rank for rank, o in enumerate(offers) if o.live == decision.value])
        if not collectives.unanimous(self._group, plan is not None):
            logger.warning("what the survivors hold is not enough; the job goes on from what was saved")
            return None
        assert plan is not None
        # It fits on every rank. Before that none may change anything: a script may go on with what it has.
        fitting = plan
        plan = collectives.together(self._group, lambda: replace(fitting, targets=self._state.create(fitting.loading)))
        filled = Filled(decision.value, decision.reason)
        if not collectives.unanimous(self._group, self._fill(plan, filled)):
            logger.warning("a rank was not filled from its twins; the job goes on from what was saved")
            return None
        collectives.together(self._group, lambda: self._state.apply(plan.values, plan.targets))
        filled.seconds = time.perf_counter() - started
        return filled

    # Before anything is sent.

    def _planned(self, version: Version, live: Sequence[int]) -> _Plan | None:
        try:
            return self._plan(version, frozenset(live))
        except HoldfastError as error:
            logger.warning("%s cannot be taken from live state: %s", version, error)
            return None

    def _plan(self, version: Version, live: frozenset[int]) -> _Plan:
        rank, note = self._group.rank, self._notes[version]
        rows = note.tensors()
        shards = {name: shard for name, shard in lasting(rows).items() if shard.num_bytes}
        gets: dict[int, list[str]] = defaultdict(list)
        gives: dict[int, list[str]] = defaultdict(list)
        for name, shard in sorted(shards.items()):
            for receiver in shard.ranks:
                if receiver in live:
                    continue
                twin = survivor_vote.giver(shard.ranks, live, receiver)
                if receiver == rank and twin is None:
                    raise MismatchError(f"no living rank holds the same as rank {rank}", where=name)
                if receiver == rank and twin is not None:
                    gets[twin].append(name)
                if twin == rank:
                    gives[receiver].append(name)
        if rank in live:
            _check_remains(shards)
        values = note.decoded()
        saved = {
            row.shard.name: SavedTensor(row.shard.dtype, row.shard.global_shape, (row.shard.extent,)) for row in rows
        }
        return _Plan(note, shards, values, self._state.fitting(saved, values), rank in live, gets, gives)

    # The bytes.

    def _fill(self, plan: _Plan, filled: Filled) -> bool:
        """Return whether all of it is here, proven."""
        num_bytes = {"live": 0, "twin": 0, "note": 0}
        if not accelerator.caught_up((live.local for live in plan.targets.values()), chunk_staging.TAKE_S):
            raise LevelNotReached("a device does not take what is restored to it")
        with torch.no_grad():
            for name in plan.shards if plan.live else ():
                target, source = plan.targets[name].local, remains.late[name]
                num_bytes["live"] += target.nbytes
                target.copy_(source)
            for name, data in plan.note.small.items():
                num_bytes["note"] += len(data)
                _set(plan.targets[name].local, torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None)
            good = True
            for giver, receiver in sorted({(g, self._group.rank) for g in plan.gets} | {(self._group.rank, r) for r in plan.gives}):  # fmt: skip
                if giver == self._group.rank:
                    self._give(plan, receiver)
                else:
                    good &= self._get(plan, giver, num_bytes)
        filled.bytes = {name: count for name, count in num_bytes.items() if count}
        return good

    def _give(self, plan: _Plan, receiver: int) -> None:
        for names in _parcels(plan.gives[receiver], plan.shards):
            parts = [bits_of(remains.late[name]).cpu() for name in names]
            data = torch.cat(parts)
            digest = xxhash.xxh3_128_digest(as_bytes(data))
            self._group.send(torch.cat([data, torch.frombuffer(bytearray(digest), dtype=torch.uint8)]), receiver)

    def _get(self, plan: _Plan, giver: int, num_bytes: dict[str, int]) -> bool:
        good = True
        for names in _parcels(plan.gets[giver], plan.shards):
            length = sum(plan.shards[name].num_bytes for name in names)
            parcel = self._group.receive(length + DIGEST_BYTES, giver)
            data, digest = parcel[:length], parcel[length:]
            if xxhash.xxh3_128_digest(as_bytes(data)) != bytes(digest.numpy()):
                logger.error("%s", CorruptError(f"what rank {giver} sent is not what arrived", where=names[0]))
                good = False
                continue
            at = 0
            for name in names:
                end = at + plan.shards[name].num_bytes
                _set(plan.targets[name].local, data[at:end])
                at = end
            num_bytes["twin"] += length
        return good


def _check_remains(shards: Mapping[str, Shard]) -> None:
    for name, shard in shards.items():
        tensor = remains.late.get(name)
        if tensor is None or tensor.nbytes != shard.num_bytes or tuple(tensor.shape) != shard.extent.lengths:
            raise MismatchError("what is live here is not what was noted", where=name)


def _parcels(names: Iterable[str], shards: Mapping[str, Shard]) -> Iterator[list[str]]:
    parcel: list[str] = []
    size = 0
    for name in names:
        if parcel and size + shards[name].num_bytes > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(name)
        size += shards[name].num_bytes
    if parcel:
        yield parcel


def _set(target: torch.Tensor, data: torch.Tensor | None) -> None:
    """The bytes of a whole tensor, row by row, into `target`."""
    if data is not None and target.numel():
        target.copy_(data.clone().view(target.dtype).view(target.shape))
