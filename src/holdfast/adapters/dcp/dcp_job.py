"""Holds what writer, reader and stager of one job share: the ranks, the keeper, the incarnation, the next version.

Made by the writer's constructor on every rank. Nothing here is asked during a save but the keeper: collectives belong to
the constructor and to DCP itself, which calls us from whatever thread it likes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.adapters.dcp.items import Contents
from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.checkpointer.leaving import Leaving
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import Job, RestoreRequest, assemble
from holdfast.checkpoint.job.keeper_link import KeeperLink, Origin
from holdfast.checkpoint.liveness import heartbeat, open_checkpointers
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.core.model import BundleRef, Level, Version
from holdfast.keeper.rpc.paths import absolute_root
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.version_store import open_storage

_NUMBER = re.compile(r"(\d+)\Z")


class DcpJob:
    """One job on one checkpoint root, from one rank's side. Collective.

    Attributes:
        contents: what is saved next.
        loaded: the version that `dcp.load` brought, which the versions of this incarnation come from.
        events: what happens here, for observers and tests.
        closed: whether this rank has left.
    """

    def __init__(self, root: str, config: Config) -> None:
        self.root = absolute_root(root)
        self.config = dataclasses.replace(config, require_memory=True)  # DCP's calls have no way around the keepers
        self.events = Events()
        self.storage = open_storage(root, self.events, encryption=KeySource.of(config))
        self.group = collectives.ranks()
        self.contents = Contents()
        self.closed = False
        self._leaving = Leaving()
        self.loaded: Version | None = None
        self._table: tuple[BundleRef, ...] = ()
        self.link = KeeperLink(root, config, rank=self.group.rank, events=self.events, on_appointment=lambda _: None)
        try:
            asked = RestoreRequest(required=config.expect_checkpoint, wish=open_checkpointers.wish.take_version())
            self.job: Job = assemble(self.group, root, self.config, storage=self.storage, link=self.link, asked=asked)
            newest = json.loads(collectives.share(self.group, self._newest_step))
        except BaseException:
            self._leave(finished=False)
            raise
        self.saver = Saver(
            self.contents,
            self.link,
            self.job.topology,
            rank=self.group.rank,
            config=self.config,
            events=self.events,
        )
        self._last_step: int = newest
        self._resumed = False
        self._newest: Version | None = None  # that was saved here

    def _newest_step(self) -> bytes:
        """Return the newest step of all versions in storage; those of memory only belong to older incarnations and are
        no hindrance.
        """
        return json.dumps(max((version.step for version in self.storage.versions()), default=-1)).encode()

    def next_version(self, step: int | None) -> Version:
        """The version that the coming save makes. `step`: what the caller calls it; None counts on.

        Raises:
            UsageError: the step is not later than the last one, or the writer is closed.
        """
        if self.closed:
            raise UsageError("the writer is closed", remedy="build a new one")
        last = self._last_step
        step = last + 1 if step is None else step
        if (self._resumed or self.loaded is not None) and step <= last:
            raise UsageError(
                f"step {step} cannot be saved after step {last}", remedy="number checkpoints upwards, or not at all"
            )
        self._last_step = step
        return self.job.version(step)

    def wished(self) -> Version | None:
        """Returns the version that the operator wants to be loaded first; None from then on."""
        return self.job.wish.version if self.loaded is None and not self._resumed else None

    def record(self) -> None:
        """Before the first save of the job: what this incarnation resumed from. On the coordinator."""
        if not self._resumed and self.group.rank == 0:
            self.job.wish.record(self.storage, self.job.incarnation, self.loaded)
            self.storage.incarnations.record_resumed(self.job.incarnation, self.loaded, self.job.lineage.resumed)

    def save(self, version: Version, level: Level) -> SaveHandle:
        """Copies `contents` into a slot, as `version`; returns when all is copied."""
        if not self._resumed:
            self.link.require().resume(self.job.incarnation, self.loaded, self._table)
            self.link.resumed = Origin(self.job.incarnation, self.loaded, self._table)
            self._resumed = True
        handle = SaveHandle(
            version,
            level,
            link=self.link,
            in_storage=self.storage.is_durable,
            settle=self.saver.settle,
            topology=self.job.topology,
            timeout_s=self.config.close_timeout_s,
        )
        self._newest = version
        self.saver.save(handle, durable=level is Level.DURABLE)
        heartbeat.at_step(version.step)
        return handle

    def came_from(self, version: Version, table: tuple[BundleRef, ...]) -> None:
        """All ranks loaded `version` of these bundles: what is saved next comes after it. Collective.

        If this incarnation has saved later ones, those are left behind: a new one begins.
        """
        if version == self._newest:
            return
        self.loaded, self._table, self._last_step = version, table, version.step
        if self._resumed:
            self.saver.settle()
            self.job = assemble(self.group, self.root, self.config, storage=self.storage, link=self.link)
            self._resumed, self._newest = False, None
            collectives.together(self.group, self.saver.reserve)  # the keepers hear anew who has what

    def step_of(self, checkpoint_id: object) -> int | None:
        """The number at the end of a checkpoint's name; None for the root itself, or a name without."""
        if isinstance(checkpoint_id, int):
            return checkpoint_id
        text = str(checkpoint_id).rstrip("/")
        if not text or absolute_root(text) == self.root:
            return None
        return number_in(text)

    def close(self) -> None:
        """Leaves; the keeper finishes what is under way."""
        self._leave(finished=True)

    def void(self) -> None:
        """The job broke off: what a device has not copied by now is given up. From any thread; does not wait."""
        if hasattr(self, "saver"):
            self.saver.void()

    def abandon(self) -> None:
        """Leaves without a word about the future, so that another process can be this rank."""
        self._leave(finished=False)

    interrupted = abandon

    def _leave(self, *, finished: bool) -> None:
        if not self.closed:
            leaving = Leaving(functools.partial(self._let_go, finished=finished), self.storage.run_lock.release)
            self._leaving, self.closed = leaving, True  # no call between: a handler finds both or none
        self._leaving.go_on()

    def _let_go(self, *, finished: bool) -> None:
        quiet = True
        if hasattr(self, "saver"):
            if finished:
                self.saver.settle()
            quiet = self.saver.close()
        if quiet:  # else the keeper must not give our slots away before this process has ended
            self.link.close(finished=finished)


def number_in(name: str) -> int | None:
    """The digits that a name ends with: `ckpts/step-120` is 120."""
    match = _NUMBER.search(Path(name).name)
    return int(match[1]) if match else None


def require(handle: SaveHandle) -> None:
    """Raises LevelNotReached if this rank gave the version up."""
    if handle.given_up:
        raise LevelNotReached(f"{handle.version} is not saved: {handle.given_up}", remedy="the next save tries again")


def patterns(replicated: str | Sequence[str]) -> tuple[str, ...]:
    """Glob patterns, one or several, each also for what lies below the names that it matches."""
    given = (replicated,) if isinstance(replicated, str) else tuple(replicated)
    return tuple(p for pattern in given for p in (pattern, f"{pattern}.*"))
