"""`holdfast run` and a rank that stops: with the watchdog it is replaced in seconds, without it nothing happens.

The 30 minutes of the process group are left alone in both jobs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.elastic.launch.agent import DIES_S, Agent
from holdfast.elastic.processes.worker_processes import KillReason, WorkerSlot, WorkerStatus
from launch_kit import Job, wait_for

WATCHED_S = 5.0


def test_a_stopped_rank_is_replaced_and_only_if_somebody_watches(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {}
    for name in ("on", "off"):
        (tmp_path / name).mkdir()
        jobs[name] = Job(tmp_path / name)
    launchers = {
        name: job.launch(
            "--standalone",
            "--nproc-per-node=2",
            *(["--watchdog=off"] if name == "off" else []),  # on by default
            f"--run-id={name}",
            "--node-label=n",
        )
        for name, job in jobs.items()
    }
    try:
        before = {name: job.running(2) for name, job in jobs.items()}
        for name, job in jobs.items():
            wait_for(lambda job=job: (job.ranks(2) or [(0, 0, 0)])[0][2] >= 40, "forty steps", job.logs)
            os.kill(before[name][1][0], signal.SIGSTOP)
        stopped = time.monotonic()
        after = jobs["on"].recovered(2, 1)
        assert after[0][0] == before["on"][0][0], "the survivor keeps its process"
        assert after[1][0] != before["on"][1][0]
        wait_for(
            lambda: time.monotonic() - stopped > WATCHED_S, "the time that would have been enough", jobs["off"].logs
        )
        rows = jobs["off"].ranks(2)
        assert rows is not None
        assert [(pid, restarts) for pid, restarts, _ in rows] == [(pid, 0) for pid, _, _ in before["off"]]
        os.kill(before["off"][1][0], signal.SIGCONT)
        step = rows[0][2]
        wait_for(lambda: (jobs["off"].ranks(2) or [(0, 0, 0)])[0][2] > step, "its going on", jobs["off"].logs)
        wait_for(lambda: "incident 1" in jobs["on"].logs(), "the box of the incident", jobs["on"].logs)
        for name, job in jobs.items():
            job.stop()
            assert launchers[name].wait(60) == 0, job.logs()
    finally:
        for job in jobs.values():
            for pid, _, _ in job.ranks(2) or []:
                _continue(pid)
            job.end()
    told = jobs["on"].logs()
    assert "| failed       rank 1" in told, told
    assert "its process is stopped" in told
    _judge_report(runtime_dir)


def test_broken_groups_are_no_failure_while_a_rank_that_was_killed_dies() -> None:
    """On a busy machine that takes seconds: the survivors' errors come first, and would be taken for the cause."""
    lives = SimpleNamespace(poll=lambda: None)
    survivor = WorkerSlot(0, lives, None, -1, WorkerStatus.HOLDS, error="Connection reset by peer")  # type: ignore[arg-type]
    hung = WorkerSlot(1, lives, None, -1, WorkerStatus.RUNS, killed_for=KillReason.HANGS, killed_at=1000.0)  # type: ignore[arg-type]
    agent: Any = object.__new__(Agent)
    agent._worker_slots, agent._serial, agent._signs = lambda: [survivor, hung], 0, lambda _: {}
    agent._round = SimpleNamespace(wanted=lambda _: False, somebody_ends=lambda _: False, size=1)
    agent._current, agent._unfit, agent._node = SimpleNamespace(number=1), "", "n"
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(global_rank=0)])
    agent._cannot_run_twice, agent._readings = lambda _: False, list
    agent._cases, agent._act = SimpleNamespace(judge=lambda *_: None), lambda _, fact: fact
    said = [agent._look_at_groups(1000.0 + waited_s, {}) for waited_s in (5.0, 30.0, DIES_S + 1.0)]
    assert said[:2] == [None, None]
    assert "no process died" in str(said[2]), "a process that the kernel does not let die holds nobody for ever"
    lives.poll = lambda: -9
    assert "no process died" in str(agent._look_at_groups(1005.0, {}))


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it ended


def _judge_report(runtime_dir: Path) -> None:
    """The journal knows what the launcher said, and its seconds add up."""
    (journal,) = runtime_dir.glob("run-on-*/journal.jsonl")
    assert not list(runtime_dir.glob("run-off-*"))
    command = [sys.executable, "-m", "holdfast.cli.cli", "report", str(journal), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    (incident,) = report["incidents"]
    assert incident["ranks"] == [1]
    assert incident["found_s"] > 2.5
    assert abs(sum(report["seconds"].values()) - report["wall_s"]) <= 0.01 * report["wall_s"]
    assert report["seconds"]["detection"] > 2.5
    assert report["seconds"]["steps"] > 0.5
    assert report["finished"]
    assert report["watchdog"] == "careful"
