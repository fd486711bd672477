"""Scripts that ask `torch.accelerator` for what there is find the simulated device, and need no change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.device
SCRIPT = Path(__file__).with_name("accelerator_example.py")


def test_script_that_knows_nothing_of_it_trains_on_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.testing.device"]
    folder = forked.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.strip()
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            SCRIPT,
            tmp_path / "said",
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [(tmp_path / f"said.{rank}").read_text() for rank in range(2)] == ["sim True True"] * 2
