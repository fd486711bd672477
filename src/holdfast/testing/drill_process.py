"""What the processes of a crash drill do: the trainer with its script of saves, and the keeper.

The bodies run in children forked from a warm process, or in fresh interpreters (`python -m
holdfast.testing.drill_process`). The trainer is an ordinary user of `holdfast.Checkpointer`: a small model with AdamW
whose gradients depend on incarnation, step and rank, so that two incarnations never make the same state. It journals
the digest of its state before each save, every level that was named to it, and what it came back with.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.core.model import Version
from holdfast.testing.crash_points import Journal
from holdfast.testing.drill_plan import SHAPES, TWINS, LifePlan, Save, Trial
from holdfast.testing.evidence import state_digest
from holdfast.train.checkpointer import Checkpointer

WIDTH = 96
# Tensors in the state of one rank: two layers, each with weight and bias, each with two moments and a step.
NUM_ENTRIES = 16
WAIT_S = 10.0
KEEP_LAST = 2
# How a trainer ends that met an error which holdfast named, and one that met another.
REFUSED, FAILED = 3, 4


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a process of one life is told.

    Attributes:
        life: number of the life, from 0.
        sandbox: directory of the trial; `c` in it is the checkpoint root, `r` the runtime directory.
        wanted: a version that the user orders.
        fresh: the user orders a new start.
    """

    trial: Trial
    life: int
    rank: int
    sandbox: str
    wanted: str = ""
    fresh: bool = False

    @property
    def plan(self) -> LifePlan:
        return self.trial.lives[self.life]

    @property
    def root(self) -> str:
        return f"{self.sandbox}/c"

    def config(self, node: int) -> Config:
        """The settings of a process on `node`."""
        return Config(
            every="1000000",
            durable_every="1000000",
            keep_last=KEEP_LAST,
            overlap=self.trial.overlap,
            node_label=f"n{node}",
            runtime_dir=f"{self.sandbox}/r",
            linger_s=60.0,
            close_timeout_s=WAIT_S,
            memory_budget="256MiB",
            log_level="INFO",
        )


def enter(sandbox: str, who: str, life: int) -> None:
    """Makes a forked or fresh process one of the drill: its output goes to a log, a signal shows where it hangs."""
    log = os.open(f"{sandbox}/{who}-{life}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s", force=True
    )


def trainer(setup: Setup, journal: Journal) -> int:
    """One life of a trainer; returns the exit code."""
    try:
        _train(setup, journal)
    except HoldfastError as error:
        journal.write("refused", what=f"{type(error).__name__}: {error}"[:1500], final=True)
        return REFUSED
    except Exception as error:  # top of the process: what it is goes into the verdict on the trial
        traceback.print_exc()
        journal.write("failed", what=f"{type(error).__name__}: {error}"[:1500])
        return FAILED
    return 0


class Job:
    """The model, its optimizer, and a position in the data."""

    def __init__(self, setup: Setup) -> None:
        self._rank = 0 if setup.trial.shape == TWINS else setup.rank
        self._seed = setup.trial.seed * 1_000_003 + setup.trial.number
        torch.manual_seed(self._seed + self._rank)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.position = Position()

    def train(self, incarnation: int, step: int) -> None:
        """One step, which in another incarnation has another result."""
        dice = torch.Generator().manual_seed((self._seed * 64 + incarnation) * 4096 + step * 2 + self._rank)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=dice)
        self.optimizer.step()
        self.position.next = step + 1

    def digest(self, step: int) -> str:
        """Digest of all tensors; marked if the position does not fit `step`."""
        wrong = "" if self.position.next == step + 1 else f" at position {self.position.next}"
        return state_digest(self._tensors()) + wrong

    def _tensors(self) -> Iterator[tuple[str, bytes]]:
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter.detach().numpy().tobytes()
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.state.{name}.{kind}", value.numpy().tobytes()


class Position:
    """A user's object with a state: which step comes next."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def _train(setup: Setup, journal: Journal) -> None:
    world_size = SHAPES[setup.trial.shape]
    if world_size > 1:
        store = dist.FileStore(f"{setup.sandbox}/store-{setup.life}-{setup.fresh}", world_size)
        dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=world_size)
    job = Job(setup)
    replicated = ("model.*", "optimizer.*") if setup.trial.shape == TWINS else ()
    checkpointer = Checkpointer(
        setup.root,
        model=job.model,
        optimizer=job.optimizer,
        replicated=replicated,
        config=setup.config(setup.rank),
        position=job.position,
    )
    start = checkpointer.restore(Version.parse(setup.wanted) if setup.wanted else None, fresh=setup.fresh)
    version, incarnation = _came_back(checkpointer)
    journal.write("resumed", incarnation=incarnation, version=str(version or ""), digest=job.digest(start - 1))
    if version is not None and version.step != start - 1:
        journal.write("failed", what=f"restored {version} and was told to go on at step {start}")
    _follow_script(setup, job, checkpointer, journal, start)
    if setup.plan.ends == "close":
        checkpointer.close()
        journal.write("closed")
        return
    journal.write("done")
    signal.pause()


def _came_back(checkpointer: Checkpointer) -> tuple[Version | None, int]:
    report = checkpointer.last_restore
    run = checkpointer._run
    assert run is not None  # restore returned
    return (report.version if report else None), run.job.incarnation


def _follow_script(setup: Setup, job: Job, checkpointer: Checkpointer, journal: Journal, step: int) -> None:
    incarnation = _came_back(checkpointer)[1]
    pending: list[tuple[Any, Save]] = []
    for number, save in enumerate(setup.plan.saves, 1):
        for _ in range(save.gap):
            job.train(incarnation, step)
            step += 1
        # Written before the call: whatever is found later under this version must be this state.
        journal.write("saving", incarnation=incarnation, step=step - 1, digest=job.digest(step - 1))
        handle = checkpointer.save(step - 1, level=save.level)
        if save.wait:
            _await_level(handle, save.level, journal)
        else:
            pending.append((handle, save))
    for handle, save in pending:
        _await_level(handle, save.level, journal)


def _await_level(handle: Any, level: str, journal: Journal) -> None:
    try:
        reached = handle.wait(level, timeout_s=WAIT_S)
        journal.write("ack", version=str(handle.version), level=int(reached))
    except LevelNotReached as error:
        journal.write("refused", what=str(error)[:1500], version=str(handle.version), final=False)


def main() -> int:
    """A fresh trainer: the setup as JSON and the number of the journal's descriptor on the command line."""
    torch.set_num_threads(1)
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    enter(setup.sandbox, f"t{setup.rank}", setup.life)
    return trainer(setup, Journal(int(sys.argv[2]), f"t{setup.rank}", setup.life))


if __name__ == "__main__":
    sys.exit(main())
