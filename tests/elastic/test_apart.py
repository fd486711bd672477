"""What must interrupt nobody, or nobody's process: a silent launcher, a rank that is done early, a network that stutters."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from holdfast.core.elastic.failure_detector import LOST_S
from launch_kit import Job, Nodes, wait_for

APART = str(Path(__file__).with_name("apart_worker.py"))
# Long enough for every limit that might be meant: the watchdog's for steps, the agents' lease, torch's keep-alive.
LONG_S = 1.5 * LOST_S


def pids(job: Job, rank: int) -> list[int]:
    return [int(word) for word in (job.directory / f"pids-{rank}").read_text().split()]


def incident(job: Job, runtime_dir: Path) -> dict[str, Any]:
    """The only one, when it is over; then the job may end."""
    wait_for(lambda: "incident 1" in job.logs(), "the box of the incident", job.logs)
    (job.directory / "end").touch()
    assert job.launchers[0].wait(60) == 0, job.logs()
    (journal,) = runtime_dir.glob("run-*/journal.jsonl")
    (told,) = [row for row in map(json.loads, journal.read_text().splitlines()) if row["event"] == "incident"]
    return dict(told)


@pytest.mark.slow
def test_a_launcher_that_is_silent_while_steps_go_on_interrupts_nobody(job: Job) -> None:
    """Only the launcher of a node is stopped: its signs of life end, and its worker trains on with the other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", hosted=False)
    launchers = [nodes.start(0), nodes.start(1)]
    before = job.running(2)
    launchers[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        wait_for(lambda: time.monotonic() - stopped > LONG_S, "the end of every patience", job.logs)
        step = (job.ranks(2) or before)[0][2]
        wait_for(lambda: (job.ranks(2) or before)[0][2] > step + 20, "steps that go on", job.logs)
    finally:
        launchers[1].send_signal(signal.SIGCONT)
    step = (job.ranks(2) or before)[0][2]
    wait_for(lambda: (job.ranks(2) or before)[0][2] > step + 100, "steps after it woke up", job.logs)
    assert [row[:2] for row in job.ranks(2) or []] == [(pid, 0) for pid, _, _ in before], job.logs()
    job.stop()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0], job.logs()


@pytest.mark.slow
def test_who_is_done_early_is_not_stuck_and_runs_again_with_the_others(job: Job, runtime_dir: Path) -> None:
    job.script = APART
    job.launch("--standalone", "--nproc-per-node=2", "--max-restarts=3", worker=("early",))
    wait_for((job.directory / "alone").exists, "the rank that goes on alone", job.logs)
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > LONG_S, "the end of every patience", job.logs)
    (job.directory / "die").touch()
    assert incident(job, runtime_dir)["ranks"] == [0]
    first, second = pids(job, 0)
    assert first != second
    assert len(pids(job, 1)) == 2
    assert len(set(pids(job, 1))) == 1, "it was done, waited, and kept its process"


@pytest.mark.slow
def test_broken_groups_without_a_dead_process_are_made_again_in_place(job: Job, runtime_dir: Path) -> None:
    job.script = APART
    job.launch("--standalone", "--nproc-per-node=2", "--max-restarts=3", worker=("stutter",))
    told = incident(job, runtime_dir)
    for rank in range(2):
        assert len(pids(job, rank)) == 2
        assert len(set(pids(job, rank))) == 1, "a process was replaced, and none had died"
    assert (told["action"], told["kept"]) == ("rejoin in place", [0, 1])
    assert "Error: " in told["first_error"], "whoever was heard first"
