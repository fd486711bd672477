"""The host of the rendezvous store dies or freezes, or a whole node does and wakes up: the job goes on. Real processes.

Every launcher is a node of its own on loopback; the store is hosted by the first, as torchrun has it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from launch_kit import Job, Nodes, family, free_port, kill_tree, wait_for


def freeze(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher first: it must not see its workers stop."""
    frozen = family(launcher)
    for process in frozen:
        process.suspend()
    return frozen


@pytest.mark.slow
def test_a_frozen_node_is_replaced_and_neither_it_nor_its_workers_come_back(job: Job) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", hosted=False)
    first, second = nodes.start(0), nodes.start(1)
    before = job.running(2)
    frozen = freeze(second)
    third = nodes.start(1)
    after = job.recovered(2, 1)
    assert after[0][0] == before[0][0], "the node that lives lost its process"
    assert after[1][0] not in {process.pid for process in frozen}
    for process in frozen:
        process.resume()
    assert second.wait(30) == 1
    wait_for(lambda: not [p for p in frozen if p.is_running() and p.status() != "zombie"], "the zombies' end", job.logs)
    assert re.search("took (its place|the place of this one)", job.logs())
    assert [row[:2] for row in job.recovered(2, 1)] == [row[:2] for row in after], "it disturbed the job"
    kill_tree(third)  # the job meets once more: who was replaced has not closed its rendezvous
    third = nodes.start(1)
    job.recovered(2, 2)
    job.stop()
    assert [first.wait(60), third.wait(60)] == [0, 0], job.logs()


@pytest.mark.slow
def test_a_job_that_never_comes_together_ends_with_what_to_do(job: Job) -> None:
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    lonely = job.launch(*flags, "--rdzv-conf=join_timeout=2,is_host=1", "--local-addr=127.0.0.1")
    assert lonely.wait(30) == 1
    assert "the other nodes did not come in time: 2 are needed" in job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "steps", "recovery"])
def test_the_host_of_the_store_is_killed_and_comes_back(job: Job, phase: str) -> None:
    nodes = Nodes(job, f"127.0.0.1:{free_port()}")
    first, second = nodes.start(0), nodes.start(1)
    if phase == "start":
        wait_for(lambda: "hf-agent" in names(first), "the launcher", job.logs)
        before = None
    else:
        before = job.running(2)
        if phase == "recovery":
            os.kill(before[1][0], signal.SIGKILL)
    kill_tree(first)
    first = nodes.start(0)
    after = job.recovered(2, 1) if before else job.running(2)
    if phase == "steps":
        assert after[1][0] == before[1][0], "the node that lives lost its process"
    job.stop()
    assert [first.wait(60), second.wait(60)] == [0, 0], job.logs()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_job_that_stops_is_not_taken_for_one_that_lost_its_host(job: Job, victim: int) -> None:
    """The host leaves with everybody else: nobody opens a store and waits for others who never come."""
    nodes = Nodes(job, f"127.0.0.1:{free_port()}", restarts=0)
    launchers = [nodes.start(0), nodes.start(1)]
    rows = job.running(2)
    os.kill(rows[victim][0], signal.SIGKILL)
    assert [launcher.wait(40) for launcher in launchers] == [1, 1], job.logs()
    for log in job.directory.glob("launcher*.log"):
        told = log.read_text()
        assert f"the job stops: first error: rank {victim} " in told, "a launcher was not told, or says another's error"
        assert "is over for us" not in told


def names(launcher: subprocess.Popen[str]) -> list[str]:
    return [Path(f"/proc/{launcher.pid}/comm").read_text().strip()]


@pytest.mark.slow
def test_without_the_host_the_others_go_on_and_it_finds_them_again(job: Job) -> None:
    """An elastic job: two of three meet at the store of the lowest that lives; who comes later is led there."""
    nodes = Nodes(job, f"127.0.0.1:{free_port()}", "2:3")
    launchers = [nodes.start(node) for node in range(3)]
    before = job.running(3)
    kill_tree(launchers[0])
    (job.directory / "rank2").unlink()
    after = job.recovered(2, 1)
    assert {row[0] for row in after} == {row[0] for row in before[1:]}, "nodes that live lost their processes"
    for launcher in launchers[1:]:
        assert max(Counter(handles(launcher)).values()) == 2, "a rank that it had before is watched still"
    launchers[0] = nodes.start(0)
    # By the count: the last rank may have written once more after its file was removed.
    assert {row[0] for row in before[1:]} < {row[0] for row in job.recovered(3, 2, steps=3)}
    job.stop()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0, 0], job.logs()


def handles(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes to which a launcher has handles: of each worker the launcher itself has one, and its watchdog."""
    told = []
    for path in Path(f"/proc/{launcher.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            told.append(path.read_text())
    return [int(pid) for text in told for pid in re.findall(r"^Pid:\t(\d+)$", text, re.MULTILINE)]


def all_three_meet_again(job: Job, frozen: list[psutil.Process], launchers: list[subprocess.Popen[str]]) -> None:
    for process in frozen:
        process.resume()
    assert job.recovered(3, 2, steps=3)
    job.stop()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0, 0], job.logs()


@pytest.mark.slow
def test_a_frozen_host_is_left_and_does_not_come_back(job: Job) -> None:
    """Its store says nothing and refuses nothing; the others leave it, and when it wakes up it is told so."""
    nodes = Nodes(job, f"127.0.0.1:{free_port()}", "2:3")
    launchers = [nodes.start(node) for node in range(3)]
    before = job.running(3)
    frozen = freeze(launchers[0])
    (job.directory / "rank2").unlink()
    after = job.recovered(2, 1)
    assert {row[0] for row in after} == {row[0] for row in before[1:]}, "nodes that live lost their processes"
    all_three_meet_again(job, frozen, launchers)


@pytest.mark.slow
def test_a_frozen_node_is_left_by_the_others_and_taken_in_again(job: Job) -> None:
    """It closes no connection, so no group breaks: what tells is that it is silent and that work stands still."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", "2:3", hosted=False)
    launchers = [nodes.start(node) for node in range(3)]
    before = job.running(3)
    living = {row[0] for row in before if not is_child(row[0], launchers[1])}
    frozen = freeze(launchers[1])
    (job.directory / "rank2").unlink()
    after = job.recovered(2, 1)
    assert {row[0] for row in after} == living, "nodes that live lost their processes"
    assert re.search(r"node \d is lost: it is silent, and work has stopped", job.logs())
    all_three_meet_again(job, frozen, launchers)


@pytest.mark.slow
def test_a_node_that_only_stood_still_is_met_again_where_no_other_comes(job: Job) -> None:
    """A job that cannot do without it waits for it, or for a replacement, and goes on with all its processes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", hosted=False)
    launchers = [nodes.start(0), nodes.start(1)]
    before = job.running(2)
    frozen = freeze(launchers[1])
    wait_for(lambda: "is lost: it is silent" in job.logs(), "the verdict", job.logs)
    for process in frozen:
        process.resume()
    after = job.recovered(2, 1)
    assert {row[0] for row in after} == {row[0] for row in before}, "somebody lost its process"
    job.stop()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0], job.logs()


def is_child(pid: int, launcher: subprocess.Popen[str]) -> bool:
    return pid in {process.pid for process in family(launcher)}


# A launcher that dies after the others count it in, and before it says a word to them.
DIES_IN_THE_GAP = """
import os, signal, sys
from holdfast.elastic.launch import run_command as elastic
from holdfast.elastic.launch.rendezvous import incarnation_rounds as rounds
rounds.Round.open = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(elastic.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_node_that_dies_between_the_meeting_and_its_first_word_is_replaced(job: Job) -> None:
    nodes = Nodes(job, f"127.0.0.1:{free_port()}", "3")
    living = [nodes.start(node) for node in (0, 1)]
    job.program = ("-c", DIES_IN_THE_GAP)
    gone = nodes.start(2)
    assert gone.wait(60) == -signal.SIGKILL
    job.program = ("-m", "holdfast.elastic.launch.run_command")
    living.append(nodes.start(2))
    job.running(3)
    job.stop()
    assert [launcher.wait(60) for launcher in living] == [0, 0, 0], job.logs()
    assert "the job meets again" in job.logs()
