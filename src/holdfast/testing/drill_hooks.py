"""Where the crash drill takes hold of production code: which functions make up a phase, and how a keeper is run.

The only file of the drill that names functions of the rooms below, besides testing/planted.py. Applied in forked
children; production code knows nothing of it.
"""

from __future__ import annotations

import gc


from holdfast.base.config import Config
from holdfast.node import process, start
from holdfast.node.client import KeeperClient
from holdfast.node.persist import Persister
from holdfast.node.places import Place
from holdfast.node.seal import Sealer
from holdfast.testing.crash_points import Journal
from holdfast.testing.drill_plan import Trial
from holdfast.testing.drill_process import Job, Setup
from holdfast.tiers import memory
from holdfast.tiers.storage import Storage
from holdfast.train import capture
from holdfast.train.capture import SlotView
from holdfast.train.checkpointer import Checkpointer
from holdfast.train.fence import Fence
from holdfast.train.saver import Saver
from holdfast.train.state import State

TRAINER_PHASES = {
    "save": ((Saver, "save"), (Fence, "_copy")),
    "restore": ((Checkpointer, "restore"),),
}
TRAINER_POINTS = (
    (capture, "copy"),
    (SlotView, "write_frames"),
    *(
        (KeeperClient, name)
        for name in ("assemble", "begin", "copied", "inventory", "obtain", "prepare", "register", "resume")
    ),
)
KEEPER_PHASES = {
    "seal": ((Sealer, "_seal"),),
    "persist": ((Persister, "_write"),),
    "commit": ((Storage, "commit"),),
    "retention": ((Storage, "retire"),),
}
KEEPER_POINTS = ((memory, "invalidate"), (memory, "write_header"))


def warm() -> None:
    """Loads what PyTorch loads at first use, and moves all objects out of the collector's sight, so that forks stay
    cheap.
    """
    job = Job(Setup(Trial(0, 0, "solo", "", "", ()), 0, 0, ""))
    objects = {"model": job.model, "optimizer": job.optimizer, "position": job.position}
    state = State(objects, rank=0, world_size=1, replicated=())
    for _ in range(2):  # before the first step, and after it
        state.predict()
        state.gather()
        job.train(1, 0)
    job.digest(0)
    gc.collect()
    gc.freeze()


def answer_from(fd: int, journal: Journal) -> None:
    """Lets the lane start the keeper that a trainer misses: a fork instead of a fresh interpreter."""

    def spawn(place: Place, root: str, config: Config, deadline: float) -> None:
        del root, config
        journal.write("keeper wanted")
        start._await_ready(fd, place, deadline)

    start._spawn = spawn


def keeper(root: str, config: Config, ready: int) -> int:
    """A keeper's whole life in this process; tells through `ready` that it listens."""
    process._log_to = lambda path, level: None  # the drill has its own log, which outlives the keeper's directory
    arguments = {
        "root": root, "run-id": config.run_id, "node": config.node, "runtime-dir": config.runtime_dir,
        "memory-budget": config.memory_budget, "linger-s": config.linger_s, "ready-fd": ready,
    }  # fmt: skip
    return process.main([f"--{name}={value}" for name, value in arguments.items()])
