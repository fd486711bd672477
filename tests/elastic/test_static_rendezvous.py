"""The static rendezvous (`--master-port`, `--node-rank`) hands out one store for ever: a job ends all the same, and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import forked
from holdfast.elastic.launch.rendezvous.incarnation_rounds import UNSURE
from launch_kit import LAUNCH, Job, Launcher, free_port, kill_tree, wait_for

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


def _two_nodes(job: Job) -> tuple[int, Launcher, Launcher]:
    """The port of the store, and the launchers of two nodes whose ranks make steps."""
    port = free_port()
    where = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    first, second = (job.launch(*where, f"--node-rank={node}") for node in (0, 1))
    job.running(2)
    return port, first, second


@pytest.mark.parametrize("node", [0, 1])
def test_a_job_that_lost_a_node_ends_and_says_why(job: Job, node: int) -> None:
    """Nobody can take the place of a node: who is left does not meet alone, again and again. Node 0 has the store as well."""
    _, *launchers = _two_nodes(job)
    kill_tree(launchers.pop(node))
    assert launchers[0].wait(60) == 1, job.logs()
    assert "the static rendezvous cannot bring a node back; start the job again" in job.logs()


@pytest.mark.slow
def test_a_node_that_is_lost_after_it_was_slow_once_is_not_taken_for_one_that_comes_back(job: Job) -> None:
    """More silence of it is waited for then, while the groups of its peers broke: they do not go on in place, and wait for it."""
    port, first, second = _two_nodes(job)
    store = TCPStore("127.0.0.1", port, is_master=False)

    def beat(node: int) -> bytes:
        return next(store.get(key) for key in store.list_keys() if key.endswith(f"beat/{node}"))

    def beats(node: int) -> None:
        """Waits for one more beat of a node."""
        before = beat(node)
        wait_for(lambda: beat(node) != before, f"a beat of node {node}", job.logs)

    os.kill(second.pid, signal.SIGSTOP)
    wait_for(lambda: UNSURE.encode() in beat(0), "its silence", job.logs)
    for node in (0, 0):
        beats(node)
    os.kill(second.pid, signal.SIGCONT)
    for node in (1, 0, 0):  # by then the first one has looked at a beat of the second
        beats(node)
    kill_tree(second)
    assert first.wait(90) == 1, job.logs()
    assert "the static rendezvous cannot bring a node back; start the job again" in job.logs()
    assert "rejoin in place" not in job.logs()
