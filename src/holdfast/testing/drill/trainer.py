"""A trainer of the crash drill: an ordinary user of `holdfast.Checkpointer` that follows a script of saves.

The model is small and its gradients depend on incarnation, step and rank, so that two incarnations never make the same
state. It journals the digest of its state before each save, every level that was named to it, and what it came back
with. The body runs in children forked by the fork server, or in a fresh interpreter
(`python -m holdfast.testing.drill.trainer <setup> <descriptor of the journal>`).
"""

from __future__ import annotations

import random
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.copy_plan import SlotView
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.core.model import Version
from holdfast.keeper.rpc import spawn as start
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.testing.checks.evidence import state_digest
from holdfast.testing.drill.crash_points import Journal
from holdfast.testing.drill.shared import FAILED, REFUSED, Ground, Setup, enter
from holdfast.testing.drill.trial_plan import SHAPES, TWINS, Save

# Small; now and then large enough that files are written past the page cache.
WIDTH, LARGE_WIDTH = 64, 128

PHASES = {
    "save": ((Saver, "save"),),  # what is copied after it is reached by late timers
    "restore": ((Checkpointer, "restore"),),
}
_CALLS = ("assemble", "begin", "copied", "inventory", "obtain", "prepare", "register", "resume")
POINTS = ((copy_plan, "copy"), (SlotView, "write_frames"), *((KeeperClient, name) for name in _CALLS))


def forked_trainer(setup: Setup, ground: Ground) -> int:
    """One life of a trainer in a forked child, with a probe in it; returns the exit code."""
    name = f"t{setup.rank}"
    enter(setup, name)
    journal = ground.journal(name, setup.life)
    _ask_the_lane(ground.answers[setup.rank][0], journal)
    ground.probe(name, setup).watch(PHASES, POINTS)
    return trainer(setup, journal)


def _ask_the_lane(answers: int, journal: Journal) -> None:
    """A keeper that is missed is forked by the lane, instead of being started as a fresh interpreter."""

    def spawn(place: RuntimePaths, root: str, config: Config, deadline: float) -> bool:
        del root, config
        journal.write("keeper wanted")
        return start._await_ready(answers, place, deadline)

    start._spawn = spawn


def trainer(setup: Setup, journal: Journal) -> int:
    """One life of a trainer; returns the exit code."""
    try:
        _train(setup, journal)
    except HoldfastError as error:
        journal.write("refused", what=f"{type(error).__name__}: {error}"[:1500], final=True)
        return REFUSED
    except Exception as error:  # noqa: BLE001 - top of the process: what it is goes into the verdict
        traceback.print_exc()
        journal.write("failed", what=f"{type(error).__name__}: {error}"[:1500])
        return FAILED
    return 0


class Job:
    """The model, its optimizer, and a position in the data."""

    def __init__(self, setup: Setup) -> None:
        self._rank = 0 if setup.trial.shape == TWINS else setup.rank
        self._seed = setup.trial.seed * 1_000_003 + setup.trial.number
        torch.default_generator.manual_seed(self._seed + self._rank)  # torch.manual_seed asks every kind of device
        width = LARGE_WIDTH if setup.trial.large else WIDTH
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
        self._slopes = [torch.linspace(-1.0, 1.0, p.numel()).view(p.shape) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.position = Position()

    def train(self, incarnation: int, step: int) -> None:
        """One step, which in another incarnation has another result."""
        pull = random.Random(f"{self._seed}/{incarnation}/{step}/{self._rank}").uniform(-1.0, 1.0)
        for parameter, slope in zip(self.model.parameters(), self._slopes, strict=True):
            parameter.grad = slope + pull
        self.optimizer.step()
        self.position.next = step + 1

    def twist(self, rank: int) -> None:
        """Flips the lowest bit of one parameter on rank 1; twice is as if never."""
        if rank == 1:
            next(self.model.parameters()).detach().view(torch.int32)[0, 0] ^= 1

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
        store = dist.FileStore(f"{setup.sandbox}/store-{setup.life}-{setup.fresh}", world_size)  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=world_size)
    job = Job(setup)
    replicated = ("model.*", "optimizer.*") if setup.trial.shape == TWINS else ()
    checkpointer = Checkpointer(
        setup.root,
        model=job.model,
        optimizer=job.optimizer,
        replicated=replicated,
        config=setup.config,
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
    """Trains and saves; `step` is the first to train."""
    incarnation = _came_back(checkpointer)[1]
    pending: list[tuple[Any, Save]] = []
    plan = setup.plan
    for number, save in enumerate(plan.saves, 1):
        apart = 0 < plan.skew < number
        if apart and setup.rank == 1:
            break
        for _ in range(save.gap):
            job.train(incarnation, step)
            step += 1
        twisted = number == plan.twist
        if twisted:
            journal.write("twisted", incarnation=incarnation, step=step - 1)
            job.twist(setup.rank)
        # Written before the call: whatever is found later under this version must be this state.
        journal.write("saving", incarnation=incarnation, step=step - 1, digest=job.digest(step - 1))
        handle = checkpointer.save(step - 1, level=save.level)
        if save.wait or twisted:
            _await_level(handle, "captured" if twisted else save.level, setup.wait_s, journal)
        elif not apart:
            pending.append((handle, save))
        if twisted:
            job.twist(setup.rank)
    for handle, save in pending:
        _await_level(handle, save.level, setup.wait_s, journal)


def _await_level(handle: Any, level: str, timeout_s: float, journal: Journal) -> None:
    try:
        reached = handle.wait(level, timeout_s=timeout_s)
        journal.write("ack", version=str(handle.version), level=int(reached))
    except LevelNotReached as error:
        journal.write("refused", what=str(error)[:1500], version=str(handle.version), final=False)


def main() -> int:
    """A fresh trainer: the setup as JSON and the journal's descriptor are on the command line."""
    torch.set_num_threads(1)
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    enter(setup, f"t{setup.rank}")
    journal = Journal(int(sys.argv[2]), f"t{setup.rank}", setup.life)
    journal.write("begins")
    return trainer(setup, journal)


if __name__ == "__main__":
    sys.exit(main())
