"""One rank of a job under `holdfast run`: it saves, or comes back after its keeper said what it had preloaded."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.base.config import load
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.paths import place_of


def preloaded(root: str) -> dict:
    """What the keeper says once nothing is under way; this script has built no model yet."""
    place = place_of(root, load())
    viewer = KeeperClient.connect(place.socket, job=place.job)
    try:
        deadline = time.monotonic() + 20
        while True:
            status = viewer.status()
            if (status["preloaded"]["reason"] and not status["activities"]) or time.monotonic() > deadline:
                return status
    finally:
        viewer.close()


def main(root: str, answers: str) -> None:
    before = preloaded(root)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    if Path(root, "job.json").exists():
        torch.nn.init.zeros_(model.weight)
    checkpointer = holdfast.Checkpointer(root, model=model)
    start = checkpointer.restore()
    report = checkpointer.last_restore
    assert report is not None
    facts = {
        "start": start,
        "weight": float(model.weight.double().sum()),
        "preloaded": before["preloaded"]["bytes"],
        "bytes": dict(report.bytes),
        "why": report.why,
        "read_before": before["counters"].get("storage_read_bytes", 0),
        "read_after": checkpointer.keeper_status()["counters"].get("storage_read_bytes", 0),
    }
    Path(answers, f"{start}-{dist.get_rank()}.json").write_text(json.dumps(facts))
    checkpointer.save(start, "durable")
    checkpointer.close()
    dist.destroy_process_group()


main(*sys.argv[1:])
