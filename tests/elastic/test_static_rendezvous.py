"""The static rendezvous (`--master-port`, `--node-rank`) hands out one store for ever: a job ends all the same, and restarts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import forked
from launch_kit import LAUNCH, Job, Launcher, free_port, kill_tree

# Ends without a word, as often as it is told to.
SCRIPT = """
import os, pathlib
lives = pathlib.Path(os.environ["HERE"], "lives" + os.environ["RANK"])
with lives.open("a") as file:
    file.write("x")
if len(lives.read_text()) <= int(os.environ["DIES"]):
    os._exit(3)
"""


@pytest.mark.parametrize(("dies", "code", "num_lives"), [(100, 1, 4), (3, 0, 4)])
def test_all_workers_are_restarted_once_and_the_job_goes_on(
    tmp_path: Path, dies: int, code: int, num_lives: int
) -> None:
    """The third failure without progress restarts all of them; the end of that round is not the end of the next."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*LAUNCH, f"--master-port={free_port()}"]
    environment = {
        **os.environ, "HERE": str(tmp_path), "DIES": str(dies), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")
    }  # fmt: skip
    done: subprocess.CompletedProcess[str] = forked.run(
        [*command, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert len((tmp_path / "lives0").read_text()) == num_lives
    assert done.stderr.count("all workers are restarted") == 1


def test_a_job_that_lost_a_node_ends_and_says_why(job: Job) -> None:
    """Nobody can take the place of a node: who is left does not meet alone, again and again."""
    port = free_port()

    def start(node: int) -> Launcher:
        return job.launch("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")

    first, second = start(0), start(1)
    job.running(2)
    kill_tree(second)
    assert first.wait(60) == 1, job.logs()
    assert "the static rendezvous cannot bring a node back; start the job again" in job.logs()
