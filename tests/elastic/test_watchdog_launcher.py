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

from holdfast.core.elastic.escalation import Limits
from holdfast.core.elastic.failure_detector import Kind, Verdict
from holdfast.core.elastic.lost_node import MOST_SILENCE_S
from holdfast.elastic.launch.agent import DIES_S, HOLD_S, Agent
from holdfast.elastic.launch.incident_tracker import IncidentTracker
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
    lives = SimpleNamespace(poll=lambda: None, is_untold=lambda: False)
    survivor = WorkerSlot(0, lives, None, -1, WorkerStatus.HOLDS, error="Connection reset by peer")  # type: ignore[arg-type]
    hung = WorkerSlot(1, lives, None, -1, WorkerStatus.RUNS, killed_for=KillReason.HANGS, killed_at=1000.0)  # type: ignore[arg-type]
    agent: Any = object.__new__(Agent)
    agent._worker_slots, agent._serial = lambda: [survivor, hung], 0
    beats = SimpleNamespace(is_one_missed=lambda _: False)
    agent._round = SimpleNamespace(wanted=lambda _: False, somebody_ends=lambda _: False, size=1, heartbeats=beats)
    agent._current, agent._unfit, agent._node = SimpleNamespace(number=1), "", "n"
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in range(2)])
    agent._cannot_run_twice, agent._readings = lambda _: False, list
    agent._cases, agent._act = SimpleNamespace(judge=lambda *_: None), lambda _, fact: fact
    said = [agent._look_at_groups(1000.0 + waited_s) for waited_s in (5.0, 30.0, DIES_S + 1.0)]
    assert said[:2] == [None, None]
    assert "no process died" in str(said[2]), "a process that the kernel does not let die holds nobody for ever"
    lives.poll = lambda: -9
    assert "no process died" in str(agent._look_at_groups(1005.0))
    hung.status = WorkerStatus.FINISHED
    assert "and rank 1 had finished" in str(agent._look_at_groups(1005.0))
    lives.is_untold = lambda: True
    assert agent._look_at_groups(1000.0 + 2 * DIES_S) is None, "nobody can be replaced before the fork server tells"
    lives.is_untold = lambda: False
    beats.is_one_missed = lambda _: True
    said = [agent._look_at_groups(waited_s) for waited_s in (HOLD_S, MOST_SILENCE_S, HOLD_S + MOST_SILENCE_S)]
    assert said[:2] == [None, None], "a node that is silent may be lost: whoever goes on in place waits for its ranks"
    assert "and rank 1 had finished" in str(said[2]), "nobody is held for ever"


def test_ranks_that_hang_together_are_one_incident_and_the_cause_of_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second may die after the look at the first, and before the order of the next incarnation."""

    def begin(local_rank: int, *_: object) -> None:
        proc = SimpleNamespace(returncode=None, pid=-1)
        proc.poll = lambda: proc.returncode
        slots[local_rank] = WorkerSlot(local_rank, proc, None, -1, WorkerStatus.RUNS)  # type: ignore[arg-type]

    slots: dict[int, WorkerSlot] = {}
    for rank in range(3):
        begin(rank)
    agent: Any = object.__new__(Agent)
    agent._workers = SimpleNamespace(worker_slots=slots, replace=begin)
    agent._supply = SimpleNamespace(worked=lambda: None)
    agent._round = SimpleNamespace(all_anew=str, propose=lambda *_, **__: None)
    agent._current, agent._recoveries, agent._serial, agent._node = SimpleNamespace(number=1), 0, 0, "n"
    agent._worker_group = SimpleNamespace(workers=[SimpleNamespace(id=n, local_rank=n, global_rank=n) for n in slots])
    agent._unfit, agent._mended_at, agent._watch, agent._cases = "", 0.0, None, IncidentTracker(Limits())
    agent._failures, noted = {rank: SimpleNamespace(exitcode=-9) for rank in slots}, []
    agent._hear, agent._give_order, agent._readings = lambda _: None, lambda _: None, list
    agent._note_death = lambda slot: noted.append(slot.local_rank)
    for rank in (1, 2):
        slots[rank].verdict = Verdict(Kind.RESTART_RANK, (rank,), f"rank {rank} is stuck", ("it is stopped",))
    slots[1].proc.returncode = -9
    agent._look()
    slots[2].proc.returncode = -9
    agent._order_all()
    case = agent._cases._case
    assert (case.facts["ranks"], case.facts["first_error"], noted) == ([1, 2], "rank 1 is stuck", [1, 2])
    agent._cases._case = None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60.0)
    slots[2].proc.returncode, slots[2].error = 1, "ValueError: a bug of the script"
    agent._look()
    facts = agent._cases._case.facts
    assert (facts["ranks"], facts["first_error"]) == ([2], "ValueError: a bug of the script")
    assert "stopped" not in facts["found_by"]


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
    assert report["seconds"]["steps"] > 0.1
    assert report["finished"]
    assert report["watchdog"] == "careful"


def test_who_was_killed_for_not_beginning_its_order_is_not_called_ended_by_a_signal() -> None:
    agent: Any = object.__new__(Agent)
    agent._watch = None
    gone = SimpleNamespace(returncode=-signal.SIGKILL)
    late, other = (WorkerSlot(0, gone, None, -1, killed_for=reason) for reason in (KillReason.LATE, None))  # type: ignore[arg-type]
    assert agent._why(late) == "was killed: it did not begin its order in time"
    assert "SIGKILL" in agent._why(other)
