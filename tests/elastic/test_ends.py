"""The end of a script is the user's: threads, exit handlers, exit codes and `__main__` are as with plain Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import forked
from holdfast.elastic.launch.agent import awaited
from holdfast.elastic.launch.base_agent import BaseAgent
from holdfast.elastic.processes.exit_guard import ExitGuard
from launch_kit import Job, Nodes, free_port, kill_tree, wait_for
from sample_kit import MORE, sampled

LAUNCH = [sys.executable, "-W", "ignore", "-m", "holdfast.elastic.launch.run_command", "--standalone"]


def launch(tmp_path: Path, script: str, *flags: str, seconds: float = 60.0) -> subprocess.CompletedProcess[Any]:
    """Run a launcher with a script that lies in its working directory; `HERE` is that."""
    (tmp_path / "script.py").write_text(script)
    command = [*LAUNCH, *flags, "script.py"]
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    return forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=seconds)


LEAVES = """
import atexit, os, pathlib, sys, threading, time
import torch.distributed as dist
here = pathlib.Path(os.environ["HERE"])
def note(name, fact):
    (here / f"{name}{os.environ['RANK']}").write_text(str(fact))
class Mine: pass
def at_exit():
    note("main", getattr(sys.modules["__main__"], "Mine", None) is Mine)
    note("group", dist.is_initialized())
    dist.destroy_process_group()
def upload():
    threading.main_thread().join()
    note("thread", "ended last")
dist.init_process_group("gloo")
atexit.register(at_exit)
threading.Thread(target=upload).start()
note("file", __file__)
note("argv", sys.argv[0])
"""


def test_threads_and_exit_handlers_find_all_as_the_script_left_it(tmp_path: Path) -> None:
    done = launch(tmp_path, LEAVES, "--nproc-per-node=2")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-3000:]
    told = {path.name: path.read_text() for path in tmp_path.glob("*[01]")}
    for rank in range(2):
        assert (told[f"main{rank}"], told[f"group{rank}"]) == ("True", "True")
        assert (told[f"thread{rank}"], told[f"argv{rank}"]) == ("ended last", "script.py")
        assert told[f"file{rank}"] == str(tmp_path / "script.py")


@pytest.mark.parametrize(
    ("how", "said"),
    sampled(
        [("os._exit(7)", "exitcode  : 7"), ("os.kill(os.getpid(), 9)", "SIGKILL")], ("os._exit(7)", "exitcode  : 7")
    ),
)
def test_an_upload_that_fails_at_the_end_is_no_success(tmp_path: Path, how: str, said: str) -> None:
    done = launch(tmp_path, f"import atexit, os\natexit.register(lambda: {how})")
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.slow
def test_a_good_end_may_take_as_long_as_it_takes(tmp_path: Path) -> None:
    script = (
        "import os, threading, time, pathlib\n"
        "def upload():\n    time.sleep(35)\n    pathlib.Path(os.environ['HERE'], 'uploaded').touch()\n"
        "threading.Thread(target=upload).start()\n"
    )
    assert launch(tmp_path, script, seconds=90).returncode == 0
    assert (tmp_path / "uploaded").exists()


def test_a_rank_that_does_not_end_behind_its_last_line_has_its_name() -> None:
    """torch can hang there for ever, whoever started it; it is told what that may be, and nothing is killed."""
    assert awaited({1: 77}, 60.0, num_ended=1).endswith("have not: rank 1 (process 77)")
    said = awaited({1: 77}, 300.0, num_ended=3)
    assert "rank 1 (process 77), after 300 s; 3 other ranks of this node have ended. torch may hang" in said
    assert "Nothing is killed" in said


def test_rank_that_is_stopped_behind_its_last_line_is_called_stopped() -> None:
    """It would be waited for without an end, and its stack shows nothing."""
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert "stopped" not in awaited({1: rank.pid}, 60.0, num_ended=1)
        rank.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"process {rank.pid}, which is stopped: `kill -CONT {rank.pid}`" in awaited(
            {1: rank.pid}, 60.0, num_ended=1
        )
    finally:
        rank.kill()
        rank.communicate()


REPORTS = """
import atexit, os, pathlib, time
def report():
    time.sleep(float(os.environ.get("TAKES", "6")))
    pathlib.Path(os.environ["HERE"], "reported").touch()
atexit.register(report)
raise ValueError("planted")
"""


def test_a_failed_script_has_time_to_report_and_keeps_its_exit_code(tmp_path: Path) -> None:
    done = launch(tmp_path, REPORTS, "--max-restarts=0")
    assert done.returncode == 1
    assert (tmp_path / "reported").exists()
    assert "exitcode  : 1 " in done.stderr
    assert "ValueError: planted" in done.stderr


# Before 3.11 the interpreter names the module of an error.
MAIN = "__main__." if sys.version_info < (3, 11) else ""
SAYS_NOTHING = """
class Unfinished(RuntimeError):
    def __str__(self): return self.text
raise Unfinished("planted")
"""
ENDS_WITH_IT = SAYS_NOTHING.replace("raise Unfinished", "raise SystemExit(Unfinished") + ")"
HOOK_FAILS = """
import sys
def hook(*_): raise OSError("of the hook")
sys.excepthook = hook
raise ValueError("planted")
"""


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        pytest.param(SAYS_NOTHING, [f"{MAIN}Unfinished: <exception str() failed>"], marks=MORE),
        (ENDS_WITH_IT, []),
        (
            HOOK_FAILS,
            ["Error in sys.excepthook:", "OSError: of the hook", "Original exception was:", "ValueError: planted"],
        ),
    ],
    ids=["says nothing", "ends with it", "hook fails"],
)
def test_an_error_that_cannot_be_told_is_printed_as_in_plain_python(
    tmp_path: Path, script: str, lines: list[str]
) -> None:
    done = launch(tmp_path, script, "--max-restarts=0")
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert [line for line in said if line in lines] == lines, done.stderr[-3000:]
    assert "worker_main.py" not in done.stderr


def test_a_report_that_never_ends_is_cut_off_and_the_exit_code_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKES", "600")
    done = launch(tmp_path, REPORTS, "--max-restarts=0", "--exit-grace=0.5")
    assert done.returncode == 1
    assert "exitcode  : 1 " in done.stderr
    assert "--exit-grace" in done.stderr, "whoever wants more time reads how"


# Rank 0 notes an error of broken groups in run 0, as `@record` does, and ends in run 1 without a word.
STALE = """
import os, signal, time
from torch.distributed.elastic.multiprocessing.errors import record
run, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
@record
def main():
    if rank == 1 and run == 0:
        while not os.path.exists(os.environ["HERE"] + "/noted"): time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and run == 0:
        raise RuntimeError("gloo: Connection reset of long ago")
    if rank == 0:
        os._exit(7)
    time.sleep(30)
try:
    main()
except RuntimeError:
    open(os.environ["HERE"] + "/noted", "w").close()
    raise
"""


def test_an_error_of_an_earlier_incarnation_is_no_cause_of_a_later_one(tmp_path: Path) -> None:
    done = launch(tmp_path, STALE, "--nproc-per-node=2", "--max-restarts=1")
    assert done.returncode == 1
    assert "exitcode  : 7 " in done.stderr
    assert "Connection reset of long ago" not in done.stderr


def test_a_module_of_the_users_is_not_imported_by_the_launcher(tmp_path: Path) -> None:
    """A real start: which directories an interpreter looks into is what is asked here."""
    for name in ("secrets.py", "typing_extensions.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('imported a file of the user')")
    start = "import sys; del sys.path[0]; from holdfast.cli.cli import main; main()"  # as the installed script does
    command = [sys.executable, "-c", start, "run", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "--exit-grace" in done.stdout) == (0, True), done.stderr[-2000:]


# A fork server, and a worker of it that tells how the signal stands there.
SIGNALLED = """
import os, signal, socket, sys, time
from holdfast.elastic.processes.forkserver import ForkServer
from holdfast.checkpoint.liveness.heartbeat_page import make_page
def work(link, page):
    link.sendall(repr(signal.getsignal(signal.Signals(int(sys.argv[1])))).encode())
    return 0
forkserver = ForkServer.start(work)
def worker():
    ours, theirs = socket.socketpair()
    child = forkserver.fork(theirs, make_page())
    said = ours.recv(100).decode()
    return said, child.wait(20)
first = worker()
os.kill(forkserver.pid, int(sys.argv[1]))
print(first == worker() and first)
forkserver.close()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])
def test_signal_to_all_processes_spares_the_forkserver(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(int(number))]
    done = forked.run(command, capture_output=True, text=True, timeout=30)
    assert "SIG_DFL" in done.stdout, done.stderr[-2000:]


# Every rank stands where no signal gets it out, as in a foreign device; once with something that is safe.
HANGS = """
import os, pathlib, signal, time
from holdfast.checkpoint.liveness import open_checkpointers as alive
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ.get("SAFE"):
    alive.wish.saved(41)
pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"]).touch()
signal.sigwait([signal.SIGUSR1])
"""


@pytest.mark.parametrize("safe", sampled(["", "1"], "1"))
def test_a_job_whose_ranks_all_hang_ends_within_its_grace_and_says_what_is_safe(tmp_path: Path, safe: str) -> None:
    (tmp_path / "script.py").write_text(HANGS)
    environment = {**os.environ, "HERE": str(tmp_path), "SAFE": safe, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [*LAUNCH, "--nproc-per-node=2", "--shutdown-timeout=1", "script.py"]
    with forked.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(lambda: all((tmp_path / f"hangs{rank}").exists() for rank in range(2)), "the ranks", str)
        launcher.terminate()
        _, said = launcher.communicate(timeout=30)
        assert launcher.returncode == 128 + signal.SIGTERM
    assert "0 of 2 workers ended well" in said
    assert ("after step 41" in said) == bool(safe), said[-2000:]


SAVES_LATE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["HERE"])
if os.environ["RANK"] == "1":
    while not (here / "ready").exists():
        time.sleep(0.05)
    raise ValueError("the end of all")
def save(*_):
    time.sleep(float(os.environ["SECONDS"]))
    (here / "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
(here / "ready").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("flags", "seconds", "saved"),
    [pytest.param((), 6, True, marks=pytest.mark.slow), (("--shutdown-timeout=1",), 40, False)],
)
def test_when_one_fails_and_the_job_stops_the_others_have_the_time_that_torchrun_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], seconds: int, *, saved: bool
) -> None:
    """Five seconds are for those that run again: what they hold is in the keeper."""
    monkeypatch.setenv("SECONDS", str(seconds))
    done = launch(tmp_path, SAVES_LATE, "--nproc-per-node=2", "--max-restarts=0", *flags, seconds=30)
    assert done.returncode == 1
    assert (tmp_path / "saved").exists() == saved, done.stderr[-2000:]


def test_only_ranks_that_run_again_are_ended_sooner_than_by_torchrun() -> None:
    agent = object.__new__(BaseAgent)
    agent._stop_grace_s = 30.0
    agent._remaining_restarts = 1
    assert agent._survivor_grace_s() == 5
    agent._remaining_restarts = 0
    assert agent._survivor_grace_s() == 30


# No handler of a signal runs in ranks that wait in C with the interpreter's lock.
LOCKED = """
import ctypes, os, pathlib, signal
from holdfast.checkpoint.liveness import open_checkpointers as alive
signal.signal(signal.SIGTERM, lambda *_: None)
alive.wish.saved(41)
pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"]).touch()
while True: ctypes.PyDLL(None).sigwait(ctypes.byref((ctypes.c_ulong * 16)(1 << 9)), ctypes.byref(ctypes.c_int()))
"""
# Steps, then a wait that no signal ends: in Python, so that all of it is quiet.
QUIET = """
import ctypes, os, pathlib, signal, torch
from holdfast.checkpoint.liveness import open_checkpointers as alive
signal.signal(signal.SIGTERM, lambda *_: None)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
for step in range(12): optimizer.step()
alive.wish.saved(11)
pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"]).touch()
lock = (ctypes.c_byte * 64)()
for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(ctypes.byref(lock))
"""


def end(tmp_path: Path, script: str, *flags: str, stop: bool = False) -> tuple[int, str, float]:
    """Run two ranks until each has left its mark, tell the launcher to end: exit code, what it said, seconds."""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [*LAUNCH, "--nproc-per-node=2", *flags, "script.py"]
    with forked.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for(lambda: all((tmp_path / f"hangs{rank}").exists() for rank in range(2)), "the ranks", str)
        if stop:
            for rank in range(2):
                os.kill(int((tmp_path / f"hangs{rank}").read_text()), signal.SIGSTOP)
        began = time.monotonic()
        launcher.terminate()
        try:
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
        assert launcher.returncode is not None
        return launcher.returncode, said, time.monotonic() - began


def test_ranks_that_hold_the_interpreters_lock_are_ended_within_the_grace(tmp_path: Path) -> None:
    code, said, _ = end(tmp_path, LOCKED, "--shutdown-timeout=1")
    assert code == 128 + signal.SIGTERM
    assert "0 of 2 workers ended well" in said
    assert "after step 41" in said


# A last save when the rank is told to end, as `Checkpointer.step` makes it.
SAVES = """
import os, pathlib, signal, sys, time
from holdfast.checkpoint.liveness import open_checkpointers as alive
def save(*_):
    alive.wish.saved(12)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
alive.wish.saved(11)
pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"]).touch()
while True: time.sleep(0.01)
"""


@MORE
def test_what_ranks_save_when_they_are_told_to_end_is_in_the_last_line(tmp_path: Path) -> None:
    code, said, _ = end(tmp_path, SAVES)
    assert code == 0, said
    assert "2 of 2 workers ended well" in said
    assert "after step 12" in said


@MORE
def test_a_job_whose_ranks_all_hang_is_not_given_the_ten_minutes_of_a_last_save(tmp_path: Path) -> None:
    code, said, after_s = end(tmp_path, QUIET, "--watchdog=quick")
    assert code == 128 + signal.SIGTERM
    assert "ranks 0, 1 hang: no progress for" in said, said[-2000:]
    assert "after step 11" in said
    assert after_s < 55.0  # ten seconds, and what a busy machine takes


# Steps; then a rank that is named saves when it is told to end, and any other one stands at a lock.
ON_NODES = """
import ctypes, os, pathlib, signal, sys, time, torch
from holdfast.checkpoint.liveness import open_checkpointers as alive
saves = os.environ["RANK"] in sys.argv[2:]
def save(*_):
    if saves:
        alive.wish.saved(12)
        sys.exit(0)
signal.signal(signal.SIGTERM, save)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
for step in range(12): optimizer.step()
alive.wish.saved(11)
pathlib.Path(sys.argv[1], "hangs" + os.environ["RANK"]).touch()
while saves: time.sleep(0.01)
lock = (ctypes.c_byte * 64)()
for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(ctypes.byref(lock))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "saves"), [("quick", ()), ("quick", ("0",)), ("careful", ("1",))])
def test_ranks_that_hang_on_several_nodes_are_not_given_the_whole_grace(
    job: Job, mode: str, saves: tuple[str, ...]
) -> None:
    """Each launcher waits until those of the others have ended or hang as well."""
    job.script = str(job.directory / "script.py")
    Path(job.script).write_text(ON_NODES)
    nodes = Nodes(job, f"127.0.0.1:{free_port()}", worker=saves)
    launchers = [nodes.start(node, f"--watchdog={mode}") for node in range(2)]
    marks = [job.directory / f"hangs{rank}" for rank in range(2)]
    wait_for(lambda: all(mark.exists() for mark in marks), "the ranks", job.logs)
    for launcher in launchers:
        launcher.terminate()
    codes = sorted(launcher.wait(300) for launcher in launchers)
    assert codes == sorted([0] * len(saves) + [128 + signal.SIGTERM] * (2 - len(saves))), job.logs()
    assert job.logs().count("they are not waited for any longer") == 2 - len(saves)


# Rank 1 brings something elsewhere behind its last line.
UPLOADS = """
import atexit, os, pathlib, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def upload():
    (here / f"uploads{rank}").write_text(str(os.getpid()))
    while rank == "1" and not (here / "stop").exists(): time.sleep(0.01)
atexit.register(upload)
"""


@pytest.mark.parametrize("lost", [False, True])
def test_a_launcher_whose_ranks_have_ended_hears_signals_and_waits_for_nobody_who_is_gone(job: Job, lost: bool) -> None:
    job.script = str(job.directory / "script.py")
    Path(job.script).write_text(UPLOADS)
    nodes = Nodes(job, f"127.0.0.1:{free_port()}")
    launchers = [nodes.start(node) for node in range(2)]
    marks = [job.directory / f"uploads{rank}" for rank in range(2)]
    wait_for(lambda: all(mark.exists() and mark.read_text() for mark in marks), "the ranks", job.logs)
    wait_for(lambda: not psutil.pid_exists(int(marks[0].read_text())), "the end of rank 0", job.logs)
    if lost:
        kill_tree(launchers[1])
        assert launchers[0].wait(60) == 0, job.logs()
        return
    launchers[0].terminate()
    assert launchers[0].wait(60) == 0, job.logs()
    job.stop()
    assert launchers[1].wait(60) == 0, job.logs()


# Children that the script forks: by exit codes, by an error of its own, interrupted, off the last line.
FORKS = """
import os, pathlib, sys
from holdfast.checkpoint.liveness import heartbeat as beats
here, codes = pathlib.Path(os.environ["HERE"]), []
for how in ("three", "float", "byte", "error", "interrupt", "off"):
    pid = os.fork()
    if pid == 0:
        (here / how).write_text(str(beats._hooks.mine()))
        if how == "three": sys.exit(3)
        if how == "float": sys.exit(0.0)
        if how == "byte": sys.exit(256)
        if how == "interrupt": raise KeyboardInterrupt
        if how == "error": raise ValueError("of the child")
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    (here / "codes").write_text(str(codes))
"""


def test_a_process_that_the_script_forks_ends_as_in_plain_python_and_speaks_for_no_rank(tmp_path: Path) -> None:
    done = launch(tmp_path, FORKS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\n0.0\n" in f"\n{done.stderr}", "Python prints what is no exit code"
    assert (tmp_path / "codes").read_text() == "[3, 1, 0, 1, -2, 0]"
    assert "ValueError: of the child" in done.stderr
    assert [(tmp_path / how).read_text() for how in ("three", "error", "off")] == ["None"] * 3


# As the manual of `signal` has it: the signal is blocked first, and one thread waits for it.
WAITS_FOR_SIGNAL = """
import os, pathlib, signal, threading
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
def save():
    signal.sigwait({signal.SIGTERM})
    (here / ("saved" + rank)).touch()
thread = threading.Thread(target=save)
thread.start()
(here / ("hangs" + rank)).touch()
thread.join()
"""


def test_a_signal_that_the_script_blocks_reaches_no_thread_of_ours(tmp_path: Path) -> None:
    code, said, _ = end(tmp_path, WAITS_FOR_SIGNAL, "--shutdown-timeout=30")
    assert code == 0, said[-3000:]
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_a_launcher_whose_standard_files_are_closed_runs_its_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os; print('heard'); open(os.environ['HERE'] + '/ran', 'w').close()")
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    start = "from holdfast.cli.cli import main; main()"
    command = [sys.executable, "-c", start, "run", "--standalone", "script.py"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=tmp_path, env=environment, timeout=120, check=False).returncode == 0
    assert (tmp_path / "ran").exists()


OUTLIVES_TERMINAL = """
import os, pathlib, signal, time
here = pathlib.Path(os.environ["HERE"])
(here / "pid.part").write_text(str(os.getpid()))
(here / "pid.part").rename(here / "pid")
while not (here / "go").exists():
    time.sleep(0.02)
(here / "done").touch()
"""


@MORE
def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OUTLIVES_TERMINAL)
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *LAUNCH, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_for((tmp_path / "pid").exists, "the rank", str)
            for pid in (launcher.pid, int((tmp_path / "pid").read_text())):
                os.kill(pid, signal.SIGHUP)
            (tmp_path / "go").touch()
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert (tmp_path / "done").exists()


SAVES_AT_THE_END = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["HERE"])
def save(*_):
    (here / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(here / "ready").touch()
time.sleep(60)
"""


def test_a_terminal_that_is_closed_leaves_time_to_save(tmp_path: Path) -> None:
    """SIGHUP was handed on, and ended every rank at once, while the launcher said that they have time to save."""
    (tmp_path / "script.py").write_text(SAVES_AT_THE_END)
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = ["env", "--default-signal=HUP", *LAUNCH, "script.py"]  # nohup may be around these tests
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as launcher:
        try:
            wait_for((tmp_path / "ready").exists, "the rank", str)
            launcher.send_signal(signal.SIGHUP)
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert (launcher.returncode, (tmp_path / "saved").exists()) == (0, True), said


# Rank 1 is killed once, when both have made shared memory under a name of their own. Not before: what is interrupted between
# the making and the entry in Python's list of what to remove is left by Python itself.
SHARES = """
import os, pathlib, signal, time
from multiprocessing.shared_memory import SharedMemory
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
memory = SharedMemory(here.name + rank, create=True, size=64)
(here / ("made" + rank)).touch()
if rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not (here / "made0").exists(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
memory.close()
memory.unlink()
"""


def test_shared_memory_of_a_killed_rank_is_removed_before_its_successor_begins(tmp_path: Path) -> None:
    done = launch(tmp_path, SHARES, "--nproc-per-node=2", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(Path("/dev/shm").glob(tmp_path.name + "*"))


# Ranks take a lock one after the other that ends with their process, and leave a child behind that outlives them.
LOCKS = """
import fcntl, os, pathlib, subprocess, sys, time
os.environ["OMP_NUM_THREADS"] = "3"
import torch
if os.environ.get("GROUP"):
    import torch.distributed as dist
    dist.init_process_group("gloo")
here, rank = os.environ["HERE"], os.environ["RANK"]
lock = open(here + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
__builtins__.profile = print
profile(*sys.orig_argv[1:], __annotations__, torch.get_num_threads())
upload = f"while [ ! -e {here}/over ]; do sleep 0.1; done; echo done > {here}/uploaded{rank}"
subprocess.Popen(["sh", "-c", upload], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


def test_a_rank_without_a_group_ends_with_its_script_and_what_it_left_running_goes_on(tmp_path: Path) -> None:
    """Another rank may wait for just that end; and an upload in the background is nobody's to kill."""
    done = launch(tmp_path, LOCKS, "--nproc-per-node=2")
    (tmp_path / "over").touch()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("-u script.py {} 3") == 2, "its own command, `__main__` of an interpreter, its own threads"
    wait_for(lambda: all((tmp_path / f"uploaded{rank}").exists() for rank in range(2)), "what was left running", str)


@pytest.mark.slow
def test_a_rank_that_keeps_its_group_is_let_go_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP", "1")
    done = launch(tmp_path, LOCKS, "--nproc-per-node=2", seconds=150)
    (tmp_path / "over").touch()
    assert done.returncode == 0, done.stderr[-3000:]
    wait_for(lambda: all((tmp_path / f"uploaded{rank}").exists() for rank in range(2)), "what was left running", str)


# A rank that saves when it is told to end, and is stopped before.
STOPPED = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path(os.environ["HERE"], "saved" + os.environ["RANK"]).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
path = pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
while True: time.sleep(0.01)
"""


def test_stopped_ranks_are_continued_to_save_when_the_job_is_told_to_end(tmp_path: Path) -> None:
    code, said, _ = end(tmp_path, STOPPED, "--watchdog=off", "--shutdown-timeout=20", stop=True)
    assert (code, "2 of 2 workers ended well" in said) == (0, True), said[-2000:]
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


# A launcher whose main thread stands in a call that no signal ends, with one worker of its own group that ignores SIGTERM.
STUCK = """
import ctypes, os, signal, subprocess, sys, time
from holdfast.elastic.processes import exit_guard
exit_guard.LEAVE_S = exit_guard.BEGIN_S = 0.5
worker = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); print('up', flush=True);"
    "[time.sleep(1) for _ in range(600)]"], start_new_session=True, stdout=subprocess.PIPE, text=True)
class Ends:
    def is_ending(self): return False
    def any_lives(self): return worker.poll() is None
    def tell(self, number): os.kill(worker.pid, number)
    def kill(self): os.killpg(worker.pid, signal.SIGKILL) if worker.poll() is None else None
    def ended_well(self): return False
    def safe(self): return "the newest state is that after step 7"
assert worker.stdout.readline().strip() == "up"
for number in (signal.SIGTERM, signal.SIGINT):  # a shell ignores the second one in what it runs in the background
    signal.signal(number, lambda *_: print("handled"))
guard = exit_guard.ExitGuard(Ends(), [signal.SIGTERM, signal.SIGINT], grace_s=float(sys.argv[1]), also_ends=lambda: [])
print(worker.pid, flush=True)
lock = (ctypes.c_byte * 64)()
for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(ctypes.byref(lock))
"""


@pytest.mark.parametrize(("grace", "signals"), sampled([("1", 1), ("600", 2)], ("600", 2)))
def test_a_launcher_that_waits_without_an_end_is_ended_by_its_guard(grace: str, signals: int) -> None:
    command = [sys.executable, "-c", STUCK, grace]
    with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        worker = int(launcher.stdout.readline())
        try:
            wchan = Path(f"/proc/{launcher.pid}/wchan")
            wait_for(lambda: "futex" in wchan.read_text(), "its wait", str)
            launcher.terminate()
            if signals == 2:
                wait_for(lambda: not _pending(launcher.pid), "the first signal being heard", str)
                launcher.terminate()
                wait_for(lambda: not _pending(launcher.pid), "the same signal being heard", str)
                launcher.send_signal(signal.SIGINT)
            out, said = launcher.communicate(timeout=30)
            status = Path(f"/proc/{worker}/status")
            assert not status.exists() or "zombie" in status.read_text()
        finally:
            launcher.kill()  # leaving the block waits for it without a limit
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        assert launcher.returncode == 128 + signal.SIGTERM
    assert "the newest state is that after step 7" in said
    assert "handled" not in out, "the main thread was not stuck, so nothing was tried"


def _pending(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))


def test_a_launcher_outside_of_the_main_thread_has_a_guard_that_hears_nothing() -> None:
    """Python sets no signal's handler there; torchrun's own launcher works, with a warning."""
    agent, before = object.__new__(BaseAgent), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with ThreadPoolExecutor(1) as pool:
        guard = pool.submit(ExitGuard, agent, [signal.SIGTERM], grace_s=1.0, also_ends=list).result(30)
        assert signal.set_wakeup_fd(before) == before, "what the process had is left alone"
        pool.submit(guard.close).result(30)


# A launcher that gets a signal when its job is over and it has only to clear up.
LATE = """
import os, sys
from holdfast.elastic.launch import run_command
from holdfast.elastic.processes.forkserver import ForkServer
close = ForkServer.close
def late(self):
    os.kill(os.getpid(), int(os.environ["LATE"]))
    close(self)
ForkServer.close = late
run_command.leave(run_command.main())
"""


@pytest.mark.parametrize(
    ("number", "code"), sampled([(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGTERM, 1)], (signal.SIGTERM, 0))
)
def test_a_signal_behind_the_end_of_the_job_changes_no_exit_code(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "script.py").write_text(f"raise SystemExit({code})")
    command = [sys.executable, "-c", LATE, "--standalone", "--max-restarts=0", "script.py"]
    environment = {**os.environ, "LATE": str(int(number)), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


# Ends itself as the default action of a signal would, at the second one.
ONCE = """
import signal, sys
def first(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("told", flush=True)
signal.signal(signal.SIGTERM, first)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_the_guard_has_told_is_not_told_again() -> None:
    """Many scripts take the second signal for "at once" and would leave their last save undone."""
    with subprocess.Popen(
        [sys.executable, "-c", ONCE], stdin=-1, stdout=-1, text=True, start_new_session=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        agent = object.__new__(BaseAgent)
        agent._told, agent._is_ending = set(), False
        agent._processes = lambda: [worker]  # type: ignore[method-assign]
        assert worker.stdout.readline() == "ready\n"
        agent.tell(signal.SIGTERM)
        assert worker.stdout.readline() == "told\n"
        agent.tell(signal.SIGTERM)
        ending = threading.Thread(target=agent._end, args=(signal.SIGTERM, 30.0), kwargs={"told": True})
        ending.start()
        wait_for(agent.is_ending, "the end to begin", str)
        worker.stdin.close()
        ending.join(30)
        assert worker.wait(30) == 0


# As a library that makes a daemon: all descriptors are closed, and the numbers are the script's from then on.
DAEMON = """
import atexit, os, pathlib, socket, sys
import torch.distributed as dist
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
os.closerange(3, 4096)
pairs = [socket.socketpair() for _ in range(40)]
def came():
    for pair in pairs:
        for end in pair:
            end.setblocking(False)
            try:
                yield end.recv(4096)
            except BlockingIOError:
                pass
            except OSError as error:
                yield repr(error).encode()
atexit.register(lambda: (here / f"came{rank}").write_bytes(b"".join(came())))
if sys.argv[1] == "group":
    dist.init_process_group("gloo")
    dist.barrier()
if not os.fork():
    sys.exit(0)
assert os.wait()[1] == 0
if sys.argv[1] == "error":
    raise RuntimeError("gloo: Connection reset by peer")
"""


@pytest.mark.parametrize(("how", "code"), sampled([("plain", 0), ("group", 0), ("error", 1)], ("error", 1)))
def test_who_closes_all_descriptors_runs_on_and_gets_no_message_of_ours(tmp_path: Path, how: str, code: int) -> None:
    """As under torchrun; the launcher learns from the exit code how it ended."""
    (tmp_path / "script.py").write_text(DAEMON)
    command = [*LAUNCH, "--nproc-per-node=2", "--max-restarts=0", "script.py", how]
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr[-3000:]
    assert [path.read_bytes() for path in tmp_path.glob("came*")] in ([b"", b""], [b""]), "a word of ours"
    assert "closed in this process" in done.stderr
    assert done.stderr.count("closed in this process") <= 2, "once for each rank"
    assert ("Connection reset by peer" in done.stderr) is (how == "error")


LATE_PATH = """
import os, pathlib, sys
sys.path.insert(0, os.path.join(os.environ["HERE"], "lib"))
sys.modules.pop("statistics", None)
import statistics
pathlib.Path(os.environ["HERE"], "found").write_text(statistics.X)
"""


def test_a_module_on_a_path_added_late_is_found_once_the_librarys_is_dropped(tmp_path: Path) -> None:
    """Without the `pop` it is Python's own, which the launcher has imported: told in docs/elastic.md."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "statistics.py").write_text("X = 'mine'\n")
    assert launch(tmp_path, LATE_PATH).returncode == 0
    assert (tmp_path / "found").read_text() == "mine"
