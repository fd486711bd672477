"""The launcher begins no driver of a device: what is forked from it could never use one."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from holdfast.elastic.launch import run_command
from holdfast.elastic.launch.device_questions import asked_in_a_child


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
    args = run_command.build_parser().parse_args(["--standalone", "--nproc-per-node=gpu", "script.py"])

    assert run_command._launch_config(args)[0].nproc_per_node == 3

    pids = set(asked.read_text().split())
    assert len(pids) >= 2
    assert str(os.getpid()) not in pids
    assert (torch.cuda.is_available, torch.cuda.device_count) == (note, count)


def test_a_driver_that_ends_the_process_that_asks_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(os._exit, 1))
    with asked_in_a_child():
        assert torch.cuda.device_count() == 0
