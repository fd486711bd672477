"""Real ranks of one gloo group: forked by a worker's program from one process that has torch, looked at by a test.

The program gives `main(rank, results)`; a rank writes `<rank>.json`, and `<rank>.error` if it fails.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
from torch import distributed as dist

import forked


@contextlib.contextmanager
def member(rank: int, world_size: int, results: Path) -> Iterator[None]:
    """This process is the rank of the group for so long."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{results / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    except BaseException:
        (results / f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def start(main: Callable[[int, Path], None], world_size: int, results: Path) -> list[ForkProcess]:
    """Fork the ranks."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, results)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    return ranks


def join(ranks: list[ForkProcess], seconds: float) -> bool:
    """Whether any of the ranks failed, or had to be killed."""
    for process in ranks:
        process.join(timeout=seconds)
        process.kill()
        process.join(timeout=5)
    return any(process.exitcode for process in ranks)


def run(worker: Path, results: Path) -> Path:
    """Run a worker's program, which has to end well; returns where its ranks have written."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(worker), str(results)]
    done = forked.run(command, env=environment, timeout=110, capture_output=True, text=True)
    errors = [path.read_text() for path in sorted(results.glob("*.error"))]
    assert done.returncode == 0, "\n".join([*errors, done.stderr[-2000:]])
    return results
