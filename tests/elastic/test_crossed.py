"""Ranks that wait for each other in collectives, and nobody is missing: all are interrupted, on one node and on two.

Unless bytes move between them: that may take its time.
"""

from __future__ import annotations

import psutil
import pytest

from holdfast.core.elastic.watch_mode import QUICK, TOGETHER_FACTOR
from holdfast.core.elastic.worker_facts import Phase
from launch_kit import Job, Nodes, free_port


def launch(job: Job, num_nodes: int, how_often: str, *flags: str) -> list[int]:
    """Exit codes of the launchers of two ranks which enter two groups in different orders, before a quick watchdog."""
    flags = ("--watchdog=quick", *flags)
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


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(
    psutil.virtual_memory().available < 12 << 30, reason="four ranks reduce 2 GiB each: needs 12 GiB of memory"
)
def test_one_huge_message_is_no_alarm(job: Job) -> None:
    launcher = job.launch("--standalone", "--nproc-per-node=4", "--watchdog=quick", worker=("--huge",))
    assert launcher.wait(150) == 0, job.logs()
    took = [float((job.directory / f"huge{rank}").read_text()) for rank in range(4)]
    assert min(took) > TOGETHER_FACTOR * QUICK.floors_s[Phase.COLLECTIVE][0], "too short to tell anything"
    assert [row[1] for row in job.ranks(4) or ()] == [0] * 4, job.logs()
