"""Lists what is planted in the trainers of the crash drill; see crash.py, which has the list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.optimizer_fence import Fence
from holdfast.checkpoint.restore import version_vote
from holdfast.checkpoint.restore.restorer import Restorer, RestoreReport
from holdfast.checkpoint.save.save_completion import SaveCompletion
from holdfast.checkpoint.state.stateful import StatefulPart
from holdfast.core.model import Version
from holdfast.core.rank_runs import is_in
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice
from holdfast.core.versions.lineage import Lineage
from holdfast.tiers.storage.incarnations import Incarnations
from planted.crash import always, put, unverified

# How long a copy is stretched, so that something can come between its bytes.
COPY_S = 0.02


def _slow_copy() -> None:
    """Not a bug: a copy that takes long enough to be interrupted."""
    original = copy_plan.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            original([target], [source])
            time.sleep(COPY_S / len(targets))

    put(copy_plan, "copy", copy)


def _sealed_before_copied() -> None:
    original = copy_plan.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        threading.Timer(COPY_S, original, (targets, [source.clone() for source in sources])).start()

    put(copy_plan, "copy", copy)


def _stale_snapshot() -> None:
    original = copy_plan.copy
    first: dict[tuple[int, int], torch.Tensor] = {}

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        original(targets, [first.setdefault((s.data_ptr(), s.nbytes), s.clone()) for s in sources])

    put(copy_plan, "copy", copy)


def _fence_removed() -> None:
    _slow_copy()
    put(Fence, "_wait", always(None))
    put(SaveCompletion, "_wrong", always(""))  # which would find it out


def _newest_step() -> None:
    original = version_choice.choose_version

    def choose(facts: version_choice.Facts, *, wanted: Version | None = None) -> version_choice.Judged:
        found = sorted({copy.version for copy in facts.memory} | set(facts.stored), key=lambda v: v.step, reverse=True)
        for version in found if wanted is None else ():
            decision = original(replace(facts, lineage=Lineage()), wanted=version)
            if decision.value is not None:
                return decision
        return original(facts, wanted=wanted)

    put(version_choice, "choose_version", choose)


def _each_for_itself() -> None:
    """No agreement: every rank takes the newest version in its own slots."""
    original = Restorer._newest

    def newest(self: Restorer, wanted: Version | None) -> RestoreReport:
        found, rank = version_vote.find(self._client, self._storage, timeout_s=self._timeout_s), self._job.group.rank
        own = [copy for copy in found.inventory.copies if is_in(rank, copy.ranks)]
        if not own:
            return original(self, wanted)
        version = max(copy.version for copy in own)
        refs = tuple(ref for table in list(found.inventory.tables.values())[-1:] for ref in table if rank in ref.ranks)
        holders = {copy.seal.bundle_id: (copy,) for copy in own if copy.version == version}
        seals = {bundle_id: copies[0].seal for bundle_id, copies in holders.items()}
        choice = Choice(version, refs, seals, holders, in_storage=False, world_size=self._job.group.world_size)
        report = self._attempt(version_vote.Verdict(choice, "mine", True), choice)
        assert report is not None  # its own slot is good
        return report

    put(Restorer, "_newest", newest)


def _values_forgotten() -> None:
    put(StatefulPart, "apply", always(None))


def _incarnation_again() -> None:
    original = Incarnations.register

    def register(self: Incarnations, **_: int) -> int:
        return self.highest() or original(self)

    put(Incarnations, "register", register)
    put(Incarnations, "record_resumed", always(None))


IN_TRAINERS: dict[str, Callable[[], None]] = {
    "header-stays-valid": _slow_copy,
    "slot-by-counting": _slow_copy,
    "sealed-before-copied": _sealed_before_copied,
    "stale-snapshot": _stale_snapshot,
    "fence-removed": _fence_removed,
    "digest-not-compared": unverified,
    "newest-step": _newest_step,
    "each-rank-for-itself": _each_for_itself,
    "values-forgotten": _values_forgotten,
    "incarnation-again": _incarnation_again,
}
