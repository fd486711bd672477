"""Replicas whose shards stand on one node: ranks of one node hold different shards of a tensor of one name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from sample_kit import sampled

WORKER = Path(__file__).with_name("one_node_worker.py")
WORLD_SIZE = 4


@pytest.mark.parametrize("layout", sampled(["hsdp", "fsdp-tp"], "hsdp"))
def test_shards_and_replicas_of_one_node_are_saved_and_restored(layout: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(WORLD_SIZE):
        environment = {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, str(WORKER), str(tmp_path / "job"), str(tmp_path), layout]
        with (tmp_path / f"{rank}.log").open("wb") as log:
            ranks.append(forked.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait(timeout=110) for rank in ranks]
    said = "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(WORLD_SIZE))
    assert codes == [0] * WORLD_SIZE, said
    for rank in range(WORLD_SIZE):
        facts = json.loads((tmp_path / f"{layout}-{rank}.json").read_text())
        assert facts == {"given_up": [], "start": 4, "equal": True}, said
