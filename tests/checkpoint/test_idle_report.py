"""What people are told of the waits of a pipeline."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked
from holdfast.checkpoint.pipeline.bubbles import MEMORY, Profile
from holdfast.checkpoint.pipeline.idle_report import FIRST_STEPS, IdleReporter
from holdfast.core.pipeline.bubble_placement import Window, place
from holdfast.core.pipeline.idle_stats import Idle

# A job with its log on.
LOGGED = """
import logging, runpy, sys
logging.basicConfig(level=logging.INFO)
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measured(num_steps: int) -> Profile:
    return Profile({}, idle=0.031, period=0.12, ending=0.0, num_steps=num_steps)


def test_it_is_logged_once_when_enough_was_measured_and_told_again_when_all_is_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast.checkpoint.pipeline.idle_report")
    told: list[Idle] = []
    now = 0
    bubbles: Any = SimpleNamespace(profile=lambda: measured(now))
    teller = IdleReporter(bubbles, told.append)
    fits, too_much = (place([0.004] * number, [Window(0, 0.02)]) for number in (4, 6))

    def versions(number: int, placement: Any = fits, copy_s: float = 0.016) -> None:
        nonlocal now
        for _ in range(number):
            now += 1
            teller.placed(placement, copy_s)

    versions(FIRST_STEPS - 1)
    assert told == []
    versions(1)
    reason = "idle 31.0 ms of a step of 120.0 ms; all 4 chunks (16.0 ms) fit into 20.0 ms of waits"
    assert told == [Idle(idle_s=0.031, period_s=0.12, copy_s=0.016, left_s=0.0, reason=reason)]
    assert caplog.messages == [f"waits: {reason}"]
    versions(MEMORY - 1, too_much, 0.024)
    assert len(told) == 1
    versions(1, too_much, 0.024)
    assert told[1].left_s == pytest.approx(0.008), "two chunks fit into no wait: every step is too often to be free"
    assert len(told) == 2
    assert len(caplog.messages) == 1, "once is enough for a log"


def test_a_job_is_told_it_in_its_log_and_in_the_status(runtime_dir: Path, tmp_path: Path) -> None:
    job = str(Path(__file__).with_name("drift_job.py"))
    words = ["2", str(tmp_path / "store"), str(tmp_path / "ckpt"), str(FIRST_STEPS + 6), "every"]
    logs, ranks = [tmp_path / f"log{rank}" for rank in range(2)], []
    for rank, path in enumerate(logs):
        with path.open("w") as log:
            command = [sys.executable, "-c", LOGGED, job, str(rank), *words]
            ranks.append(forked.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
    ends = [json.loads(rank.communicate(timeout=60)[0].splitlines()[-1]) for rank in ranks]
    for end, log in zip(ends, logs, strict=True):
        (line,) = [
            text
            for text in log.read_text().splitlines()
            if text.startswith("INFO:holdfast.checkpoint.pipeline.idle_report:waits: idle ")
        ]
        waits = end["waits"]
        assert waits["reason"] in line
        assert 0 < waits["idle_s"] < waits["period_s"]
        assert waits["copy_s"] > 0
        assert 0 <= waits["left_s"] <= waits["copy_s"]
