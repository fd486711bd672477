"""Reads what the demo's ranks wrote down (JSON lines, final tensors), while they run, and compares it at the end.

Reads only; knows nothing about processes. A line that is still being written is left for the next look.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class Comparison:
    """The final states and losses of two runs side by side.

    Attributes:
        num_tensors, num_values, num_bytes: what was compared, over all ranks.
        num_losses: (rank, step) pairs whose losses were compared, every attempt of a step included.
        differences: one line for each tensor or loss that is not bit-equal.
    """

    num_tensors: int
    num_values: int
    num_bytes: int
    num_losses: int
    differences: tuple[str, ...]


@dataclass(slots=True)
class Facts:
    """Everything a run has logged so far; `refresh` reads what is new.

    Attributes:
        losses: (rank, step) -> the loss of every attempt of that step, in order.
        lines: per rank all other facts and the steps, in order.
    """

    directory: Path
    world_size: int
    losses: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _offsets: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def refresh(self) -> None:
        """Reads the complete lines that were added since the last call."""
        for rank in range(self.world_size):
            path = self.directory / f"rank{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                fresh = file.read()
            complete = fresh[: fresh.rfind(b"\n") + 1]
            self._offsets[rank] += len(complete)
            for raw in complete.splitlines():
                fact = json.loads(raw)
                self.lines[rank].append(fact)
                if fact["event"] == "step":
                    self.losses[rank, fact["step"]].append(fact["loss"])

    def last(self, rank: int, event: str) -> dict[str, Any] | None:
        """The newest fact of this kind from `rank`."""
        return next((fact for fact in reversed(self.lines[rank]) if fact["event"] == event), None)

    def recovery(self, rank: int, after: float) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return what `rank` restored last, and the first step it finished then; None until both came later than
        `after`.
        """
        recent = [fact for fact in self.lines[rank] if fact["time"] > after]
        begins = [index for index, fact in enumerate(recent) if fact["event"] == "restored"]
        if not begins:
            return None
        restored, *rest = recent[begins[-1] :]
        step = next((fact for fact in rest if fact["event"] == "step"), None)
        return (restored, step) if step else None

    def restarted(self, rank: int, after: float) -> dict[str, Any] | None:
        """The first step that `rank` finished after it started anew later than `after`, whatever it restored."""
        recent = [fact for fact in self.lines[rank] if fact["time"] > after]
        starts = [index for index, fact in enumerate(recent) if fact["event"] == "start"]
        if not starts:
            return None
        return next((fact for fact in recent[starts[-1] :] if fact["event"] == "step"), None)

    def process(self, rank: int, at: float) -> int:
        """The id of the process that `rank` had at that time; -1 if it had none."""
        pids = [fact["pid"] for fact in self.lines[rank] if fact["event"] == "start" and fact["time"] <= at]
        return pids[-1] if pids else -1

    def kept(self, after: float) -> tuple[int, ...]:
        """The ranks whose process is the same now as at that time."""
        before = {rank: self.process(rank, after) for rank in range(self.world_size)}
        return tuple(rank for rank, pid in before.items() if pid == self.process(rank, float("inf")) != -1)

    def finished_step(self, before: float = float("inf")) -> int:
        """The newest step that every rank had finished at that time; -1 if there is none."""
        newest = []
        for rank in range(self.world_size):
            steps = [f["step"] for f in self.lines[rank] if f["event"] == "step" and f["time"] <= before]
            newest.append(steps[-1] if steps else -1)
        return min(newest)

    def mean_loss(self, step: int) -> float:
        """Mean over the ranks that have finished it; NaN if none has."""
        known = [self.losses[rank, step][-1] for rank in range(self.world_size) if self.losses.get((rank, step))]
        return sum(known) / len(known) if known else float("nan")


def compare(run: Facts, reference: Facts) -> Comparison:
    """All parameters and optimizer moments of all ranks and every loss of `run` against `reference`, bit for bit."""
    differences: list[str] = []
    num_losses = 0
    for (rank, step), (expected, *_) in sorted(reference.losses.items()):
        attempts = run.losses.get((rank, step), [])
        num_losses += len(attempts)
        if not attempts or any(np.float64(loss).tobytes() != np.float64(expected).tobytes() for loss in attempts):
            differences.append(f"loss of rank {rank} at step {step}: {attempts} instead of {expected}")
    num_tensors = num_values = num_bytes = 0
    for rank in range(reference.world_size):
        expected_tensors, found_tensors = _tensors(reference, rank), _tensors(run, rank)
        for name in sorted(expected_tensors.keys() | found_tensors.keys()):
            left, right = expected_tensors.get(name), found_tensors.get(name)
            if left is None or right is None or left.shape != right.shape or left.tobytes() != right.tobytes():
                differences.append(f"{name} of rank {rank}")
            else:
                num_tensors, num_values, num_bytes = num_tensors + 1, num_values + left.size, num_bytes + left.nbytes
    return Comparison(num_tensors, num_values, num_bytes, num_losses, tuple(differences))


def _tensors(facts: Facts, rank: int) -> dict[str, Any]:
    path = facts.directory / f"final-rank{rank}.safetensors"
    if not path.exists():
        return {}
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
