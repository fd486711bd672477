"""A node's keeper dies for good in mid-run: all ranks go on with storage alone, at one step, and come back up."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from holdfast.base.events import Events
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import end_keepers

WORKER = Path(__file__).with_name("lower_worker.py")


@pytest.mark.slow
def test_a_node_without_a_keeper_takes_no_save_but_those_of_a_few_seconds(tmp_path: Path, runtime_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "HOLDFAST_NODE_LABEL": f"n{rank}",
        }  # fmt: skip
        command = [sys.executable, str(WORKER), str(tmp_path / "job"), str(tmp_path)]
        with (tmp_path / f"{rank}.log").open("wb") as log:
            ranks.append(forked.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait(timeout=90) for rank in ranks]
    assert codes == [0, 0], "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    assert seen[0]["down"] == seen[1]["down"] < seen[0]["up"] == seen[1]["up"]
    assert all("no keeper can be started" in facts["reason"] for facts in seen)
    assert all("durable_only" in facts["names"] for facts in seen)
    steps = [version.step for version in open_storage(tmp_path / "job", Events()).versions()]
    assert steps[-1] == seen[0]["last"], "the last step is durable, although the keeper was lost once more"
    assert seen[0]["weight"] == seen[1]["weight"]
    end_keepers(runtime_dir, grace_s=45)  # it waits for the other node, which wrote a part of a version, for 30 s
    shutil.rmtree(runtime_dir)  # of the keeper that was killed and had no successor
