"""What is planted in the trainers of the crash drill; see planted.py, which has the list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from holdfast.core import recovery
from holdfast.core.lineage import Lineage
from holdfast.core.model import Decision, Version
from holdfast.testing.drill.planted import put, unverified
from holdfast.tiers.storage import Storage
from holdfast.train import capture, restore, verdict
from holdfast.train.fence import Fence
from holdfast.train.state import State

# How long a copy is stretched, so that something can come between its bytes.
COPY_S = 0.004


def apply(name: str) -> None:
    """Plants the bug in this trainer, if it is one of trainers."""
    if name in _IN_TRAINERS:
        _IN_TRAINERS[name]()


def _slow_copy() -> None:
    """Not a bug: a copy that takes long enough to be interrupted."""
    original = capture.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            original([target], [source])
            time.sleep(COPY_S / len(targets))

    put(capture, "copy", copy)


def _sealed_before_copied() -> None:
    original = capture.copy

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        threading.Timer(COPY_S, original, (targets, [source.clone() for source in sources])).start()

    put(capture, "copy", copy)


def _stale_snapshot() -> None:
    original = capture.copy
    first: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        key = tuple(source.data_ptr() for source in sources)
        original(targets, first.setdefault(key, [source.clone() for source in sources]))

    put(capture, "copy", copy)


def _fence_removed() -> None:
    _slow_copy()
    put(Fence, "_before_step", lambda self, *args: None)


def _newest_step() -> None:
    original = recovery.choose_version

    def choose(facts: recovery.Facts, *, wanted: Version | None = None) -> Decision[recovery.Choice | None]:
        found = sorted({copy.version for copy in facts.memory} | set(facts.stored), key=lambda v: v.step, reverse=True)
        for version in found if wanted is None else ():
            decision = original(replace(facts, lineage=Lineage()), wanted=version)
            if decision.value is not None:
                return decision
        return original(facts, wanted=wanted)

    put(recovery, "choose_version", choose)


def _each_for_itself() -> None:
    """Rank 1 does not ask what rank 0 decided: it takes the version before."""
    original = verdict.decode

    def decode(data: bytes) -> verdict.Verdict:
        found = original(data)
        return found

    put(verdict, "decode", decode)
    del restore


def _values_forgotten() -> None:
    original = State.apply

    def apply_tensors(self: State, values: Any, tensors: Any) -> None:
        position = self._objects["position"]
        before = position.state_dict()
        original(self, values, tensors)
        position.load_state_dict(before)

    put(State, "apply", apply_tensors)


def _incarnation_again() -> None:
    original = Storage.register_incarnation

    def register(self: Storage) -> int:
        return self.highest_incarnation() or original(self)

    put(Storage, "register_incarnation", register)


_IN_TRAINERS: dict[str, Callable[[], None]] = {
    "header-stays-valid": _slow_copy,
    "slot-by-counting": _slow_copy,
    "sealed-before-copied": _sealed_before_copied,
    "stale-snapshot": _stale_snapshot,
    "fence-removed": _fence_removed,
    "digest-not-compared": unverified,
    "newest-step": _newest_step,
    "values-forgotten": _values_forgotten,
    "incarnation-again": _incarnation_again,
}
