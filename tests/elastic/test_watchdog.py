"""The watchdog on real processes: what hangs is found, by progress and not by heartbeats, and what lives is left alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import forked
import oddity_jobs
from holdfast.base.errors import UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.liveness import heartbeat, heartbeat_page
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.core.elastic.watch_mode import QUICK
from holdfast.core.elastic.worker_facts import Phase
from holdfast.elastic.watchdog.watchdog import Watchdog

JOBS = str(Path(__file__).with_name("watch_jobs.py"))
# What the limits of these jobs are (their steps take some hundredths of a second), and what a busy machine may add.
FOUND_WITHIN_S = 3.0 + 6.0


def run_jobs(
    directory: Path, seconds: float, *names: str, mode: str = "quick", scale: float = 1.0
) -> dict[str, dict[str, Any]]:
    """What was said of each job; see watch_jobs.py."""
    command = [sys.executable, JOBS, str(directory), str(seconds), mode, str(scale), *names]
    paths = [str(Path(oddity_jobs.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    answer = forked.run(command, capture_output=True, text=True, timeout=seconds + 150, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return {row["job"]: row for row in map(json.loads, answer.stdout.splitlines())}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("jobs")
    return run_jobs(directory, 4.5, "healthy", "stopped", "plain", "lock", "data", "unheard", "evaluation")


@pytest.mark.parametrize("job", ["stopped", "plain", "lock", "data"])
def test_a_rank_that_is_stuck_is_found_and_only_it(job: str, jobs: dict[str, dict[str, Any]]) -> None:
    (said,) = jobs[job]["said"]
    assert (said["kind"], said["rank"]) == ("restart_rank", 1)
    assert said["after_s"] < max(FOUND_WITHIN_S, 3 * said["p99_s"])
    assert any("rank 1 is missing in" in fact and "rank 0 waits" in fact for fact in said["evidence"]), said


def test_the_collective_that_lacks_a_rank_has_its_name(jobs: dict[str, dict[str, Any]]) -> None:
    assert "rank 1 is missing in all_reduce no. " in jobs["plain"]["said"][0]["evidence"][-1]


def test_the_stacks_of_a_stuck_rank_are_written_down(jobs: dict[str, dict[str, Any]]) -> None:
    """Also of threads: the one that beats on beside the main thread is no progress."""
    text = Path(jobs["lock"]["said"][0]["stacks"]).read_text()
    assert "in hang_on_a_lock" in text
    assert text.count("most recent call first") == 3, "the main one, the one that beats, and the one that takes signals"
    assert "in __getitem__" in Path(jobs["data"]["said"][0]["stacks"]).read_text()


def test_who_waits_inside_backward_is_known_by_its_stack(jobs: dict[str, dict[str, Any]]) -> None:
    assert jobs["lock"]["stands"]["0"] == "COLLECTIVE"
    assert jobs["data"]["stands"]["1"] == "DATA"


@pytest.mark.parametrize("job", ["healthy", "unheard", "evaluation"])
def test_nobody_healthy_is_interrupted(job: str, jobs: dict[str, dict[str, Any]]) -> None:
    """Steps, steps whose beats are lost, and a rank that evaluates alone while the other waits."""
    assert jobs[job]["said"] == []
    assert jobs[job]["alive"] == [True, True]
    assert jobs[job]["steps"][0] > 30


# Two minutes of careful patience are four seconds then, five are ten, and so on: all proportions stay.
SCALE = 1 / 30
ODD_BY_DEFAULT = (
    "own thread by lock", "grandchildren", "orphan", "download", "breakpoint", "slow object", "recv", "flock", "poll in C",
)  # fmt: skip
SICK_BY_DEFAULT = ("lock and beats", "no object", "crossed")


@pytest.fixture(scope="module")
def oddities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Some healthy and some sick, side by side."""
    return run_jobs(tmp_path_factory.mktemp("odd"), 25, *ODD_BY_DEFAULT, *SICK_BY_DEFAULT, mode="careful", scale=SCALE)


@pytest.mark.parametrize("job", ODD_BY_DEFAULT)
def test_a_healthy_oddity_lives_and_goes_on(job: str, oddities: dict[str, dict[str, Any]]) -> None:
    """Real processes before the careful watchdog; the others stand in a collective for twice its limit."""
    assert_healthy(oddities[job])


@pytest.mark.parametrize("job", SICK_BY_DEFAULT)
def test_a_hang_is_found_by_careful_patience(job: str, oddities: dict[str, dict[str, Any]]) -> None:
    assert_found(oddities[job])


def assert_healthy(row: dict[str, Any]) -> None:
    assert (row["said"], row["alive"]) == ([], [True, True])
    assert min(row["steps"]) > 30


def assert_found(row: dict[str, Any]) -> None:
    first = row["said"][0]
    assert (first["kind"], first["rank"]) == (("restart_all", 0) if row["job"] == "crossed" else ("restart_rank", 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loops", [0, 10])
def test_every_healthy_oddity_lives_and_goes_on(tmp_path: Path, loops: int) -> None:
    """Also beside ten busy loops, where the limits are as long as they are in life: a starved machine is slow."""
    scale = 1.0 if loops else SCALE
    with busy_loops(loops):
        for names in in_parts(sorted(oddity_jobs.HEALTHY), 6):
            rows = run_jobs(tmp_path, 200 if loops else 40, *names, mode="careful", scale=scale)
            for row in rows.values():
                assert_healthy(row)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mode", ["careful", "quick"])
def test_every_hang_is_found(tmp_path: Path, mode: str) -> None:
    """Prints how long that takes with the true limits (`-rP`). Time without a processor does not count: allow for it."""
    scale = SCALE if mode == "careful" else 1.0
    sick = sorted(oddity_jobs.SICK)
    if mode == "quick":
        sick.remove("evaluation hangs")  # ten minutes
    rows: dict[str, dict[str, Any]] = {}
    for names in in_parts(sick, 6):
        rows |= run_jobs(tmp_path, 300, *names, mode=mode, scale=scale)
    for row in rows.values():
        assert_found(row)
    found = sorted(row["said"][0]["after_s"] / scale for row in rows.values())
    print(f"{mode}: median {statistics.median(found):.1f} s, worst {found[-1]:.1f} s of {len(found)}")


def in_parts(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[first : first + size] for first in range(0, len(names), size)]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that compute beside the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_starved_machine_raises_no_alarm(tmp_path: Path) -> None:
    """Two ranks beside six busy loops on two processors for half a minute."""
    with busy_loops(6):
        rows = run_jobs(tmp_path, 30, "healthy")
    assert (rows["healthy"]["said"], rows["healthy"]["alive"]) == ([], [True, True])


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_an_endless_loop_is_found_because_the_others_wait(tmp_path: Path) -> None:
    """Time that it waits for a processor does not count, so a busy machine takes longer."""
    said = run_jobs(tmp_path, 240, "spin")["spin"]["said"]
    assert [(row["kind"], row["rank"]) for row in said] == [("restart_rank", 1)]


def test_a_page_tells_what_was_written_and_nothing_else() -> None:
    fd = heartbeat_page.make_page()
    try:
        assert heartbeat_page.read(fd).beat.changes == 0
        writer = heartbeat_page.Writer(fd)
        before = writer.enter(b"all_reduce")
        assert heartbeat_page.read(fd).beat.inside
        writer.leave(before)
        for _ in range(3):
            writer.stepped()
        reading = heartbeat_page.read(fd)
        assert (reading.pid, reading.beat.step, reading.beat.inside) == (os.getpid(), 3, False)
        assert (reading.beat.collective, reading.beat.sequence) == ("all_reduce", 1)
        assert reading.beat.samples[Phase.STEP] == 2
        assert 0 < reading.beat.step_p99_s < 1
        writer.close()
        os.pwrite(fd, b"\xff" * heartbeat_page.PAGE_BYTES, 0)
        assert heartbeat_page.read(fd).beat.changes == 0
        with open(f"/proc/self/fd/{fd}", "ab") as behind:
            behind.write(b"File x")
        assert (heartbeat_page.take_dump(fd), heartbeat_page.take_dump(fd)) == ("File x", "")
    finally:
        os.close(fd)


def test_the_number_of_a_finished_step_is_shown_at_once_and_is_no_sign_of_progress() -> None:
    fd = heartbeat_page.make_page()
    try:
        writer = heartbeat_page.Writer(fd)
        changes = heartbeat_page.read(fd).beat.changes
        writer.at_step(243)
        assert (heartbeat_page.read(fd).beat.step, heartbeat_page.read(fd).beat.changes) == (244, changes)
        writer.close()
    finally:
        os.close(fd)


def test_no_stacks_are_written_to_a_file_that_has_the_descriptors_number(tmp_path: Path) -> None:
    """The script closed all descriptors, and opened its own."""
    fd, watchdog = heartbeat_page.make_page(), Watchdog(tmp_path, QUICK)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    try:
        heartbeat.attach(fd)
        watchdog.started(0, os.getpid(), fd)
        watchdog._ask(0)
        assert "File " in heartbeat_page.take_dump(fd), "else nothing is proved below"
        number = heartbeat_page.read(fd).dump_fd
        os.dup2(theirs, number)
        watchdog._ask(0)
        heartbeat.detach()
        assert os.fstat(number).st_size == 0
        os.close(number)
    finally:
        watchdog.gone(0)
        heartbeat.detach()
        os.close(fd)
        os.close(theirs)


def test_a_long_wait_inside_another_one_keeps_the_patience_of_both() -> None:
    """`close()` waits for storage by `wait()`: neither may end the other's phase."""
    fd = heartbeat_page.make_page()
    try:
        heartbeat.attach(fd)
        with heartbeat.phase(Phase.SAVING):
            with heartbeat.phase(Phase.SAVING):
                pass
            assert heartbeat_page.read(fd).beat.phase is Phase.SAVING
        assert heartbeat_page.read(fd).beat.phase is Phase.START
        heartbeat.detach()
        assert SaveHandle.wait.__wrapped__, "a wait for a level is a phase of its own"  # type: ignore[attr-defined]
    finally:
        heartbeat.detach()
        os.close(fd)


def test_whoever_saves_or_loads_has_the_patience_for_it(tmp_path: Path) -> None:
    """Torch's own files, and every door of ours that may wait for storage."""
    fd = heartbeat_page.make_page()
    closed = Checkpointer(tmp_path / "root", model=torch.nn.Linear(1, 1))
    closed.abandon()
    seen: dict[str, Phase] = {}

    def told(name: str, work: Callable[[], object]) -> None:
        before = heartbeat_page.read(fd).spent_s
        with suppress(UsageError):
            work()
        after = heartbeat_page.read(fd).spent_s
        seen[name] = next(p for p in (Phase.SAVING, Phase.LOADING, Phase.DATA) if after[p] > before[p])

    try:
        heartbeat.attach(fd)
        told("torch.save", lambda: torch.save({}, tmp_path / "file"))
        told("torch.load", lambda: torch.load(tmp_path / "file"))
        told("restore", closed.restore)
        told("flush", closed.flush)
        told("close", closed.close)
        told("a batch", lambda: list(torch.utils.data.DataLoader([1, 2])))  # type: ignore[arg-type]
        before = heartbeat_page.read(fd).beat.changes
        beside = threading.Thread(target=torch.save, args=({}, tmp_path / "file"))
        beside.start()
        beside.join()
        assert heartbeat_page.read(fd).beat.changes == before, "what another thread does is no progress"
    finally:
        heartbeat.detach()
        os.close(fd)
    slow = dict.fromkeys(("torch.save", "flush", "close"), Phase.SAVING)
    assert seen == slow | dict.fromkeys(("torch.load", "restore"), Phase.LOADING) | {"a batch": Phase.DATA}


def test_the_longest_pause_that_ended_is_told_and_a_start_ends_with_an_optimizer_step() -> None:
    """What a rank does every five hundred steps is in no 99th percentile; many collectives come before training."""
    fd = heartbeat_page.make_page()
    try:
        writer = heartbeat_page.Writer(fd)
        for _ in range(40):
            writer.leave(writer.enter(b"broadcast"))
        assert not heartbeat_page.read(fd).beat.settled
        writer.turn(Phase.DATA)
        writer._at_s -= 45.0
        for _ in range(1000):
            writer.turn(Phase.DATA)
        beat = heartbeat_page.read(fd).beat
        assert 45 <= beat.longest_s[Phase.DATA] < 60
        assert beat.p99_s[Phase.DATA] < 1
        assert beat.longest_s[Phase.SAVING] == 0
        writer.stepped()
        assert heartbeat_page.read(fd).beat.settled
        writer.close()
        again = heartbeat_page.Writer(fd)
        assert heartbeat_page.read(fd).beat.longest_s[Phase.DATA] == 0, "a new run has a past of its own"
        again._began_s -= heartbeat_page.SETTLED_S + 1
        for _ in range(40):
            again.leave(again.enter(b"broadcast"))
        assert heartbeat_page.read(fd).beat.settled, "who makes no optimizer step trains all the same, in the end"
        again.close()
    finally:
        os.close(fd)
