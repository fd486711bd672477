"""The demo is the promise; here it runs as a user would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sample_kit import MORE

SRC = str(Path(__file__).parents[2] / "src")


def demo(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SRC}
    command = [sys.executable, "-m", "holdfast.testing.demo.demo", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(620)
def test_three_faults_and_the_end_is_bit_equal(tmp_path: Path) -> None:
    process = demo("--quick", "--json", "--keep", str(tmp_path))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    rank_killed, node_lost, all_lost, end = (json.loads(line) for line in out.splitlines())
    # From a twin's live state where the fault found the survivors between two updates.
    assert set(rank_killed["restored_from"]) <= {"slot", "node"} or set(rank_killed["restored_from"]) <= {
        "twin",
        "note",
    }
    assert "storage" not in node_lost["restored_from"]
    assert max(node_lost["restored_from"].get(source, 0) for source in ("peer", "twin")) > 1_000_000
    assert all_lost["restored_from"]["storage"] > 1_000_000
    assert rank_killed["steps_lost"] <= 2
    # But for one that waited for the rest of a message, of which gloo tells nobody that it never comes.
    assert {*rank_killed["kept"], *rank_killed["unwakeable"]} >= {0, 1, 2}, "survivors lost their processes"
    assert {*node_lost["kept"], *node_lost["unwakeable"]} >= {0, 1}
    assert end["torchrun_seconds"] > 0, "the yardstick was not measured"
    assert end["equal"]
    assert end["num_tensors"] > 0
    assert end["num_losses"] >= 48 * 4
    assert end["timeline"]["fault"] >= 1, "the killed rank, as its launcher saw it; a lost node is where its tracks end"
    assert end["timeline"]["recovery"] >= 4, "four ranks restored after the last fault"
    tracks = {json.loads(path.read_text().splitlines()[0])["track"] for path in tmp_path.glob("trace/*")}
    assert tracks >= {*(f"rank {rank}" for rank in range(4)), *(f"keeper node-{letter}" for letter in "abcde")}
    assert (tmp_path / "timeline.html").stat().st_size > 10_000


@MORE
def test_an_interrupted_demo_cleans_up(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell in the background ignore it
    try:
        process = demo("--quick", "--json", "--keep", str(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 60
    while not (tmp_path / "reference" / "rank0.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, out + err
    pids = {json.loads(path.read_text().splitlines()[0])["pid"] for path in tmp_path.glob("reference/rank*.jsonl")}
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}/environ").exists() and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return "holdfast.testing.demo.train" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
