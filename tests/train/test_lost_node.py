"""A launcher that froze for a while and lives costs nothing; one that is killed with its workers is missed at once."""

from __future__ import annotations

import os
import signal

from torch.distributed import TCPStore

from launch_kit import Job, kill_tree, wait_for

# Torch gives up a silent launcher after a minute: what is sooner is ours.
SLOW = "is_host=0,keep_alive_interval=20,keep_alive_max_attempt=3"


def test_a_frozen_launcher_that_thaws_is_left_alone_and_a_killed_one_is_missed_at_once(job: Job) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(node: int):
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
    os.kill(second.pid, signal.SIGSTOP)
    began = before[0][2]
    wait_for(lambda: (rows := job.ranks(2)) and rows[0][2] > began + 250, "steps beside a frozen launcher", job.logs)
    os.kill(second.pid, signal.SIGCONT)
    thawed = job.ranks(2)
    assert thawed is not None
    wait_for(lambda: (rows := job.ranks(2)) and rows[0][2] > thawed[0][2] + 20, "steps after it", job.logs)
    rows = job.ranks(2)
    assert rows is not None
    assert [row[:2] for row in rows] == [row[:2] for row in before], "a launcher that only slept was condemned"
    assert "lost" not in job.logs()

    kill_tree(second)
    third = start(1)
    after = job.recovered(2, 1)
    assert after[0][0] == before[0][0], "the node that lives lost its process"
    assert after[1][0] != before[1][0]
    assert "nobody listens there any more, and the groups of its peers broke: replace the node" in job.logs()
    job.stop()
    assert [first.wait(60), third.wait(60)] == [0, 0], job.logs()
