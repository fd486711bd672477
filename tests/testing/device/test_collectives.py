"""Collectives of the simulated device in jobs of two processes: right, late, and aborted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forked

pytestmark = pytest.mark.device
WORKER = Path(__file__).with_name("collectives_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the ranks of one job told of everything that needs no failure."""
    return job(
        tmp_path_factory.mktemp("job"), "plain", "collectives", "ddp", "fsdp", "hsdp", "attention", "two_devices"
    )


def job(directory: Path, *modes: str, size: int = 2) -> list[Any]:
    """Run a job to its end; return what its ranks told, None for those that told nothing."""
    out = directory / "told"
    workers = [
        forked.Popen(
            [sys.executable, str(WORKER), str(out), *modes],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [worker.communicate(timeout=100)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * size, "\n".join(said)
    files = [Path(f"{out}.{rank}") for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in files]


def test_every_collective_gives_what_it_should(told: list[Any]) -> None:
    first, second = (rank["collectives"] for rank in told)
    common = {
        "sum": [3, 3],
        "mean": [1.5, 1.5],
        "max": [2, 2],
        "gathered": [0, 0, 1, 1],
        "broadcast": [1, 1],
        "objects": [{"rank": 0}, {"rank": 1}],
    }
    assert first == common | {
        "scattered sum": [0, 0],
        "reduced to 0": [3, 3],
        "gathered at 0": [0, 0, 1, 1],
        "scattered": [5, 5],
        "exchanged": [0, 1, 10, 11],
        "exchanged lists": [0, 0, 10, 10],
        "swapped": [1, 1],
    }
    assert second == common | {
        "scattered sum": [2, 2],
        "reduced to 0": [2, 2],
        "gathered at 0": None,
        "scattered": [6, 6],
        "exchanged": [2, 3, 12, 13],
        "exchanged lists": [1, 1, 11, 11],
        "swapped": [0, 0],
    }


def test_attention_whose_heads_lie_on_all_ranks_equals_one_process(told: list[Any]) -> None:
    for rank in told:
        ours, alone = (torch.tensor(each) for each in rank["attention"])
        assert torch.allclose(ours, alone, atol=1e-6)


def test_devices_of_one_rank_do_not_wait_for_each_other(told: list[Any]) -> None:
    """A group has a communicator for each device, as NCCL's has: what two devices do comes in no order."""
    assert [rank["two_devices"] for rank in told] == [[[8.0], [8.0]]] * 2


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_sharded_training_equals_one_process(told: list[Any], mode: str) -> None:
    for rank in told:
        assert torch.allclose(torch.tensor(rank[mode]), torch.tensor(rank["plain"]), atol=1e-6)


def test_groups_made_again_and_again_leave_no_threads(tmp_path: Path) -> None:
    code = """
import os, torch, torch.distributed as dist
from holdfast.testing import device
device.load()
counts = []
for turn in range(6):
    dist.init_process_group("cpu:gloo,sim:simccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4, device="sim"))
    torch.accelerator.synchronize()
    if turn % 2:
        dist.distributed_c10d._get_default_group().abort()
    dist.destroy_process_group()
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    counts.append(sum("sim stream" in name for name in names))
print(counts)
"""
    answer = forked.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"{[2] * 6}\n", "the stream of a group that is gone is not used again"


def test_abort_that_hangs_ends_when_it_is_told_to(tmp_path: Path) -> None:
    code = """
import threading, torch, torch.distributed as dist
from holdfast.testing import device
device.load()
dist.init_process_group("cpu:gloo,sim:simccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4, device="sim")
dist.all_reduce(x)
device.set_abort("hangs")
group = dist.distributed_c10d._get_default_group()
abort = threading.Thread(target=group.abort)
abort.start()
abort.join(0.2)
print(abort.is_alive(), x.add_(1).tolist())
device.set_abort("goes on")
abort.join(30)
print(abort.is_alive())
"""
    answer = forked.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["True [2.0, 2.0, 2.0, 2.0]", "False"]


def test_lost_peer_hangs_the_device_until_an_abort(tmp_path: Path) -> None:
    told = job(tmp_path, "lost_peer")[0]["lost_peer"]
    for how in ("goes on", "error"):
        assert told[how]["hangs"]
        assert "was aborted" in told[how]["next"]
        assert told[how]["sound"] == [2, 2], "an abort left a fault"
    assert told["goes on"]["x"] == [14, 14], "what was queued behind the abort was not done with what is there"
    assert "was aborted" in told["error"]["error"]
