"""A node that is lost before anything is durable takes the only copies along: the job begins anew, aloud."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
from holdfast.testing.contracts.adapter_processes import keepers_under
from keepers_kit import wait_ended

WORKER = str(Path(__file__).with_name("begin_anew_worker.py"))


def start(tmp_path: Path, life: str) -> list[forked.Popen]:
    arguments = [str(tmp_path / life), str(tmp_path / "ckpt"), life, "lost-node"]
    return [
        forked.Popen(
            [sys.executable, WORKER, str(rank), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def test_what_was_in_the_memory_of_a_lost_node_alone_is_begun_anew(tmp_path: Path, runtime_dir: Path) -> None:
    ranks = start(tmp_path, "first")
    assert [json.loads(rank.stdout.readline()) for rank in ranks] == [{"start": 0}] * 2
    lost = [keeper for keeper in keepers_under(runtime_dir) if "b" in keeper.cmdline()]
    for process in (*ranks, *lost):
        process.kill()
    for rank in ranks:
        rank.communicate()
    assert len(lost) == 1
    wait_ended(lost)

    refused = [json.loads(rank.communicate(timeout=60)[0]) for rank in start(tmp_path, "required")]
    assert all("versions exist, but none can be used" in row.get("error", "") for row in refused), refused

    again = [rank.communicate(timeout=60) for rank in start(tmp_path, "again")]
    for out, errors in again:
        row = json.loads(out)
        assert row["start"] == 0
        assert "in memory alone" in row["reason"]
        assert "the job begins anew" in errors
