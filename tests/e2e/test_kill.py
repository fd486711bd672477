"""SIGKILL to the trainer the moment `save` returned: nothing is lost, nothing is read from storage, no bit differs."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import forked
from e2e import kill_worker

WORKER = Path(__file__).with_name("kill_worker.py")


def run(part: str, root: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and facts of one trainer."""
    result = forked.run(
        [sys.executable, str(WORKER), part, str(root)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def test_killed_right_after_save_comes_back_from_memory_bit_for_bit(tmp_path: Path, runtime_dir: Path) -> None:
    job = kill_worker.Job()
    reference = [job.train() for _ in range(kill_worker.LAST_STEP + 1)]

    code, before = run("save", tmp_path / "job")
    assert code == -signal.SIGKILL
    assert before["trained"] == reference[: kill_worker.SAVED_STEP + 1]
    assert not list((tmp_path / "job").glob("i0*/manifest.json")), "nothing was durable"

    code, after = run("resume", tmp_path / "job")
    assert code == 0
    assert after["start"] == kill_worker.SAVED_STEP + 1
    assert after["trained"] == reference[kill_worker.SAVED_STEP + 1 :]
    assert set(after["bytes"]) == {"slot"}
    for counters in (after["counters"], after["keeper_counters"]):
        assert counters.get("storage_read_bytes", 0) == 0
    assert list((tmp_path / "job").glob(f"i000002-s{kill_worker.LAST_STEP:010d}/manifest.json"))
