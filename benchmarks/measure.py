"""What the benchmarks share: the training state, the plain copy they compare with, paired medians, output.

A figure is a ratio of two things measured right after each other in one process, and the median of such ratios, for
wall times of different minutes on a shared machine cannot be compared. Every line says how loud the machine was
(`pressure`: share of the last ten seconds in which something waited for a core, in percent).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.testing.gpt import ByteGPT, Shape

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20


@dataclass(slots=True)
class Report:
    """Prints each figure as it is known and keeps all in `results/<name>.jsonl` (`<name>-quick.jsonl`)."""

    name: str
    quick: bool
    as_json: bool
    _lines: list[dict[str, Any]] = field(default_factory=list)

    def figure(self, metric: str, value: float | None, unit: str, goal: str = "", **more: Any) -> None:
        """One figure. `goal` is a bound such as "<= 1.1"; empty for what is only told for comparison."""
        shown = None if value is None else round(value, 4)
        line = {"metric": metric, "value": shown, "unit": unit, "goal": goal, "pressure": pressure(), **more}
        self._lines.append(line)
        if self.as_json:
            print(json.dumps(line), flush=True)
        else:
            verdict = "" if not goal or value is None else ("  met" if met(value, goal) else "  MISSED")
            print(f"{metric:<42} {shown!s:>10} {unit:<8} {goal:>8}{verdict}", flush=True)

    def save(self) -> None:
        """Writes the file; the first line says what machine it was."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}{'-quick' if self.quick else ''}.jsonl"
        lines = [{"machine": machine()}, *self._lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def met(value: float, goal: str) -> bool:
    """Whether a value keeps a bound such as "<= 1.1"."""
    relation, bound = goal.split()
    return value <= float(bound) if relation == "<=" else value >= float(bound)


def options(name: str, description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--mib", type=int, default=512, help="state of the job, in MiB")
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: a temporary directory")
    return parser


@contextmanager
def undisturbed(pids: Iterable[int]) -> Iterator[bool]:
    """Lets no other work of the machine come before these processes, the caller's own included, which they are started by.

    Their threads, and those that they start, are real-time ones; those that are nicer than others stay behind these. Yields
    False where the system does not allow it. The others end with what is measured; our own is as before afterwards.
    """
    own = os.getpid()
    try:
        for pid in (*pids, own):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                priority = 1 if os.getpriority(os.PRIO_PROCESS, thread) > 0 else 2
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(priority))
    except OSError:
        is_allowed = False
    else:
        is_allowed = True
    try:
        yield is_allowed
    finally:
        for thread in map(int, os.listdir(f"/proc/{own}/task")):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": [round(x, 2) for x in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def available_bytes() -> int:
    """Memory that may still be taken without swapping."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return int(text.split("MemAvailable:")[1].split()[0]) << 10


def pressure() -> float | None:
    """Percent of the last ten seconds in which a process waited for a core; None where the kernel does not say."""
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="utf-8")
    except OSError:
        return None
    return float(text.split("avg10=")[1].split()[0])


def only_on_demand(home: Path) -> holdfast.Config:
    """Settings under which nothing is saved unless asked for; keepers live in `home` and end soon after a failure."""
    never = "1000000000"
    return holdfast.Config(every=never, durable_every=never, runtime_dir=str(home / "run"), linger_s=30.0)


def gpt_of(num_bytes: int) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """A GPT of 145 parameters whose parameters and two AdamW moments (435 tensors) fill `num_bytes`."""
    num_parameters, layers = num_bytes // 12, 12
    width = int((num_parameters / (12 * layers + 24)) ** 0.5) // 8 * 8
    vocabulary = (num_parameters - layers * (12 * width + 13) * width) // width
    model = ByteGPT(Shape(vocabulary=vocabulary, width=width, layers=layers, heads=8, context=32, dropout=0.0))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def training(model: ByteGPT, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that makes one real step on one batch of bytes."""
    batch = torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint of them holds; the moments exist after the first step."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


class PlainCopy:
    """The same tensors in pre-faulted shared memory: what a copy costs when nothing else is done."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._memory = mmap.mmap(-1, sum(_aligned(t) for t in tensors.values()))
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for tensor in tensors.values():
            raw = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._pairs.append((raw.view(tensor.shape), tensor))
            offset += _aligned(tensor)
        self.out()  # faults every page in

    @property
    def view(self) -> memoryview:
        return memoryview(self._memory)

    def out(self) -> float:
        """Seconds to copy the state out."""
        started = time.perf_counter()
        for copy, tensor in self._pairs:
            copy.copy_(tensor)
        return time.perf_counter() - started

    def back(self) -> float:
        """Seconds to copy it back into the tensors."""
        started = time.perf_counter()
        with torch.no_grad():
            for copy, tensor in self._pairs:
                tensor.copy_(copy)
        return time.perf_counter() - started


def _aligned(tensor: torch.Tensor) -> int:
    return -(-max(tensor.nbytes, 1) // 64) * 64


def paired(measure: Callable[[], float], against: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Measures both `rounds` times, interleaved, the order turned every round."""
    left: list[float] = []
    right: list[float] = []
    for index in range(rounds):
        if index % 2:
            left.append(measure())
            right.append(against())
        else:
            right.append(against())
            left.append(measure())
    return left, right


def ratio(left: Sequence[float], right: Sequence[float]) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(left, right, strict=True))


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def fail(text: str) -> None:
    """Ends a benchmark that cannot measure."""
    print(text, file=sys.stderr)
    sys.exit(1)
