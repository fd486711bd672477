"""What no launcher ends of, or waits for without an end: other users' processes, a moment without descriptors, a lost signal."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from holdfast.checkpoint.liveness.heartbeat_page import make_page
from holdfast.elastic.launch.agent import Agent
from holdfast.elastic.processes.worker_processes import Workers, WorkerSlot, _Prefix
from holdfast.elastic.watchdog.watchdog import Watchdog
from holdfast.elastic.worker import worker_main
from holdfast.elastic.worker.kill_descendants import kill_group
from holdfast.elastic.worker.script_sandbox import ScriptSandbox
from keeper.rig import eventually
from launch_kit import Job, Nodes


def refuses(*_: object) -> None:
    raise PermissionError(errno.EPERM, "not permitted")


def test_what_another_user_left_in_a_group_of_workers_ends_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have started `sudo` or `ping`; the kernel refuses signals to what only they are left of."""
    monkeypatch.setattr(os, "killpg", refuses)
    monkeypatch.setattr(signal, "pidfd_send_signal", refuses)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        kill_group(child.pid)
        slot = WorkerSlot(0, SimpleNamespace(pid=child.pid, returncode=None), SimpleNamespace(), -1)  # type: ignore[arg-type]
        slot.close(signal.SIGTERM)
        assert child.poll() is None
        child.communicate(b"\n")


def test_a_process_without_descriptors_ends_itself(tmp_path: Path) -> None:
    program = """
import os, resource
from holdfast.elastic.worker.worker_main import _end_now
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    _end_now()
except BaseException as error:
    os.write(2, repr(error).encode())
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_number_that_was_given_away_is_no_group_of_ours() -> None:
    """A worker was reaped long ago, and another process leads a group of its number now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        slot = WorkerSlot(0, SimpleNamespace(pid=stranger.pid, returncode=0), SimpleNamespace(), -1)  # type: ignore[arg-type]
        for number in (signal.SIGTERM, signal.SIGKILL):
            slot.close(number)
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


def looking(look: Any) -> Any:
    """An agent of a job of one node, and how it looks at its workers."""
    agent: Any = object.__new__(Agent)
    agent._program = agent._workers = agent._round = object()
    agent._meeting, agent._ends_by, agent._is_ending, agent._scarce_said_at = None, 0, False, -1e9
    agent._monitor = look
    return agent


def test_a_moment_without_descriptors_is_told_once_and_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agent = looking(lambda _: os.listdir("/proc"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        seen = [agent._monitor_workers(None).state for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [WorkerState.HEALTHY] * 3
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert "ulimit -n" in told[0]

    def broken(_: object) -> None:
        raise OSError(errno.EIO, "of another kind")

    with pytest.raises(OSError, match="of another kind"):
        looking(broken)._monitor_workers(None)


def test_a_signal_whose_exception_was_swallowed_ends_the_job_at_the_next_look() -> None:
    agent = looking(lambda _: None)
    agent._is_over = False
    try:
        agent._on_signal(signal.SIGTERM, None)
    except SignalException:
        pass  # as `logging` does with whatever is raised while it writes
    with pytest.raises(SignalException) as told:
        agent._monitor_workers(None)
    assert told.value.sigval == signal.SIGTERM
    agent._is_ending = True
    assert agent._monitor_workers(None) is None


def test_a_replacement_of_a_replacement_leaves_no_thread_that_reads_a_log(tmp_path: Path) -> None:
    """`--tee`: what the dead one wrote last is read first."""
    paths = [tmp_path / f"{number}" for number in range(4)]
    made = [SimpleNamespace(stdouts={0: str(path)}, stderrs={0: ""}, error_files={0: ""}, tee_stdouts={0: str(path)},
                            tee_stderrs={}) for path in paths]  # fmt: skip
    # Torch's reader may miss what is written in the moment in which it is told to end.
    for number, path in enumerate(paths):
        path.write_text(f"last word of {number}\n")
    with (tmp_path / "seen").open("w+") as seen:
        workers: Any = object.__new__(Workers)
        workers.name, workers._prefixes, workers._followers = "w", {0: ""}, {}
        first = TailLog("w", {0: str(paths[0])}, seen, {0: ""}).start()
        workers._tail_logs = [first, TailLog("w", {}, seen, {}).start()]
        workers.stdouts, workers.stderrs, workers.error_files = {0: str(paths[0])}, {0: ""}, {0: ""}
        workers.envs, workers._num_replaced, workers._logs = {0: {"TORCHELASTIC_ERROR_FILE": ""}}, {}, {}
        for number in (1, 2, 3):
            workers._num_replaced[0, number] = 0
            workers._logs[f".{number}"] = made[number], workers.envs
            workers._new_logs(0, number)
            assert len(workers._tail_logs) == 3, "one for the first processes of each stream, and one of now"
        for tail in workers._tail_logs:
            tail.stop()
        eventually(lambda: sorted(words(seen)) == [f"last word of {number}" for number in range(4)])


def test_lines_of_a_log_bear_the_rank_that_a_worker_has_by_then(tmp_path: Path) -> None:
    """Nodes that come and go shift ranks, and processes go on."""
    written, seen = tmp_path / "log", io.StringIO()
    workers: Any = object.__new__(Workers)
    workers._prefixes = {0: _Prefix("[rank 1]:")}
    tail = TailLog("w", {0: str(written)}, seen, workers._prefixes, interval_sec=0.01).start()
    try:
        written.write_text("I am 1\n")
        eventually(lambda: seen.getvalue() == "[rank 1]:I am 1\n")
        workers.name_lines({0: "[rank 0]:"})
        with written.open("a") as file:
            file.write("I am 0\n")
        eventually(lambda: seen.getvalue().endswith("\n[rank 0]:I am 0\n"))
    finally:
        tail.stop()


def words(file: IO[str]) -> list[str]:
    file.flush()
    return Path(file.name).read_text().splitlines()


def test_news_of_the_fork_server_that_concerns_no_rank_is_read() -> None:
    """A spare ended, and all ranks have: the next wait would end at once, and so on."""
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    agent: Any = object.__new__(Agent)
    forkserver = SimpleNamespace(lost=False, fileno=ours, await_news=lambda _: os.read(ours, 1))
    agent._workers = agent._meeting = None
    agent._supply, agent._interval_s = SimpleNamespace(forkserver=forkserver), 0.01
    try:
        agent._wait()
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_journal_ends_with_what_the_pages_say_last(tmp_path: Path) -> None:
    """Pages are closed with the workers, and before the watchdog is."""
    page = make_page()
    watch = Watchdog(tmp_path / "run")
    watch.started(0, os.getpid(), page)
    watch.ended()
    os.close(page)
    watch.close(3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["run", "progress", "end"]
    assert (lines[0]["ranks"], lines[2]["code"]) == ([0], 3)


def test_a_directory_that_cannot_be_entered_again_is_stayed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo -u somebody` keeps the directory of root, which somebody may not enter."""
    entered: list[str] = []
    monkeypatch.setattr(os, "chdir", entered.append)
    sandbox = ScriptSandbox()
    order = SimpleNamespace(environment=dict(os.environ), arguments=["/none.py"], is_module=False)

    class Over(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Over

    monkeypatch.setattr(worker_main.main_module, "home_of", stop)
    for directory, wanted in ((os.getcwd(), []), (str(tmp_path), [str(tmp_path)])):
        sandbox.directory = directory
        with pytest.raises(Over):
            sandbox.enter(order)  # type: ignore[arg-type]
        assert entered == wanted


def test_an_endpoint_where_nobody_is_gets_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    command = [
        sys.executable, "-W", "ignore", "-m", "holdfast.elastic.launch.run_command", "--nnodes=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=is_host=0,read_timeout=2", str(tmp_path / "script.py"),
    ]  # fmt: skip
    env = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "no rendezvous at 127.0.0.1:1" in done.stderr
    assert "--rdzv-endpoint" in done.stderr


def test_a_launcher_that_comes_when_the_job_is_over_is_told_so_in_a_line(job: Job) -> None:
    """As one does that a scheduler starts again."""
    job.script = str(job.directory / "script.py")
    Path(job.script).write_text("")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", "1:2", hosted=False)
    assert [nodes.start(node).wait(60) for node in range(2)] == [0, 1], job.logs()
    assert "holdfast run: the job is over" in job.logs()
    assert "Traceback" not in job.logs()
