"""Holds what the processes of a lane share: one journal, one pipe per trainer for answers, one table of process ids.

All of it exists before the first fork and is inherited, by fork or by number. Nothing here imports PyTorch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from holdfast.base.config import Config
from holdfast.testing.drill.crash_points import Journal, Probe, Strike
from holdfast.testing.drill.trial_plan import LifePlan, Trial

MAX_RANKS = 2
KEEP_LAST = 2
# How long a rank waits for a level, and for its last save when it closes.
# Where something is killed a level may never come.
WAIT_S, WAIT_STRUCK_S = 2.0, 0.5
CLOSE_S = 10.0
# Tensors in the state of one rank: two layers, each with weight and bias, each with two moments and a step.
NUM_ENTRIES = 16
# How a trainer ends that met an error which holdfast named, and one that met another.
REFUSED, FAILED = 3, 4

_NUMBER = struct.Struct("<i")
_PLACES = {f"{kind}{rank}": 2 * rank + (kind == "k") for rank in range(MAX_RANKS) for kind in "tk"}
# Behind the process ids: the life that runs, and the strike planned for it with its length before it.
_LIFE_AT = len(_PLACES) * _NUMBER.size
_STRIKE_AT = _LIFE_AT + _NUMBER.size
_TABLE_BYTES = mmap.PAGESIZE
_ORDERS = struct.Struct("<ii")
# Between two lives.
_NO_LIFE = -1
_PR_SET_PDEATHSIG = 1
LOG_FORM = "%(relativeCreated)d %(name)s %(message)s"

# What tests of the drill plant in a process, by the name in its trial; nothing elsewhere.
PLANTS: dict[str, Callable[[], None]] = {}


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a process of one life is told.

    Attributes:
        life: number of the life, from 0.
        rank: of a trainer; the node of a keeper.
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
    def wait_s(self) -> float:
        """Return how long this rank waits for a level."""
        return WAIT_STRUCK_S if self.plan.aim else WAIT_S

    @property
    def root(self) -> str:
        return f"{self.sandbox}/c"

    @property
    def config(self) -> Config:
        """The settings of a process on this node."""
        return Config(
            every="1000000",
            durable_every="1000000",
            keep_last=KEEP_LAST,
            overlap=self.trial.overlap,
            begin_timeout_s=0.1 if self.plan.skew else 0.3 if self.plan.aim else 1.0,
            node_label=f"n{self.rank}",
            # A second copy would hide what one node has lost, if it was quick enough.
            redundancy="none" if any(life.skew for life in self.trial.lives) else "replica",
            runtime_dir=f"{self.sandbox}/r",
            linger_s=60.0,
            close_timeout_s=CLOSE_S,
            memory_budget="256MiB",
            log_level="INFO",
        )


@dataclass(frozen=True, slots=True)
class Ground:
    """Descriptors, valid in every process of the lane.

    Attributes:
        journal_r, journal_w: one line per fact, from every process to the lane.
        answers: per rank (read, write): where a keeper tells the trainer that asked for it that it listens.
        table: memory with the process id of every member.
    """

    journal_r: int
    journal_w: int
    answers: tuple[tuple[int, int], ...]
    table: int

    @classmethod
    def make(cls) -> Ground:
        """New pipes and an empty table."""
        journal_r, journal_w = os.pipe()
        os.set_blocking(journal_r, False)
        answers = tuple(os.pipe() for _ in range(MAX_RANKS))
        table = os.memfd_create("drill")
        os.ftruncate(table, _TABLE_BYTES)
        ground = cls(journal_r, journal_w, answers, table)
        ground.end_life()
        return ground

    @property
    def inherited(self) -> tuple[int, ...]:
        """Return what a fresh interpreter is passed."""
        return (self.journal_w, self.table, *(fd for pair in self.answers for fd in pair))

    def enter_pid(self, name: str, pid: int) -> None:
        """Tells every process who is behind a name."""
        os.pwrite(self.table, _NUMBER.pack(pid), _PLACES[name] * _NUMBER.size)

    def enter_life(self, life: int, strike: Strike | None) -> None:
        """Tells every process which life runs, and what is planned for it."""
        plan = msgspec.msgpack.encode(strike) if strike is not None else b""
        os.pwrite(self.table, _NUMBER.pack(len(plan)) + plan, _STRIKE_AT)
        os.pwrite(self.table, _NUMBER.pack(life), _LIFE_AT)  # last, for others read while this is written

    def cancel_strike(self) -> None:
        """The life goes on without one."""
        os.pwrite(self.table, _NUMBER.pack(0), _STRIKE_AT)

    def end_life(self) -> None:
        """No life runs; what was planned for one is void."""
        os.pwrite(self.table, _NUMBER.pack(_NO_LIFE), _LIFE_AT)

    def orders(self) -> tuple[int, Strike | None]:
        """The life that runs, -1 between two, and the strike planned for it."""
        data = os.pread(self.table, _TABLE_BYTES - _LIFE_AT, _LIFE_AT)
        life, length = _ORDERS.unpack_from(data)
        if life == _NO_LIFE or not length:
            return life, None
        return life, msgspec.msgpack.decode(data[_ORDERS.size : _ORDERS.size + length], type=Strike)

    def pid_of(self, name: str) -> int:
        return int(_NUMBER.unpack(os.pread(self.table, _NUMBER.size, _PLACES[name] * _NUMBER.size))[0])

    def drain_answers(self) -> None:
        """Forgets what nobody waited for."""
        for fd, _ in self.answers:
            while select.select([fd], [], [], 0)[0]:
                os.read(fd, mmap.PAGESIZE)

    def journal(self, name: str, life: int) -> Journal:
        return Journal(self.journal_w, name, life)

    def probe(self, name: str, setup: Setup) -> Probe:
        """The watcher of one process."""
        return Probe(name, self.journal(name, setup.life), self, root=setup.root, mode=setup.trial.mode)


def die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)


def multiply(count: int) -> tuple[int, list[int]]:
    """Forks this process, warm as it is, until there are `count` of it; which die with the first.

    Returns:
        The number of the process that this is, and in the first the process ids of the others.
    """
    first, others = os.getpid(), list[int]()
    for number in range(1, count):
        pid = os.fork()
        if pid == 0:
            die_with(first)
            return number, []
        others.append(pid)
    return 0, others


def enter(setup: Setup, who: str) -> None:
    """Makes this process one of the drill: its output goes to a log of its own, a signal shows where it hangs."""
    log = os.open(f"{setup.sandbox}/{who}-{setup.life}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # A forked process has it from its parent; setting it up would touch every logger there is.
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORM)
    PLANTS.get(setup.trial.plant, lambda: None)()
