"""What a checkpoint at every step costs a pipeline: python -m benchmarks.bubbles [--quick] [--json] [--pairs N]

Two stages of a real GPT on real text, one process each, 1F1B. A pair is two neighbouring steps, one with a checkpoint before
it and one without, which comes first being drawn: a shared machine becomes faster and slower within seconds, and what does not
change between two steps cancels. Both stages begin a step together and it ends when both have, so a step is charged with all
that delays either. What a save leaves for the next step would be charged to the wrong one: it is told (`carried_percent`).
`async_save` writes while the next steps run, so it and the plain copy beside it alternate by blocks of two steps, after one that
is not timed.
Hundreds of pairs take minutes in which a machine must be quiet: `--parts FILE` adds a run to FILE and reports on all
that is in it, so that several short runs make one figure.

`long steps` is the same with four times the text in a step (4,096 bytes instead of 1,024) and so four times the work for the
same state; a real job has more of it still.

Each stage is bound to a processor of its own where there are enough, as launchers bind ranks; else the kernel moves them onto
one another now and then, with checkpoints and without, and their steps vary more.

`known work` is the same job whose blocks sleep instead of computing: the processor is as free as beside an accelerator,
the length of a step hardly varies, and so it is decided what on a shared machine drowns in noise.
`zeroed gradients` is that job with `zero_grad(set_to_none=False)`: a save looks at each gradient that stays.
`checks` is that job with a checkpoint at every step: those of a pair are one with the checks of late copies, and one without.

- `stall_percent`: what the trainer's own thread spent in the call and at the fence, over the time of its steps: the
  part of the overhead that does not drown in the noise of a step. The rank that lost most.
- `overhead_percent`: the paired differences over the mean of the pair, for the copy inside the waits (captured level), for the
  plain copy (`overlap=False`) and for `dcp.async_save`. The figure is the upper bound of the 95 % bootstrap interval of the
  mean of the middle nine tenths of the pairs; beside it the same of all pairs (`high_all`), and how much longer than without
  the trainer's thread waited for a core (`core_wait`, percent of a step). Over the plain step alone the differences would
  not be zero on average where nothing differs: of two times that vary by a tenth, half a percent.
- `overhead_percent (..., in its part of a step)`: the same, of the first part of each step alone: from the call until the first
  micro-batch is back and the stage goes on with the next. A save is over by then. What is still done for it takes some
  processor, and `after_percent` is the processor time of keeper and copying threads from there to the end of the step, less
  that of steps without, over the step: by more the rest cannot be longer, but for what is cold in caches, and the stage has
  gone over all its weights by then. The rest only adds noise of its own.
- `carried_percent`: what a save leaves for the next step: the processor time of keeper and copying threads in steps without a
  checkpoint that follow one with, less that of those that follow one without, over the step.
- `copy_time_in_bubbles_percent`: the part of the copying that ran while the rank waited for its neighbour, from the spans of
  the trace (the newest of them): a copy that outlasts its wait counts as far as the wait went. The plain copy and
  `dcp.async_save` copy in their call, so for them it is the time of the calls that lay in waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from benchmarks import measure
from benchmarks.measure import Report
from torch import distributed as dist
from torch.distributed.pipelining import schedules

import holdfast
from holdfast.base.events import Events
from holdfast.checkpoint.capture.late_copy_check import LateCopyChecker
from holdfast.checkpoint.pipeline.bubbles import MAX_SPANS, Bubbles, Seen
from holdfast.testing.contracts.adapter_processes import keepers_under
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

NAMES = ("bubbles", "long steps", "known work", "zeroed gradients", "checks", "plain copy", "async_save")
INSIDE = NAMES[:5]
SLEEP_S = 0.025
Turn = tuple[int, int]  # steps that are not timed, and steps that are
Pair = tuple[dict[str, float], dict[str, float]]  # fields of `Spent`, with checkpoints and without
STEP, BLOCK = (0, 1), (1, 2)
MICROBATCHES, SEQUENCES = 4, 4
RESAMPLES = 4000
WARM_STEPS = 8
SHAPE = Shape(width=256, layers=6, context=64, dropout=0.0)
LONG = replace(SHAPE, context=256)


class Pipeline:
    """This rank's stage with its optimizer and text; calling it makes one step."""

    def __init__(self, shape: Shape, *, sleep_s: float = 0.0, in_place: bool = False) -> None:
        torch.set_num_threads(1)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        part = stage(shape, self.rank, world, sleep_s=sleep_s)
        self.model = part.submod
        self.schedule = schedules.Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.text = Text(context=shape.context, batch=SEQUENCES * MICROBATCHES)
        self.number = 0
        self.in_place = in_place
        self.keeper = 0
        self.saved = False
        self.back_s = self.others_s = 0.0
        self._forwards, self._first_after_back = 0, world - self.rank + 1
        self.model.register_forward_pre_hook(self._count)

    def others(self) -> float:
        """Seconds of processor time so far: of this process without this thread, and of the keeper."""
        # clock_getcpuclockid(3); the number of another process's clock is that of the kernel's posix-timers.h.
        keeper = time.clock_gettime(~self.keeper << 3 | 2) if self.keeper else 0.0
        return time.process_time() - time.thread_time() + keeper

    def _count(self, *_: Any) -> None:
        """Notes when the first micro-batch is back: 1F1B then goes on with the next forward."""
        self._forwards += 1
        if self._forwards == self._first_after_back:
            self.back_s, self.others_s = time.perf_counter(), self.others()

    def __call__(self) -> None:
        self._forwards = 0
        inputs, targets = next(self.text)
        if self.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.in_place)
        self.number += 1


def holdfast_saver(pipeline: Pipeline, home: Path, *, inside: bool) -> tuple[Callable[[], None], holdfast.Checkpointer]:
    """Captures after every step; `inside`: in the waits, else all before the call returns."""
    checkpointer = holdfast.Checkpointer(
        home / "ckpt",
        model=pipeline.model,
        optimizer=pipeline.optimizer,
        schedule=pipeline.schedule if inside else None,
        overlap=inside,
        config=measure.only_on_demand(home),
    )
    checkpointer.restore()
    return (lambda: checkpointer.save(pipeline.number) and None), checkpointer


def async_saver(pipeline: Pipeline, home: Path) -> Callable[[], None]:
    """`dcp.async_save` at every step, the one before awaited first, as its documentation shows."""
    warnings.simplefilter("ignore")  # it overwrites the older of its two directories, and says so every time
    group = dist.new_group(backend="gloo")
    pending: list[Any] = []

    def save() -> None:
        while pending:
            pending.pop().result()
        state = measure.state_tensors(pipeline.model, pipeline.optimizer)
        own = {f"{pipeline.rank}.{name}": tensor for name, tensor in state.items()}
        target = home / f"dcp{pipeline.number % 2}"
        pending.append(dcp.async_save(own, checkpoint_id=target, process_group=group))

    return save


def core_wait() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the kernel does not say."""
    try:
        text = Path("/proc/thread-self/schedstat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


@dataclass(slots=True)
class Spent:
    """Seconds of the timed steps of a turn.

    In all, and until the first micro-batch was back; processor time of keeper and copying threads, and of that what came after;
    how long this thread waited for a core. `follows`: whether the step before had a checkpoint.
    """

    follows: bool
    whole: float = 0.0
    first: float = 0.0
    others: float = 0.0
    after: float = 0.0
    core: float = 0.0


def turn(pipeline: Pipeline, before: Callable[[], None] | None, steps: Turn) -> Spent:
    """Some steps, each after `before`; both ranks begin each of them together."""
    settling, timed = steps
    spent = Spent(follows=pipeline.saved)
    pipeline.saved = before is not None
    dist.barrier()
    for number in range(settling + timed):
        waited, busy, started = core_wait(), pipeline.others(), time.perf_counter()
        if before is not None:
            before()
        pipeline()
        dist.barrier()
        if number >= settling:
            spent.whole += time.perf_counter() - started
            spent.first += pipeline.back_s - started
            spent.others += pipeline.others() - busy
            spent.after += pipeline.others() - pipeline.others_s
            spent.core += core_wait() - waited
    return spent


def unchecked(save: Callable[[], None]) -> Callable[[], None]:
    """The same without checks of late copies."""
    looks: Any = LateCopyChecker
    look = looks.look

    def call() -> None:
        looks.look = nothing  # a mock would take as long as the checks
        try:
            save()
        finally:
            looks.look = look

    def nothing(*_: Any, **__: Any) -> None: ...

    return call


def pairs(
    pipeline: Pipeline, save: Callable[[], None], instead: Callable[[], None] | None, number: int, steps: Turn
) -> list[tuple[Spent, Spent]]:
    """What neighbouring turns spent, with checkpoints and with what is there `instead`."""
    drawn = random.Random(7)  # the same on every rank
    found = []
    for _ in range(number):
        with_first = drawn.random() < 0.5
        one, two = (turn(pipeline, save if saves else instead, steps) for saves in (with_first, not with_first))
        found.append((one, two) if with_first else (two, one))
    return found


class Timed:
    """Calls, and how long they took in all."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.seconds = 0.0
        self.spans: deque[Seen] = deque(maxlen=MAX_SPANS)

    def __call__(self) -> None:
        started = time.perf_counter()
        self._call()
        ended = time.perf_counter()
        self.seconds += ended - started
        self.spans.append(Seen("copy", started, ended))


def inside_waits(spans: Iterable[Seen]) -> tuple[float, float]:
    """Seconds of copying, and how many of these lay in waits."""
    waits = [(seen.start, seen.end) for seen in spans if seen.what == "wait"]
    copies = [(seen.start, seen.end) for seen in spans if seen.what.startswith("copy") and seen.start >= waits[0][0]]
    starts = [start for start, _ in waits]
    inside = 0.0
    for begin, end in copies:
        for start, over in waits[max(0, bisect(starts, begin) - 1) : bisect(starts, end)]:
            inside += max(0.0, min(end, over) - max(begin, start))
    return round(sum(end - begin for begin, end in copies), 6), round(inside, 6)


def bounds(values: list[float], *, cut: float) -> tuple[float, float, float]:
    """Mean in percent without the share `cut` at either end, and its 95 % bounds by bootstrap."""
    found = torch.tensor(sorted(values), dtype=torch.float64)
    aside = int(cut * len(values))
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))

    def middle(rows: torch.Tensor) -> torch.Tensor:
        return 100 * rows.sort(dim=-1).values[..., aside : len(values) - aside].mean(dim=-1)

    low, high = middle(found[drawn]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(middle(found)), low, high


def bind() -> None:
    """This rank, and all threads that it will have, to a processor of its own, if each rank can have one."""
    cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ["LOCAL_RANK"])
    if len(cores) >= int(os.environ["LOCAL_WORLD_SIZE"]):
        os.sched_setaffinity(0, {cores[rank]})


def turn_of(name: str) -> Turn:
    """A step where all of a save is over within it, else a block."""
    return STEP if name in INSIDE else BLOCK


def worker(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints its rows as JSON."""
    bind()
    dist.init_process_group("gloo")
    pipelines: dict[tuple[Shape, float, bool], Pipeline] = {}
    rows: list[dict[str, Any]] = []
    for name in options.only or NAMES:
        home = options.dir / name.replace(" ", "-")
        sleep_s = SLEEP_S if name in ("known work", "zeroed gradients", "checks") else 0.0
        kind = (LONG if name == "long steps" else SHAPE, sleep_s, name == "zeroed gradients")
        pipeline = pipelines.get(kind) or pipelines.setdefault(
            kind, Pipeline(kind[0], sleep_s=kind[1], in_place=kind[2])
        )
        checkpointer, watcher = None, None
        if name == "async_save":
            save = async_saver(pipeline, home)
            watcher = Bubbles(pipeline.schedule, Events())
            watcher.attach()
        else:
            save, checkpointer = holdfast_saver(pipeline, home, inside=name in INSIDE)
            watcher = checkpointer.bubbles
        for _ in range(WARM_STEPS):
            pipeline()
            save()
        pipeline.keeper = keepers_under(home)[0].pid if checkpointer else 0
        before = checkpointer.events.counters() if checkpointer else {}
        called = Timed(save)
        number = options.pairs if name in INSIDE else max(10, options.pairs // 30)
        instead = unchecked(save) if name == "checks" else None
        found = pairs(pipeline, called, instead, number, turn_of(name))
        row: dict[str, Any] = {"name": name, "pairs": [[asdict(spent) for spent in pair] for pair in found]}
        if watcher is not None:
            row["copied"] = inside_waits([*watcher.spans, *(() if name in INSIDE else called.spans)])
        if checkpointer:
            fence = checkpointer.events.counters().get("fence_wait_seconds", 0.0)
            row["stalled"] = round(called.seconds + fence - before.get("fence_wait_seconds", 0.0), 6)
            waits = checkpointer.keeper_status()["ranks"][str(pipeline.rank)]["waits"]
            row["reason"] = waits["reason"] if waits else ""
            profile = checkpointer.bubbles.profile() if checkpointer.bubbles else None
            row["idle_share"] = round(profile.idle / profile.period, 4) if profile else 0.0
            checkpointer.close()
            pipeline.keeper = 0
        elif watcher is not None:
            watcher.detach()
        rows.append(row)
        dist.barrier()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if dist.get_rank() == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """What two ranks found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["benchmarks.bubbles", "--worker", "--pairs", str(options.pairs), "--dir", str(options.dir)]
    command += [word for name in options.only or () for word in ("--only", name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        measure.fail(f"the ranks ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Starts two ranks and reports."""
    parser = measure.options("bubbles", __doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=600, help="pairs of steps for the overhead")
    parser.add_argument("--only", action="append", choices=NAMES, help="of these; may stand several times")
    parser.add_argument("--parts", type=Path, metavar="FILE", help="add this run to FILE and report on all in it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    if options.quick:
        options.pairs = min(options.pairs, 10)
    report = Report("bubbles", options.quick, options.json)
    home = Path(tempfile.mkdtemp(prefix="hf-bubbles-"))
    options.dir = home
    try:
        ranks = measured(options)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    runs = [ranks]
    if options.parts:
        with options.parts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(ranks) + "\n")
        runs = [json.loads(line) for line in options.parts.read_text(encoding="utf-8").splitlines()]
    tell(report, runs)
    report.save()


def tell(report: Report, runs: Sequence[list[list[dict[str, Any]]]]) -> None:
    """Figures of several runs, each a row per rank and way to save."""
    for name in NAMES:
        rows = [[row for row in rank if row["name"] == name] for run in runs for rank in run]
        of_first = [row for run in runs for row in run[0] if row["name"] == name]
        found = [
            pair for run in runs for pair in averaged([row for rank in run for row in rank if row["name"] == name])
        ]
        if not found:
            continue
        steps = turn_of(name)
        goal = "<= 0.3" if name == "checks" else "<= 1.0" if name in INSIDE else ""
        known = {"pairs": len(found), "runs": len(of_first)}
        lengths = [plain["whole"] for _, plain in found]
        extra = {"core_wait": percent(found, "core"), "step_ms": 1e3 * statistics.median(lengths) / steps[1]}
        if name in INSIDE and name != "checks":
            extra["carried_percent"] = carried([plain for _, plain in found])
        overhead(report, f"{name}, upper 95 %", shares(found, "whole"), goal, extra | known)
        if name in INSIDE:
            after = {"after_percent": percent(found, "after")}
            title = f"{name}, in its part of a step, upper 95 %"
            overhead(report, title, shares(found, "first"), goal, after | known)
        if name == "checks":
            continue
        every = [row for rank in rows for row in rank]
        copied, inside = (sum(row["copied"][at] for row in every if row.get("copied")) for at in (0, 1))
        share, reason = 100 * inside / copied if copied else None, of_first[-1].get("reason", "")
        at_least = ">= 90" if name in INSIDE else ""
        report.figure(f"copy_time_in_bubbles_percent ({name})", share, "%", at_least, reason=reason)
        if "stalled" in every[0]:
            report.figure(f"stall_percent ({name})", max(stall(rank, steps) for rank in rows if rank), "%", goal)
        if name in INSIDE:
            report.figure(f"idle_percent ({name}, rank 0)", 100 * of_first[-1]["idle_share"], "%")


def shares(found: Sequence[Pair], what: str) -> list[float]:
    """How much more was spent with checkpoints, over the mean length of the pair's turns."""
    return [2 * (busy[what] - plain[what]) / (busy["whole"] + plain["whole"]) for busy, plain in found]


def percent(found: Sequence[Pair], what: str) -> float:
    """How much more was spent with checkpoints in all, in percent of the plain turns."""
    return 100 * sum(busy[what] - plain[what] for busy, plain in found) / sum(plain["whole"] for _, plain in found)


def carried(plain: Sequence[dict[str, float]]) -> float:
    """How much more processor time others took in steps that follow a checkpoint than in those that do not, in percent."""
    after, alone = (
        [spent["others"] for spent in plain if bool(spent["follows"]) is follows] for follows in (True, False)
    )
    return 100 * (statistics.fmean(after) - statistics.fmean(alone)) / statistics.fmean(step["whole"] for step in plain)


def overhead(report: Report, title: str, values: list[float], goal: str, more: dict[str, float]) -> None:
    """One figure of the shares of all pairs."""
    (middle, low, high), (every, _, high_all) = bounds(values, cut=0.05), bounds(values, cut=0.0)
    told = {"mean": middle, "low": low, "mean_all": every, "high_all": high_all, **more}
    report.figure(
        f"overhead_percent ({title})", high, "%", goal, **{key: round(value, 3) for key, value in told.items()}
    )


def averaged(rows: Sequence[dict[str, Any]]) -> list[Pair]:
    """Every pair of one run, averaged over the ranks."""
    return [
        (_mean([busy for busy, _ in of_ranks]), _mean([plain for _, plain in of_ranks]))
        for of_ranks in zip(*(row["pairs"] for row in rows), strict=True)
    ]


def _mean(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {what: statistics.fmean(spent[what] for spent in of_ranks) for what in of_ranks[0]}


def stall(rows: Sequence[dict[str, Any]], steps: Turn) -> float:
    """Percent of a rank's plain steps that its own thread spent in the call and at the fence."""
    settling, timed = steps  # the steps that were not timed saved too
    spent = sum(row["stalled"] for row in rows) * timed / (settling + timed)
    return 100 * spent / sum(plain["whole"] for row in rows for _, plain in row["pairs"])


if __name__ == "__main__":
    main()
