"""Ranks that wait for each other in collectives, and nobody is missing: all are interrupted, on one node and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from train.test_elastic import Job
from train.test_lost_host import Nodes, free_port


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    yield started
    started.end()


def launch(job: Job, num_nodes: int, how_often: str, *flags: str) -> list[int]:
    """Exit codes of the launchers of two ranks which enter two groups in different orders."""
    if num_nodes == 1:
        launchers = [job.launch("--standalone", "--nproc-per-node=2", *flags, worker=("--cross", how_often))]
    else:
        nodes = Nodes(job, f"127.0.0.1:{free_port()}", worker=("--cross", how_often))
        launchers = [nodes.start(node, *flags) for node in range(2)]
    if how_often == "once":
        before = job.running(2)
        assert [row[0] for row in job.recovered(2, 1, steps=30)] == [row[0] for row in before], (
            "all keep their processes"
        )
        job.stop()
    return [launcher.wait(120) for launcher in launchers]


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_that_wait_for_each_other_are_interrupted(job: Job, num_nodes: int) -> None:
    """Long before the timeout of the groups, which is half an hour."""
    assert launch(job, num_nodes, "once") == [0] * num_nodes, job.logs()
    assert "and none is missing: rejoin in place" in job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_that_do_so_every_time_stop_the_job(job: Job, num_nodes: int) -> None:
    assert launch(job, num_nodes, "always", "--max-restarts=1") == [1] * num_nodes, job.logs()
    assert "the job stops: first error: no single rank" in job.logs()
