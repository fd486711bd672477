"""The end of a script is the user's: threads, exit handlers, exit codes and `__main__` are as with plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from launch_kit import wait_for

LAUNCH = [sys.executable, "-W", "ignore", "-m", "holdfast.train.elastic", "--standalone"]


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


@pytest.mark.parametrize(("how", "said"), [("os._exit(7)", "exitcode  : 7"), ("os.kill(os.getpid(), 9)", "SIGKILL")])
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
    start = "import sys; del sys.path[0]; from holdfast.tools.cli import main; main()"  # as the installed script does
    command = [sys.executable, "-c", start, "run", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "--exit-grace" in done.stdout) == (0, True), done.stderr[-2000:]


# A nursery, and a worker of it that tells how the signal stands there.
SIGNALLED = """
import os, signal, socket, sys, time
from holdfast.train.nursery import Nursery
from holdfast.train.page import make_page
def work(link, page):
    link.sendall(repr(signal.getsignal(signal.Signals(int(sys.argv[1])))).encode())
    return 0
nursery = Nursery.start(work)
def worker():
    ours, theirs = socket.socketpair()
    child = nursery.fork(theirs, make_page())
    said = ours.recv(100).decode()
    return said, child.wait(20)
first = worker()
os.kill(nursery.pid, int(sys.argv[1]))
print(first == worker() and first)
nursery.close()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])
def test_a_signal_to_all_processes_leaves_the_nursery_alone(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(int(number))]
    done = forked.run(command, capture_output=True, text=True, timeout=30)
    assert "SIG_DFL" in done.stdout, done.stderr[-2000:]


# Every rank stands where no signal gets it out, as in a foreign device; once with something that is safe.
HANGS = """
import os, pathlib, signal, time
from holdfast.train import alive
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ.get("SAFE"):
    alive.wish.saved(41)
pathlib.Path(os.environ["HERE"], "hangs" + os.environ["RANK"]).touch()
signal.sigwait([signal.SIGUSR1])
"""


@pytest.mark.parametrize("safe", ["", "1"])
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
