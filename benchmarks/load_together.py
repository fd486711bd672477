"""Ranks of one node that all want the same bundles: what `benchmarks.load` measures with real ranks over gloo.

Every rank restores the same state from files in the page cache, with a keeper that runs and holds nothing, into tensors
that exist; and loads it by `torch.load(mmap=True)` and a copy. The two take turns, and all ranks begin together. A round
takes as long as its slowest rank. Rank 0 prints the seconds of every round as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import measure
from benchmarks.measure import MIB
from torch import nn

import holdfast
from holdfast.keeper.rpc.spawn import ensure_keeper

TIMEOUT_S = 600.0


def load_together(home: Path, mib: int, world: int, rounds: int) -> dict[str, Any]:
    """Runs so many ranks.

    Returns:
        `ours` and `theirs`, in seconds per round, and `read`: bytes from storage in the last round, over those of the state.
    """
    home.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.load_together", "--home", str(home), "--mib", str(mib)]
    command += ["--world", str(world), "--rounds", str(rounds), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        measure.fail("a rank that loads ended")
    found: dict[str, Any] = json.loads(told[0])
    return found


def _rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.home}/meeting", rank=options.rank, world_size=options.world
    )
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.ParameterList(torch.rand(8 * MIB // 4) for _ in range(options.mib // 8))
    )
    live = {name: parameter.detach() for name, parameter in model.named_parameters()}
    root, config = options.home / "job", measure.only_on_demand(options.home)
    if options.rank == 0:
        torch.save(live, options.home / "stock.pt")
    with holdfast.Checkpointer(root, model=model, overlap=False, config=config) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1, level="durable").wait("durable", timeout_s=240)
    shares: list[float] = []

    def ours() -> float:
        if options.rank == 0:
            ensure_keeper(str(root), config)
        with holdfast.Checkpointer(root, model=model, overlap=False, config=config) as checkpointer:
            seconds = _together(checkpointer.restore)
            found = checkpointer.last_restore
            assert found is not None
            shares.append(_sum(found.bytes.get("storage", 0)) / (options.mib * MIB))
        return seconds

    def theirs() -> float:
        return _together(
            lambda: [live[n].copy_(t) for n, t in torch.load(options.home / "stock.pt", mmap=True).items()]
        )

    left, right = measure.paired(ours, theirs, options.rounds)
    if options.rank == 0:
        print(json.dumps({"ours": left, "theirs": right, "read": shares[-1]}))
    dist.destroy_process_group()


def _together(action: Callable[[], object]) -> float:
    """Seconds until every rank has done it, all begun at once."""
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def _sum(number: int) -> int:
    tensor = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(tensor)
    return int(tensor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    for name in ("--mib", "--world", "--rounds", "--rank"):
        parser.add_argument(name, type=int, required=True)
    _rank(parser.parse_args())
