"""Late copies that wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS
from kit.checkpointers import Make, Trainee


class Held:
    """Holds late copies back until `let_go`; copies in the call go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._copy = copy_plan.copy
        monkeypatch.setattr(copy_plan, "copy", self._held)

    def _held(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread().name == "holdfast-capture":
            assert self.gate.wait(30.0)
        self._copy(targets, sources)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    holder = Held(monkeypatch)
    yield holder
    holder.gate.set()


def trusted(make: Make, trainee: Trainee, **options: Any) -> Any:
    """A checkpointer whose next save copies late."""
    checkpointer = make(trainee, fence_timeout_s=20.0, **options)
    checkpointer.restore()
    for step in range(NUM_PROOFS + 1):
        trainee.train()
        checkpointer.save(step).wait("captured", 60)
    trainee.train()
    assert checkpointer.events.counters()["late_copied_bytes"] > 0
    return checkpointer


def fill(trainee: Trainee) -> None:
    for parameter in trainee.model.parameters():
        parameter.data.fill_(7.0)
