"""`holdfast run` with the flags that nobody gives: scripts whose ranks do odd and healthy things end as under torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import oddity_jobs
from launch_kit import Job
from sample_kit import MORE

WORKER = str(Path(__file__).with_name("odd_worker.py"))
TESTS = str(Path(oddity_jobs.__file__).parent)
# Longer than the patience that a quick watchdog has, and than that for work that one rank does alone.
SHORT_S, LONG_S = 8.0, 40.0


def run(job: Job, monkeypatch: pytest.MonkeyPatch, seconds: float, *names: str) -> None:
    """One job that does all of them, one after the other; nobody is replaced."""
    monkeypatch.setenv("ODD_S", str(seconds))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")])))
    job.script = WORKER
    launcher = job.launch("--standalone", "--nproc-per-node=2", worker=names)
    assert launcher.wait(seconds * len(names) + 90) == 0, job.logs()
    assert [(job.directory / f"ended{rank}").read_text().split()[1] for rank in range(2)] == ["0", "0"], job.logs()
    assert "incident" not in job.logs()


@MORE
def test_a_rank_that_waits_for_its_own_thread_lives(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run(job, monkeypatch, SHORT_S, "own thread by lock")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_oddity_lives(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run(
        job,
        monkeypatch,
        9.0,
        *(name for name in oddity_jobs.HEALTHY if name not in ("debugger", "slow object", *oddity_jobs.CALLS)),
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [("export",), ("prepare", "tokenises")])
def test_long_work_of_one_rank_lives(job: Job, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Before the first step, and between steps."""
    run(job, monkeypatch, LONG_S, *names)
