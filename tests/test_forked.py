"""The warm process of the tests: what it forks behaves as a fresh interpreter would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked


def test_a_forked_worker_is_like_a_started_one(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, sys, atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('torch' in sys.modules, sys.argv[1:], os.environ.get('ONE'), os.environ.get('HOME'), os.getcwd())\n"
        "print(sys.stdin.readline().strip(), file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    worker = forked.Popen(
        [sys.executable, str(script), "a", "b"], env={"ONE": "1"}, cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = worker.communicate("a line\n", timeout=30)
    assert worker.returncode == 7
    assert out.splitlines() == [f"True ['a', 'b'] 1 None {tmp_path}", "thread", "at exit"]
    assert err == "a line\n"


def test_errors_signals_and_timeouts_are_those_of_subprocess() -> None:
    broken = forked.run([sys.executable, "-c", "raise ValueError('seen')"], capture_output=True, text=True, timeout=30)
    assert broken.returncode == 1
    assert broken.stderr.endswith("ValueError: seen\n")
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)
    killed = forked.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    assert forked.run([sys.executable, "-m", "json.tool", "--help"], stdout=subprocess.DEVNULL).returncode == 0
