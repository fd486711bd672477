"""The launcher begins no driver of a device: what is forked from it could never use one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from holdfast.base.errors import DeviceError, UsageError
from holdfast.elastic.launch import device_questions, run_command, run_flags
from holdfast.elastic.launch.device_questions import asked_in_a_child
from sample_kit import MORE


def test_the_launcher_counts_devices_without_asking_their_driver_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`LaunchConfig` of torch asks `torch.cuda.is_available()`, which on CUDA makes all forked workers useless."""
    asked = tmp_path / "asked"

    def note() -> bool:
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return True

    def count() -> int:
        return 3 if note() else 0

    monkeypatch.setattr(torch.cuda, "is_available", note)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    args = run_flags.build_parser().parse_args(["--standalone", "--nproc-per-node=gpu", "script.py"])

    assert run_command._launch_config(args)[0].nproc_per_node == 3

    pids = set(asked.read_text().split())
    assert len(pids) >= 2
    assert str(os.getpid()) not in pids
    assert (torch.cuda.is_available, torch.cuda.device_count) == (note, count)


def test_a_driver_that_ends_the_process_that_asks_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(os._exit, 1))
    with asked_in_a_child():
        assert torch.cuda.device_count() == 0


def _hangs(pid_file: Path) -> bool:
    pid_file.write_text(str(os.getpid()))
    signal.pause()
    return True


def test_a_driver_that_hangs_is_an_error_and_its_child_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(device_questions, "ANSWER_S", 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", functools.partial(_hangs, pid_file))
    args = run_flags.build_parser().parse_args(["--standalone", "--nproc-per-node=2", "script.py"])
    with pytest.raises(DeviceError, match=r"is_available\(\) gave no answer"):
        run_command._launch_config(args)
    pid = int(pid_file.read_text())
    with contextlib.suppress(ChildProcessError):  # whoever comes first takes it away
        os.waitpid(pid, 0)
    assert not psutil.pid_exists(pid)


def test_what_a_driver_starts_and_leaves_behind_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that it forked holds the child's end of the pipe for as long as it lives."""
    held, holding = os.pipe()

    def count() -> int:
        if os.fork() == 0:
            os.close(holding)
            os.read(held, 1)
            os._exit(0)
        return 3

    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(device_questions, "ANSWER_S", 30.0)
    with os.fdopen(holding, "wb"), os.fdopen(held, "rb"), asked_in_a_child():
        assert torch.cuda.device_count() == 3


def test_a_count_may_be_any_kind_of_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(np.int64, 3))
    monkeypatch.setattr(torch.cuda, "is_available", functools.partial(np.bool_, True))
    with asked_in_a_child():
        assert torch.cuda.device_count() == 3
        assert torch.cuda.is_available() is True


def test_no_process_at_all_is_an_error_of_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a driver says that there are devices and fails to count them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(os._exit, 1))
    args = run_flags.build_parser().parse_args(["--standalone", "--nproc-per-node=gpu", "script.py"])
    with pytest.raises(UsageError, match="--nproc-per-node=gpu gives 0 processes"):
        run_command._launch_config(args)


@MORE
def test_a_caller_that_ignores_the_ends_of_its_children_changes_nothing(tmp_path: Path) -> None:
    """SIGCHLD that is ignored stays so over an exec, and then the kernel tells nobody how a child ended."""
    script = tmp_path / "script.py"
    script.write_text("import signal\nprint(f'ran {signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL}')\n")
    command = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--nproc-per-node=2", str(script)]
    ignoring = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv(sys.argv[1], sys.argv[1:])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", ignoring, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("ran True") == 2
    assert "Traceback" not in answer.stderr
