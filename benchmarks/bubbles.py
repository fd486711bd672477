"""What a checkpoint at every step costs a pipeline: python -m benchmarks.bubbles [--quick] [--json] [--pairs N]

Two stages of a real GPT on real text, one process each, 1F1B. Blocks of steps with a checkpoint after every step
alternate with blocks without, the order turned every pair; a pair is the time of two neighbouring blocks.

- `overhead_percent`: mean of the paired differences over a plain block, with its 95 % bounds, for the copy inside the
  waits (captured level), for the plain copy (`overlap=False`) and for `dcp.async_save`, all at every step.
- `copy_time_in_bubbles_percent`: the part of the copying that ran while the rank waited for its neighbour.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from benchmarks import measure
from benchmarks.measure import Report
from torch import distributed as dist
from torch.distributed.pipelining import schedules

import holdfast
from holdfast.testing.gpt import Shape, Text
from holdfast.testing.pipeline_gpt import loss_of, stage

BLOCK = 4
MICROBATCHES = 4
WARM_STEPS = 8
SHAPE = Shape(width=192, layers=4, context=64, dropout=0.0)


class Pipeline:
    """This rank's stage with its optimizer and text; calling it makes one step."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        part = stage(SHAPE, self.rank, world)
        self.model = part.submod
        self.schedule = schedules.Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.text = Text(context=SHAPE.context, batch=2 * MICROBATCHES)
        self.number = 0

    def __call__(self) -> None:
        inputs, targets = next(self.text)
        if self.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
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


def block(pipeline: Pipeline, after: Callable[[], None] | None) -> float:
    """Seconds of a few steps, each followed by `after`; begins with all ranks at one point."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(BLOCK):
        pipeline()
        if after is not None:
            after()
    dist.barrier()
    return time.perf_counter() - started


def pairs(pipeline: Pipeline, save: Callable[[], None], number: int) -> Iterator[float]:
    """Relative differences of neighbouring blocks."""
    for index in range(number):
        with_first = index % 2 == 0
        first = block(pipeline, save if with_first else None)
        second = block(pipeline, None if with_first else save)
        busy, plain = (first, second) if with_first else (second, first)
        yield busy / plain - 1.0


def bounds(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % bounds, of the middle nine tenths: a machine's hiccups say nothing of either side."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    kept = ordered[cut : len(ordered) - cut] or ordered
    middle = statistics.fmean(kept)
    spread = 1.96 * statistics.stdev(kept) / math.sqrt(len(kept)) if len(kept) > 1 else math.inf
    return middle, middle - spread, middle + spread


def worker(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints its rows as JSON."""
    dist.init_process_group("gloo")
    pipeline = Pipeline()
    rows: list[dict[str, Any]] = []
    for name in ("bubbles", "plain copy", "async_save"):
        home = options.dir / name.replace(" ", "-")
        checkpointer = None
        if name == "async_save":
            save = async_saver(pipeline, home)
        else:
            save, checkpointer = holdfast_saver(pipeline, home, inside=name == "bubbles")
        for _ in range(WARM_STEPS):
            pipeline()
            save()
        before = checkpointer.events.counters() if checkpointer else {}
        found = list(pairs(pipeline, save, options.pairs if checkpointer else max(10, options.pairs // 5)))
        row: dict[str, Any] = {"name": name, "pairs": len(found), "bounds": bounds(found)}
        if checkpointer:
            now = checkpointer.events.counters()
            row["counters"] = {key: now[key] - before.get(key, 0.0) for key in now}
            row["reason"] = checkpointer.bubbles.reason if checkpointer.bubbles else ""
            profile = checkpointer.bubbles.profile() if checkpointer.bubbles else None
            row["idle_share"] = profile.idle / profile.period if profile else 0.0
            checkpointer.close()
        rows.append(row)
        dist.barrier()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if pipeline.rank == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """What two ranks found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["benchmarks.bubbles", "--worker", "--pairs", str(options.pairs), "--dir", str(options.dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        measure.fail(f"the ranks ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Starts two ranks and reports."""
    parser = measure.options("bubbles", __doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks for the overhead")
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
    for index, row in enumerate(ranks[0]):
        name = row["name"]
        middle, low, high = (100 * value for value in row["bounds"])
        goal = "<= 1.0" if name == "bubbles" else ""
        report.figure(
            f"overhead_percent ({name}, upper 95 %)", high, "%", goal, mean=middle, low=low, pairs=row["pairs"]
        )
        counted = [rank[index].get("counters", {}) for rank in ranks]
        copied = sum(c.get("copy_seconds", 0.0) for c in counted)
        if name == "bubbles":
            inside = sum(c.get("copy_seconds_in_waits", 0.0) for c in counted)
            share = 100 * inside / copied if copied else None
            report.figure("copy_time_in_bubbles_percent", share, "%", ">= 90", reason=row["reason"])
            report.figure("idle_percent (rank 0)", 100 * row["idle_share"], "%")
    report.save()


if __name__ == "__main__":
    main()
