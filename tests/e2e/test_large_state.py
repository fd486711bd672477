"""2 GiB of state on one rank: two slots and a constant of extra memory, saved, stored and loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("large_worker.py")
MIB = 1 << 20
STATE_MIB = 2048
# At every moment. The keeper, its threads, a chunk or two, and the Python objects of both sides.
CONSTANT_MIB = 200


def run(root: Path) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(WORKER), str(root), str(STATE_MIB)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_gib_take_two_slots_and_a_constant(tmp_path: Path, runtime_dir: Path) -> None:
    first = run(tmp_path / "job")
    assert first["start"] == 0
    assert 2 * STATE_MIB * MIB <= first["extra_bytes"] <= (2 * STATE_MIB + CONSTANT_MIB) * MIB
    second = run(tmp_path / "job")  # the keeper ended with the job: this one loads from storage
    assert second["start"] == 3
    assert second["sums"] == first["expected"]
    assert second["extra_bytes"] <= (2 * STATE_MIB + CONSTANT_MIB) * MIB
