"""Ray waits in `report` for all workers: they report equally often, whatever their clocks say. Stand-ins of ray and pyarrow."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.core.model import Level, Version

WORKERS, STEPS = 2, 40


class Cluster:
    """Two workers in two threads; each call that Ray makes a barrier of is one here, and breaks when one waits for long."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORKERS, timeout=20)
        self._said: Any = None
        self.mine = threading.local()
        self.reports: list[tuple[int, int, Any]] = []

    def broadcast(self, data: Any) -> Any:
        if self.mine.rank == 0:
            self._said = data
        self._barrier.wait()
        said = self._said
        self._barrier.wait()
        return said

    def report(self, metrics: dict[str, Any], *, checkpoint: Any, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "none"
        self.reports.append((self.mine.rank, metrics["step"], checkpoint))
        self._barrier.wait()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    train, collective, ray = ModuleType("ray.train"), ModuleType("ray.train.collective"), ModuleType("ray")
    ray.train = train  # type: ignore[attr-defined]
    train.report, train.get_preemption_info = made.report, lambda: None  # type: ignore[attr-defined]
    train.CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="none")  # type: ignore[attr-defined]
    train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: made.mine.rank)  # type: ignore[attr-defined]
    collective.broadcast_from_rank_zero = made.broadcast  # type: ignore[attr-defined]
    pyarrow, files = ModuleType("pyarrow"), ModuleType("pyarrow.fs")
    pyarrow.fs = files  # type: ignore[attr-defined]
    for module in (ray, train, collective, pyarrow, files):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "holdfast.adapters.ray", raising=False)
    return made


def test_ranks_that_save_at_different_steps_report_at_the_same_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A durable save by the clock falls to a step of each rank's own."""
    from holdfast.adapters.ray import RayCheckpointer

    durable = {0: (7, 23), 1: (8, 24)}

    def step(self: Any, number: int, **_: Any) -> Any:
        is_due = number in durable[cluster.mine.rank]
        if is_due:
            self._is_durable(Version(1, number), None)
        return SimpleNamespace(level=Level.DURABLE if is_due else Level.CAPTURED)

    monkeypatch.setattr(Checkpointer, "step", step)
    monkeypatch.setattr(Checkpointer, "off", False, raising=False)
    monkeypatch.setattr(RayCheckpointer, "_pointer", lambda _, version: str(version))

    def train(rank: int) -> None:
        cluster.mine.rank = rank
        made: Any = object.__new__(RayCheckpointer)
        made._told, made._newest, made._reported, made._lock = None, None, None, threading.Lock()
        made._look_every, made.notice = 10, None
        for number in range(STEPS):
            made.step(number, {"step": number})

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(train, range(WORKERS)))
    told = sorted(cluster.reports, key=lambda row: (row[1], row[0]))
    first, second = str(Version(1, 7)), str(Version(1, 23))
    assert told == [(0, 10, first), (1, 10, None), (0, 30, second), (1, 30, None)]
    sys.modules.pop("holdfast.adapters.ray", None)
