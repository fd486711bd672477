"""How long a save holds up training: python -m benchmarks.stall [--quick] [--json]

The state is a real GPT with AdamW (435 tensors and their step counters, 512 MiB), the optimizer is real, the
Checkpointer is the real one. Everything is divided by a plain copy of the same tensors into pre-faulted memory, taken
right before or after.

- `stall_ratio`: `save()` with `overlap=False`.            `first_save_ratio`: the first one, over those right after it.
- `overlapped_stall_ratio`: `save()` plus the wait at the next optimizer step, with real training in between.
- `checks_share_of_copy`: processor time of the checks of late copies per save, in the call, at the fence and in the copying
  thread, over the plain copy; `passed`: the time that passed in them, waiting for Python's lock included.
- `train_seconds_lost_per_save`: wall time from `save()` until the version is durable, minus the steps made meanwhile at
  the speed without a save; stall and slowdown together. With one rank, and with two ranks that share the state.
- `slow_storage_stall_ratio`: two saves in a row, the first of them durable, while storage takes 5 MB/s (benchmarks.pace), over
  the same while it takes what it can; interleaved. `slow_storage_stall_over_copy`: the same with slow storage over two copies.
- The same for `torch.save`, `dcp.save` and `dcp.async_save` (called as documented, and with a stager that is kept).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from benchmarks import measure, pace
from benchmarks.measure import MIB, PlainCopy, Report, ratio, timed
from torch import distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import holdfast
from holdfast.checkpoint.capture.late_copy_check import CopyCheck, LateCopyChecker

NUM_FIRSTS = 5
NUM_AFTER_FIRST = 5  # what a first save is compared with: those of the same job right after it
SLOW_BYTES_PER_S = 5_000_000
NUM_PROVING_SAVES = 4  # the first saves copy at once until it is proven that late copying is safe


class Bench:
    """Model, optimizer and plain copy of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.rounds = 5 if options.quick else 15
        self.lost_rounds = 3 if options.quick else 9
        self.base_steps = 4 if options.quick else 6
        self.directory = options.dir
        torch.manual_seed(self.rank)
        self.model, self.optimizer = measure.gpt_of(options.mib * MIB // self.world_size)
        self.train = measure.training(self.model, self.optimizer)
        self.step = 0

    def checkpointer(self, name: str, *, overlap: bool) -> holdfast.Checkpointer:
        """A real one on a path of its own; saves happen only when asked for."""
        config = measure.only_on_demand(self.directory)
        checkpointer = holdfast.Checkpointer(
            self.directory / f"{name}-{self.world_size}",
            model=self.model,
            optimizer=self.optimizer,
            overlap=overlap,
            config=config,
        )
        checkpointer.restore()
        return checkpointer

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def plain_copy(self) -> PlainCopy:
        return PlainCopy(measure.state_tensors(self.model, self.optimizer))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the rivals save: every tensor under a name of this rank."""
        tensors = measure.state_tensors(self.model, self.optimizer)
        return {f"rank{self.rank}.{name}": tensor for name, tensor in tensors.items()}

    # --- holdfast

    def copying_at_once(self) -> tuple[float, float, float]:
        """Stall over copy; first save over a steady one; seconds of a steady save. `overlap=False`."""
        firsts = []
        for number in range(NUM_FIRSTS):  # a first save happens once: each of these has a keeper and slots of its own
            with self.checkpointer(f"at-once-{number}", overlap=False) as checkpointer:
                saves = []
                for _ in range(1 + NUM_AFTER_FIRST):
                    self.train()  # creates the moments
                    saves.append(self.stall(checkpointer))
                firsts.append(saves[0] / statistics.median(saves[1:]))
                if number < NUM_FIRSTS - 1:
                    continue
                copy = self.plain_copy()
                saves, copies = measure.paired(lambda: self.stall(checkpointer), copy.out, self.rounds)
        return ratio(saves, copies), statistics.median(firsts), statistics.median(saves)

    def stall(self, checkpointer: holdfast.Checkpointer) -> float:
        """Seconds that one save holds up its caller."""
        started = time.perf_counter()
        handle = checkpointer.save(self.next_step())
        seconds = time.perf_counter() - started
        handle.wait("captured", timeout_s=60)
        return seconds

    def copying_behind(self) -> tuple[float, ...]:
        """Stall over copy, its share in the call, its share at the fence; training in between. Last, the checks' share, of
        processor time and of time that passed.
        """
        fence = FenceClock(self.optimizer)
        checks = ChecksClock()
        with self.checkpointer("behind", overlap=True) as checkpointer:
            fence.close_interval(self.optimizer)
            self.train()
            copy = self.plain_copy()
            calls, waits, copies, checked, passed = [], [], [], [], []
            for index in range(NUM_PROVING_SAVES + self.rounds):
                seconds = copy.out()
                checks.seconds = checks.passed = 0.0
                started = time.perf_counter()
                handle = checkpointer.save(self.next_step())
                call = time.perf_counter() - started
                self.train()
                if index >= NUM_PROVING_SAVES:
                    calls.append(call)
                    waits.append(fence.seconds)
                    copies.append(seconds)
                handle.wait("captured", timeout_s=60)
                if index >= NUM_PROVING_SAVES:
                    checked.append(checks.seconds)
                    passed.append(checks.passed)
        fence.remove()
        checks.remove()
        both = [call + wait for call, wait in zip(calls, waits, strict=True)]
        return tuple(ratio(seconds, copies) for seconds in (both, calls, waits, checked, passed))

    def beside_slow_storage(self) -> tuple[float, float]:
        """Stall with slow storage over stall with fast storage; the former over plain copies."""
        line = pace.Line(self.directory / "line")
        line.bound(0)
        pace.start_keeper(str(self.directory / "slow-1"), measure.only_on_demand(self.directory), line)
        self.train()  # creates the moments
        copy = self.plain_copy()
        copies: list[float] = []
        with self.checkpointer("slow", overlap=False) as checkpointer:

            def stalls(bytes_per_s: float) -> float:
                """Of a durable save, and of the one after it, which comes while the first is being written."""
                self.train()
                line.bound(bytes_per_s)
                started = time.perf_counter()
                durable = checkpointer.save(self.next_step(), level="durable")
                seconds = time.perf_counter() - started
                durable.wait("captured", timeout_s=60)
                seconds += self.stall(checkpointer)
                if bytes_per_s:
                    assert durable.reached < holdfast.Level.DURABLE, "the state is too small for storage to be slow"
                    copies.append(copy.out() + copy.out())
                line.bound(0)
                durable.wait("durable", timeout_s=60)
                return seconds

            stalls(0)
            slow, fast = measure.paired(lambda: stalls(SLOW_BYTES_PER_S), lambda: stalls(0), self.rounds)
        return ratio(slow, fast), ratio(slow, copies)

    def lost_by_holdfast(self) -> list[float]:
        """Training seconds lost per durable save."""
        with self.checkpointer("lost", overlap=True) as checkpointer:
            self.train()
            for _ in range(NUM_PROVING_SAVES):
                handle = checkpointer.save(self.next_step())
                self.train()
                handle.wait("captured", timeout_s=60)
            checkpointer.save(self.next_step(), level="durable").wait("durable", timeout_s=60)

            def save() -> Callable[[], bool]:
                handle = checkpointer.save(self.next_step(), level="durable")
                return lambda: handle.reached >= holdfast.Level.DURABLE

            return [self.lost(save) for _ in range(self.lost_rounds)]

    # --- rivals

    def torch_save(self) -> Callable[[], bool]:
        """torch.save and fsync, one file per rank."""
        path = self.directory / f"torch-{self.rank}.pt"
        with path.open("wb") as file:
            torch.save(self.state_dict(), file)
            os.fsync(file.fileno())
        return lambda: True

    def dcp_save(self) -> Callable[[], bool]:
        """torch.distributed.checkpoint.save, files synchronised (its default)."""
        path = self.directory / "dcp-save"
        dcp.save(self.state_dict(), storage_writer=dcp.FileSystemWriter(path, overwrite=True))
        return lambda: True

    def dcp_async(self, stager: Any = None) -> Callable[[], bool]:
        """torch.distributed.checkpoint.async_save in its thread."""
        path = self.directory / "dcp-async"
        writer = dcp.FileSystemWriter(path, overwrite=True)
        more = {"async_stager": stager} if stager is not None else {}
        response = dcp.async_save(self.state_dict(), storage_writer=writer, **more)
        done: Future[Any] = getattr(response, "upload_completion", response)

        def complete() -> bool:
            if done.done():
                done.result()  # raises what it raised
                return True
            return False

        return complete

    def rivals(self) -> dict[str, Callable[[], Callable[[], bool]]]:
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        return {
            "torch_save": self.torch_save,
            "dcp_save": self.dcp_save,
            "dcp_async_save": self.dcp_async,
            "dcp_async_save_kept_stager": lambda: self.dcp_async(stager),
        }

    def rival_stalls(self, rounds: int) -> dict[str, float]:
        """Name -> stall over copy."""
        copy = self.plain_copy()
        found = {}
        for name, save in self.rivals().items():

            def stall(save: Callable[[], Callable[[], bool]] = save) -> float:
                started = time.perf_counter()
                complete = save()
                seconds = time.perf_counter() - started
                while not complete():
                    time.sleep(0.01)
                return seconds

            stall()
            found[name] = ratio(*measure.paired(stall, copy.out, rounds))
        return found

    # --- both

    def lost(self, save: Callable[[], Callable[[], bool]]) -> float:
        """Seconds from `save` until it is complete, minus the steps made meanwhile at the speed around it."""
        base = [timed(self.train) for _ in range(self.base_steps)]
        dist.barrier()
        started = time.perf_counter()
        complete = save()
        num_steps = 0
        while not complete():
            self.train()
            num_steps += 1
        seconds = time.perf_counter() - started
        dist.barrier()
        base += [timed(self.train) for _ in range(self.base_steps)]
        slowest = torch.tensor(seconds - num_steps * statistics.median(base))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)


class FenceClock:
    """Seconds between two pre-step hooks of an optimizer: one registered before holdfast's fence, one after."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._entered = 0.0
        self._handles = [optimizer.register_step_pre_hook(lambda *_: self._enter())]

    def close_interval(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._leave()))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self) -> None:
        self._entered = time.perf_counter()

    def _leave(self) -> None:
        self.seconds = time.perf_counter() - self._entered


class ChecksClock:
    """Seconds of processor in the checks of late copies, of all threads together, and seconds that passed meanwhile.

    The copying thread waits for Python's lock in its checks while the training goes on: that passes, and costs nothing.
    """

    CLOCKED = ((LateCopyChecker, "look"), (CopyCheck, "torn"), (CopyCheck, "moved"))

    def __init__(self) -> None:
        self.seconds = self.passed = 0.0
        self._inside = threading.local()
        self._own = [(owner, name, getattr(owner, name)) for owner, name in self.CLOCKED]
        for owner, name, own in self._own:
            setattr(owner, name, self._clocked(own))

    def remove(self) -> None:
        for owner, name, own in self._own:
            setattr(owner, name, own)

    def _clocked(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **more: Any) -> Any:
            if getattr(self._inside, "any", False):  # `torn` calls `moved`
                return own(*args, **more)
            self._inside.any, started, passing = True, time.thread_time(), time.perf_counter()
            try:
                return own(*args, **more)
            finally:
                self.seconds += time.thread_time() - started
                self.passed += time.perf_counter() - passing
                self._inside.any = False

        return clocked


def worker(options: argparse.Namespace) -> None:
    """Measures in one rank; rank 0 prints (metric, value, more) lines for the parent."""
    dist.init_process_group("gloo")
    bench = Bench(options)
    found: list[tuple[str, float, dict[str, Any]]] = []
    if options.part == "stall":
        stall, first, seconds = bench.copying_at_once()
        found += [("stall_ratio", stall, {"save_ms": seconds * 1e3}), ("first_save_ratio", first, {})]
        both, call, wait, checks, passed = bench.copying_behind()
        found.append(("overlapped_stall_ratio", both, {"call": call, "fence": wait}))
        found.append(("checks_share_of_copy", checks, {"passed": passed}))
        for name, value in bench.rival_stalls(1 if options.quick else 7).items():
            found.append((f"stall_ratio:{name}", value, {}))
    elif options.part == "slow":
        unchanged, over_copy = bench.beside_slow_storage()
        found += [("slow_storage_stall_ratio", unchanged, {}), ("slow_storage_stall_over_copy", over_copy, {})]
    else:
        values = bench.lost_by_holdfast()
        found.append(("train_seconds_lost_per_save", statistics.median(values), {"all": values}))
        rivals = bench.rivals()
        names = ["dcp_async_save_kept_stager"] if options.quick else list(rivals)
        for name in names:
            bench.lost(rivals[name])
            values = [bench.lost(rivals[name]) for _ in range(1 if options.quick else 5)]
            found.append((f"train_seconds_lost_per_save:{name}", statistics.median(values), {"all": values}))
    if bench.rank == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def run_ranks(options: argparse.Namespace, part: str, num_ranks: int) -> list[tuple[str, float, dict[str, Any]]]:
    """Starts fresh ranks for one part and returns what they found."""
    out = options.dir / f"{part}-{num_ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "benchmarks.stall", "--part", part, "--out", str(out), "--dir", str(options.dir)]
    command += ["--mib", str(options.mib), *(["--quick"] if options.quick else [])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    if result.returncode:
        measure.fail(result.stdout + result.stderr)
    found: list[tuple[str, float, dict[str, Any]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


GOALS = {
    "stall_ratio": "<= 1.1",
    "first_save_ratio": "<= 1.3",
    "overlapped_stall_ratio": "<= 0.3",
    "checks_share_of_copy": "<= 0.03",
    "slow_storage_stall_ratio": "<= 1.2",
    "slow_storage_stall_over_copy": "<= 2",
    ("train_seconds_lost_per_save", 1): "<= 0.1",
    ("train_seconds_lost_per_save", 2): "<= 0.3",
}


def main() -> None:
    parser = measure.options("stall", "How long a save holds up training.")
    parser.add_argument("--part", choices=["stall", "slow", "lost"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        worker(options)
        return
    temporary = tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir)
    options.dir = Path(temporary)
    report = Report("stall", options.quick, options.json)
    try:
        for part in ("stall", "slow"):
            for metric, value, more in run_ranks(options, part, 1):
                report.figure(metric, value, "ratio", GOALS.get(metric, ""), **more)
        for num_ranks in (1, 2):
            for metric, value, more in run_ranks(options, "lost", num_ranks):
                report.figure(metric, value, "s", GOALS.get((metric, num_ranks), ""), ranks=num_ranks, **more)
        report.save()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
