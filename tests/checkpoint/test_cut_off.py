"""Nodes whose keepers cannot reach each other: no version in memory would ever be whole, so storage alone is saved to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.version_store import open_storage
from sample_kit import MORE

WORKER = str(Path(__file__).with_name("cut_off_worker.py"))
WHY = "the keeper of node0 cannot reach that of node1: no keeper listens"
REMEDY = "give every node --listen ADDRESS --secret-file FILE"


def life(tmp_path: Path, name: str, *settings: str, way: str = "both") -> list[dict[str, Any]]:
    ranks = [
        forked.Popen(
            [sys.executable, WORKER, str(rank), str(tmp_path / name), str(tmp_path / "ckpt"), way, *settings],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]


def errors(rank: dict[str, Any]) -> list[str]:
    return [line for line in rank["told"] if line.startswith("ERROR")]


def test_it_is_said_once_and_what_is_due_becomes_durable(tmp_path: Path, runtime_dir: Path) -> None:
    ranks = life(tmp_path, "first")
    assert [rank.get("start") for rank in ranks] == [0, 0], ranks
    (line,) = errors(ranks[0])
    assert line.startswith(f"ERROR this job has no level in memory: {WHY}")
    assert REMEDY in line
    assert errors(ranks[1]) == []
    assert ranks[0]["reached"] == ranks[1]["reached"] == [None, "DURABLE", None, "DURABLE"]
    assert open_storage(tmp_path / "ckpt", Events()).versions() == [Version(1, 1), Version(1, 3)]

    again = life(tmp_path, "second")
    assert [rank["start"] for rank in again] == [4, 4]
    assert open_storage(tmp_path / "ckpt", Events()).versions()[-1] == Version(2, 7)


def test_it_is_refused_where_memory_is_required(tmp_path: Path, runtime_dir: Path) -> None:
    for rank in life(tmp_path, "only", "require_memory=true"):
        assert rank["error"].startswith(f"KeeperError: {WHY}")
        assert REMEDY in rank["error"]


@MORE
def test_a_firewall_that_drops_what_the_first_node_sends_is_no_reason_not_to_begin(
    tmp_path: Path, runtime_dir: Path
) -> None:
    ranks = life(tmp_path, "first", way="dropped")
    assert [rank.get("start") for rank in ranks] == [0, 0], ranks
    assert any("this job has no level in memory: the keeper of node0 cannot reach" in line for line in errors(ranks[0]))
    assert open_storage(tmp_path / "ckpt", Events()).versions() == [Version(1, 1), Version(1, 3)]


def test_where_only_the_first_node_is_not_reached_the_ranks_go_on_with_storage_alone(
    tmp_path: Path, runtime_dir: Path
) -> None:
    ranks = life(tmp_path, "first", way="back")
    assert all("DURABLE" in rank["reached"] for rank in ranks), ranks
    (line,) = errors(ranks[0])
    assert "this job has no level in memory: rank 1: the keeper of node1 has not reached that of node0" in line
    assert open_storage(tmp_path / "ckpt", Events()).versions()


def test_machines_of_one_name_save_to_storage_alone(tmp_path: Path, runtime_dir: Path) -> None:
    """Each keeper would wait for the ranks of the other one: no version would ever be whole, and `close` would wait for it."""
    ranks = life(tmp_path, "first", way="namesakes")
    assert [rank.get("start") for rank in ranks] == [0, 0], ranks
    (line,) = errors(ranks[0])
    assert "ranks 0 and 1 have different keepers, and both call their node host" in line
    assert "--node-label" in line
    assert ranks[0]["reached"] == ranks[1]["reached"] == [None, "DURABLE", None, "DURABLE"]
    for rank in life(tmp_path, "only", "require_memory=true", way="namesakes"):
        assert "have different keepers" in rank["error"]
