"""A launcher that is killed with its workers is missed at once; one that froze for a while and lives costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from torch.distributed import TCPStore

from launch_kit import Job, kill_tree, wait_for

# Torch gives up a silent launcher after a minute: what is sooner is ours.
SLOW = "is_host=0,keep_alive_interval=20,keep_alive_max_attempt=3"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_launcher_is_missed_at_once_and_one_that_thaws_is_left_alone(job: Job) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(node: int) -> subprocess.Popen[str]:
        return job.launch(
            "--nnodes=2",
            "--nproc-per-node=1",
            "--max-restarts=20",
            "--rdzv-backend=c10d",
            "--rdzv-id=missed",
            f"--rdzv-endpoint=127.0.0.1:{store.port}",
            f"--rdzv-conf={SLOW}",
            f"--local-addr=127.0.0.{node + 1}",
            f"--node-label=node{node}",
        )

    first, second = start(0), start(1)
    before = job.running(2)
    kill_tree(second)
    third = start(1)
    after = job.recovered(2, 1)
    assert after[0][0] == before[0][0], "the node that lives lost its process"
    assert after[1][0] != before[1][0]
    assert "nobody listens there any more, and the groups of its peers broke: replace the node" in job.logs()

    os.kill(third.pid, signal.SIGSTOP)
    await_steps(job, 250)  # of 20 ms at least: its beats stay away for longer than LEAST_SILENCE_S
    os.kill(third.pid, signal.SIGCONT)
    await_steps(job, 50)
    assert [row[:2] for row in job.running(2)] == [row[:2] for row in after], "a launcher that only slept was condemned"
    job.stop()
    assert [first.wait(60), third.wait(60)] == [0, 0], job.logs()
    assert job.logs().count("WARNING node 1 is lost") == 1, "a launcher that only slept was condemned"


def await_steps(job: Job, number: int) -> None:
    """Both ranks make so many more steps, of 20 ms at least."""
    began = [step for _, _, step in job.running(2)]
    for _ in range(number // 50):
        goal = [step + 50 for step in began]
        wait_for(
            lambda goal=goal: all(row[2] >= least for row, least in zip(job.running(2), goal, strict=True)),
            "steps beside a launcher that sleeps",
            job.logs,
        )
        began = goal
