"""What tests/elastic/test_watchdog.py runs: several small jobs at once, forked from one process that has torch, each with
a fault of its own and a Watchdog. Prints one JSON line per job: what was said, about whom, after how long.

    watch_jobs.py DIRECTORY SECONDS MODE SCALE JOB...

SCALE multiplies every limit of the mode: with careful and 1/30 two minutes are four seconds, and all proportions stay.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from holdfast.checkpoint.liveness import heartbeat, heartbeat_page
from holdfast.core.elastic.watch_mode import MODES, Mode
from holdfast.elastic.watchdog.watchdog import Watchdog
from oddity_jobs import BOTH, HEALTHY, ODD_S, SICK

FAULT_AFTER_STEP = 20
CULPRIT = 1
PAST = FAULT_AFTER_STEP + 10


class Blocks(Dataset[torch.Tensor]):
    """Of which one element never comes."""

    def __init__(self, broken: bool, slow: bool) -> None:
        self.broken, self.slow = broken, slow

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.broken and index >= FAULT_AFTER_STEP:
            os.read(os.pipe()[0], 1)
        if self.slow and index == FAULT_AFTER_STEP:
            time.sleep(0.8 * ODD_S)
        return torch.ones(4)


def hang_on_a_lock() -> None:
    """With a thread that lives on: a heartbeat."""
    threading.Thread(target=lambda: [time.sleep(0.3) for _ in range(1000)], daemon=True).start()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def spin() -> None:
    while True:
        pass


def evaluate(model: torch.nn.Module) -> None:
    """Slow, alone, and in order."""
    model.eval()
    time.sleep(4)
    model.train()


def train(job: str, rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    if job != "plain":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    culprit = rank == CULPRIT
    blocks = Blocks(job in ("data", "no object") and culprit, job == "slow object" and culprit)
    # As before there were workers, or one that can be slow by itself.
    batches = iter(DataLoader(blocks, batch_size=1, num_workers=int("object" in job)))
    for step in range(100_000):
        loss = model(next(batches)).sum()
        loss.backward()
        if job == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if step == FAULT_AFTER_STEP and (culprit or job in BOTH):
            Fault.of(job, model)


class Fault:
    """What the culprit does to itself."""

    @staticmethod
    def of(job: str, model: torch.nn.Module) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "plain": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "lock": hang_on_a_lock,
            "spin": spin,
            "unheard": heartbeat.detach,
            "evaluation": lambda: evaluate(model),
        }
        if job in kinds:
            kinds[job]()
        elif job in (odd := {**HEALTHY, **SICK}):
            odd[job](model)


class Job:
    """Two ranks, their pages, their watchdog."""

    def __init__(self, name: str, directory: Path, mode: Mode) -> None:
        self.name = name
        store = tempfile.mktemp(prefix=f"store-{name}-", dir=directory)
        self.watchdog = Watchdog(directory / name, mode)
        self.pages = [heartbeat_page.make_page() for _ in range(2)]
        self.pids = [self._fork(rank, store) for rank in range(2)]
        self.said: list[dict[str, object]] = []
        self.stands = {0: "", 1: ""}
        for rank, pid in enumerate(self.pids):
            self.watchdog.started(rank, pid, self.pages[rank])

    def _fork(self, rank: int, store: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()  # as the launcher's workers
            ear = threading.Thread(target=threading.Event().wait, daemon=True)  # as that which hears the agent
            ear.start()
            heartbeat.attach(self.pages[rank], dump_thread=ear.native_id or 0)
            train(self.name, rank, store)
        except BaseException:  # noqa: BLE001 - a fork ends here, whatever happened
            traceback.print_exc()
        os._exit(1)

    def poll(self, now: float) -> None:
        for rank in range(len(self.pids)):
            stood = self.watchdog._workers[rank].stack.stands if rank in self.watchdog._workers else None
            if stood is not None:
                self.stands[rank] = stood.name
        for verdict in self.watchdog.poll(now, world_size=2):
            self.said.append(
                {
                    "kind": verdict.kind.value, "rank": verdict.rank, "reason": verdict.reason,
                    "evidence": verdict.evidence, "after_s": round(verdict.found_after_s, 2),
                    "stacks": max(map(str, self.watchdog.directory.glob(f"stacks-rank{verdict.rank}-*.txt")), default=""),
                    "p99_s": heartbeat_page.read(self.pages[verdict.rank]).beat.step_p99_s,
                }
            )  # fmt: skip

    def steps(self) -> list[int]:
        return [heartbeat_page.read(fd).beat.step for fd in self.pages]

    def num_steps(self) -> int:
        """Of the slower rank, or of the one that can be heard."""
        return self.steps()[0] if self.name == "unheard" else min(self.steps())

    def end(self) -> None:
        steps = self.steps()
        self.watchdog.close()
        alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in self.pids]
        for pid, lives in zip(self.pids, alive, strict=True):
            if lives:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        print(json.dumps({"job": self.name, "said": self.said, "steps": steps, "alive": alive, "stands": self.stands}))


def scaled(mode: Mode, factor: float) -> Mode:
    """The same proportions with every time multiplied: minutes become seconds for real processes."""
    floors = {phase: (low * factor, high * factor) for phase, (low, high) in mode.floors_s.items()}
    names = [each.name for each in fields(mode) if each.name.endswith("_s") and each.name != "floors_s"]
    return replace(mode, floors_s=floors, **{name: getattr(mode, name) * factor for name in names})


def main() -> None:
    directory, seconds, names = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[5:]
    mode = scaled(MODES[sys.argv[3]], float(sys.argv[4]))
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).zero_grad()  # what it imports, it imports once
    jobs = [Job(name, directory, mode) for name in names]
    deadline = time.monotonic() + 60
    healthy = [job for job in jobs if job.name in ("healthy", "unheard", "evaluation", *HEALTHY)]

    def time_is_left() -> bool:
        """Healthy jobs of a busy machine get more: their steps past the fault are what is asked of them, of both ranks."""
        behind = any(job.num_steps() <= PAST and not job.said for job in healthy)
        return time.monotonic() < deadline + (60 if behind else 0)

    started, zoo = False, {*names} <= {*HEALTHY, *SICK}
    try:
        while time_is_left() and (healthy or not all(job.said for job in jobs)):
            for job in jobs:
                job.poll(time.monotonic())
            if zoo and all(job.said or job.num_steps() > PAST for job in jobs):
                break
            if not started and all(job.steps()[0] >= FAULT_AFTER_STEP for job in jobs):
                started, deadline = True, time.monotonic() + seconds
            time.sleep(0.05)
    finally:
        for job in jobs:
            job.end()


if __name__ == "__main__":
    main()
