"""Decides which version a restore takes: rank 0 decides, all ranks vote on what they met, and all wait for what cannot
be reached.

One NO of a rank and the plan is made again. A copy that is proven bad is condemned; one that could not be reached is left
out until the next pause, and nothing is held against it. What cannot be reached may be the newest version there is:

- a durable version is waited for until the time is over, and then the restore fails: nothing older takes its place
  unless somebody says so;
- what only the memory of a keeper that does not answer can have is waited for a short while, and then given up, aloud:
  the levels in memory do not outlive the loss of their nodes, and a keeper that stays silent is as good as lost.

Every call but `look_again` is collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from holdfast.base.errors import (
    CorruptError,
    HoldfastError,
    KeeperGone,
    KeeperLost,
    StorageError,
    VersionNotFound,
    kind_of,
)
from holdfast.checkpoint.job import collectives, wait_for_storage
from holdfast.checkpoint.job.bootstrap import Job
from holdfast.checkpoint.job.wait_for_storage import WaitLimit
from holdfast.checkpoint.restore import version_vote
from holdfast.checkpoint.restore.fetcher import Fault, Holder
from holdfast.checkpoint.restore.version_vote import Exclusions, Findings, Verdict
from holdfast.core.model import Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, ChoiceDeferred, Copy, Facts, Quarantine
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

# Plans that met a bad copy: each condemns one, or finds one bad for the first time, so this many are never needed.
MAX_ROUNDS = 64
# How long a keeper is waited for that does not answer. Its node is part of the job: a lost one was missed before.
KEEPER_PATIENCE_S = 30.0
# How long a rank waits for an answer of its own keeper, of which others hear nothing.
ANSWER_S = 1.0


class Decisions:
    """Makes what the ranks of one restore decide.

    Args:
        timeout_s: how long storage is waited for.

    Attributes:
        refused: copies that were proven bad, one line each, over all ranks.
    """

    def __init__(self, job: Job, client: Holder, storage: Storage, *, timeout_s: float) -> None:
        self._job, self._group = job, job.group
        self._client = client
        self._storage = storage
        self._timeout_s = timeout_s
        self._out = Exclusions()
        self._stuck = False  # the last round met nothing but what was left out already
        self._bad_once: set[Copy] = set()
        self._num_bad = 0
        self.refused: list[str] = []
        self.look_again()

    def look_again(self) -> None:
        """Forgets what was found and how long it was waited for, but not which copies are bad."""
        self._findings: Findings | None = None
        self._for_storage = WaitLimit(self._timeout_s)
        self._for_keepers = WaitLimit(min(KEEPER_PATIENCE_S, self._timeout_s))

    @property
    def facts(self) -> Facts:
        """Return what every rank knows, to plan with once a version is chosen."""
        return version_vote.planned(self._job, self._out)

    def choose(self, wanted: Version | None) -> Verdict:
        """Returns the newest usable version, or `wanted`, and waits for what may be better.

        Raises:
            HoldfastError: it was waited for in vain, or waiting does not help. On every rank the same class.
        """
        return self._shared(lambda found: self._best(found, wanted))

    def newest_saved(self) -> Verdict:
        """Returns the newest version that was saved, whether it can be read now or not.

        Raises:
            HoldfastError: what is there cannot be listed.
        """
        out = replace(self._out, ignores_silent=True)
        return self._shared(lambda found: version_vote.decide(found, self._job, out, wanted=None))

    def versions_of(self, step: int) -> list[Version]:
        """Returns all versions of this step that anybody knows, usable or not."""

        def known(found: Findings) -> Verdict:
            return Verdict(None, json.dumps([str(v) for v in sorted(found.versions) if v.step == step]), exists=True)

        told = json.loads(self._shared(known).reason)
        return [version for text in told if (version := Version.parse(text)) is not None]

    def pass_over_newest(self) -> None:
        """Leaves out the newest version that could be used, if there is an older one.

        Nobody has proved it bad, so it is pinned: the lineage that goes on without it must not be the end of it.
        """
        found = self.choose(None)
        if found.choice is None:
            return
        version, before = found.choice.version, self._out
        reason = "with it the job failed at the same place again and again"
        self._pass_over(version, f"passed over: {reason}")
        if self.choose(None).choice is None:
            self._out = before
            return
        logger.warning("%s is passed over: %s", version, reason)
        if self._group.rank == 0 and found.choice.in_storage:
            try:
                self._storage.marks.pin(version)
            except HoldfastError as error:
                logger.warning("%s could not be pinned, and retention may remove it: %s", version, error)

    def vote(self, choice: Choice, faults: Iterable[Fault]) -> bool:
        """Returns whether no rank met a fault; otherwise every rank knows them all, and leaves those copies out.

        Raises:
            CorruptError: bad copies were found in too many rounds.
        """
        mine = [[fault.bundle_id, fault.node, fault.reason, fault.kind.__name__] for fault in faults]
        rows = [(rank, *row) for rank, told in enumerate(collectives.gather_json(self._group, mine)) for row in told]
        if not rows:
            return True
        bad: dict[Copy, tuple[int, str]] = {}
        away: dict[Copy, HoldfastError] = {}
        for rank, bundle_id, node, why, name in rows:
            copy, kind = (choice.version, bundle_id, node), kind_of(name)
            if node is None and kind is VersionNotFound:  # rank 0 has read its manifest: one of the two looks is behind
                away[copy] = StorageError(f"{why}, as rank {rank} sees it")
            elif kind.condemns:
                bad[copy] = rank, why
            else:
                away[copy] = kind(why)
        self._stuck = not bad and away.keys() <= self._out.away.keys()
        self._out = replace(self._out, away={**self._out.away, **away})
        for copy, (rank, why) in bad.items():
            self._found_bad(copy, rank, why)
        self._num_bad += bool(bad)
        if self._num_bad > MAX_ROUNDS:
            raise CorruptError(f"bad copies in each of {MAX_ROUNDS} plans: {'; '.join(self.refused)}")
        told = "; ".join(f"rank {rank}: {why}" for rank, _, _, why, _ in rows)
        logger.log(logging.WARNING if bad else logging.INFO, "%s: %s", choice.version, told)
        return False

    def _found_bad(self, copy: Copy, rank: int, why: str) -> None:
        """Condemns a copy. That in storage is the last one there is: it is read twice before."""
        version, bundle_id, node = copy
        mine = rank == self._group.rank
        if node is None and copy not in self._bad_once:
            self._bad_once.add(copy)
            if mine:  # what was read stays in memory, and must not be found there
                self._tell_keeper(copy, self._job.topology.node_of[rank], why)
            return
        place = version_choice.place(node, self._job.topology.nodes)
        self.refused.append(f"{version} bundle {bundle_id} from {place} (rank {rank}): {why}")
        quarantine = self._out.quarantine
        self._out = replace(self._out, quarantine=replace(quarantine, copies=quarantine.copies | {copy}))
        if mine:
            self._tell_keeper(copy, node, why)

    def _tell_keeper(self, copy: Copy, node: int | None, reason: str) -> None:
        try:
            self._client.quarantine(copy[0], copy[1], node=node, reason=reason)
        except HoldfastError as error:
            logger.warning("the keeper was not told of a bad copy: %s", error)

    def _pass_over(self, version: Version, reason: str) -> None:
        quarantine = self._out.quarantine
        passed = Quarantine(quarantine.copies, {**quarantine.versions, version: reason})
        self._out = replace(self._out, quarantine=passed)

    def _shared(self, decide: Callable[[Findings], Verdict]) -> Verdict:
        """Return what rank 0 decides; if that is to wait, all ranks wait and it is looked for anew."""
        rank = self._group.rank
        while True:
            unheard = json.loads(wait_for_storage.share(self._group, self._find, self._for_storage))
            self._leave_out_empty(unheard)
            made = collectives.share(self._group, lambda: b"" if rank else version_vote.encode(decide(self._found)))
            found = version_vote.decode(made)
            if not found.pause_s:
                return found
            time.sleep(found.pause_s)
            self._out, self._stuck, self._findings = replace(self._out, away={}), False, None

    def _leave_out_empty(self, unheard: Sequence[int]) -> None:
        """Keepers that rank 0's does not hear are asked by ranks of their own nodes: who holds nothing is not waited for. Collective."""
        if not unheard:
            return
        rank, topology = self._group.rank, self._job.topology
        node = topology.node_of[rank]
        asks = node in unheard and topology.ranks_on(node)[0] == rank
        empty = collectives.gather_json(self._group, node if asks and self._holds_nothing() else -1)
        if rank == 0:
            inventory = self._found.inventory
            left = tuple(one for one in inventory.unheard if one not in empty)
            self._findings = replace(self._found, inventory=replace(inventory, unheard=left))

    def _holds_nothing(self) -> bool:
        """Return whether it is known that the keeper of this node holds nothing."""
        try:
            own = self._client.inventory(wide=False) if self._client.answers(ANSWER_S) else None
        except HoldfastError:
            own = None
        return own is not None and not own.held and not own.parity

    # Rank 0.

    @property
    def _found(self) -> Findings:
        assert self._findings is not None
        return self._findings

    def _find(self) -> bytes:
        """Asks keepers and storage, unless what they told is still good; returns whom nobody hears."""
        if self._findings is None:
            try:
                self._findings = version_vote.find(self._client, self._storage, timeout_s=self._timeout_s)
            except KeeperLost as error:
                if self._client.alive:
                    raise
                raise KeeperGone(error.what, where=error.where, remedy=error.remedy) from error
        return json.dumps(self._findings.inventory.unheard).encode()

    def _best(self, findings: Findings, wanted: Version | None) -> Verdict:
        """The verdict that all can act on; or lets all wait."""
        while True:
            found = version_vote.decide(findings, self._job, self._out, wanted=wanted)
            awaited, choice = found.awaited, found.choice
            if choice is not None and self._stuck:
                reasons = (error.what for copy, error in self._out.away.items() if copy[0] == choice.version)
                awaited = ChoiceDeferred(choice.version, "; ".join(reasons), choice.in_storage)
            if awaited is None:
                version_vote.require_known(findings, found, self._job.topology)
                if wanted is not None and choice is not None:
                    self._say_what_is_left_behind(findings, wanted)
                return found
            limited = wanted is None and not awaited.durable
            patience = self._for_keepers if limited else self._for_storage
            error = self._error(findings, awaited)
            pause_s = patience.pause() if error.retryable else 0.0
            if pause_s:
                logger.warning("waiting for %s: %s; %s", awaited.version or "a keeper", awaited.reason, patience)
                return replace(found, choice=None, pause_s=pause_s)
            if not limited:
                raise self._in_vain(findings, awaited, error, wanted)
            self._give_up(awaited)

    def _say_what_is_left_behind(self, findings: Findings, wanted: Version) -> None:
        left = [version for version in findings.versions if version > wanted and self._job.lineage.is_live(version)]
        if left:
            what = "going back to %s leaves %d newer versions behind, up to %s; retention removes what is not pinned"
            logger.warning(what, wanted, len(left), max(left))

    def _error(self, findings: Findings, awaited: ChoiceDeferred) -> HoldfastError:
        """Return what was met where it was looked for."""
        if awaited.version is not None and awaited.version in findings.unread:
            return findings.unread[awaited.version]
        met = (error for copy, error in self._out.away.items() if copy[0] == awaited.version)
        return next(met, KeeperLost(awaited.reason, remedy="see its log; if it hangs, end it"))

    def _give_up(self, awaited: ChoiceDeferred) -> None:
        """Give up what keepers had who are as good as lost."""
        logger.error("%s is given up: %s; %s", awaited.version or "a keeper", awaited.reason, self._for_keepers)
        if awaited.version is None:
            self._out = replace(self._out, ignores_silent=True)
        else:
            self._pass_over(awaited.version, f"in memory only, and out of reach: {awaited.reason}")
            self._out, self._stuck = replace(self._out, away={}), False

    def _in_vain(
        self, findings: Findings, awaited: ChoiceDeferred, error: HoldfastError, wanted: Version | None
    ) -> HoldfastError:
        """Return what is raised instead of taking an older version."""
        version = awaited.version
        what = f"{version} cannot be read: {awaited.reason}" + (f" ({self._for_storage})" if error.retryable else "")
        remedies = [error.remedy or "make it readable, and start again"]
        older = None if wanted is not None or version is None else self._older(findings, version)
        if older is not None:
            what += f"; it is durable, and {older} is not taken in its place"
            remedies.append(
                f'to go back on purpose: restore(version="{older}"), or `holdfast run --from-version {older}`; unless '
                f"{version} is pinned before, retention removes it then"
            )
        return type(error)(what, where=error.where or self._storage.where, remedy="; ".join(remedies))

    def _older(self, findings: Findings, version: Version) -> Version | None:
        """The version that would be taken without this one."""
        quarantine = self._out.quarantine
        passed = Quarantine(quarantine.copies, {**quarantine.versions, version: "unreachable"})
        with contextlib.suppress(HoldfastError):
            found = version_vote.decide(findings, self._job, Exclusions(passed, ignores_silent=True), wanted=None)
            return found.choice.version if found.choice is not None else None
        return None
