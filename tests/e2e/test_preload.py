"""Loading while the job still starts: `holdfast run` tells the keeper, and a restore finds everything in memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import forked
from keepers_kit import end_keepers

WORKER = Path(__file__).with_name("preload_worker.py")


@pytest.mark.slow
def test_a_job_that_starts_again_finds_its_state_in_memory_before_it_asks(tmp_path: Path, runtime_dir: Path) -> None:
    root = tmp_path / "ck"
    command = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node=2"]
    command += [f"--checkpoint-dir={root}", str(WORKER), str(root), str(tmp_path)]
    for _ in range(2):
        done = forked.run(command, capture_output=True, text=True, timeout=90, warm_children=True)
        assert done.returncode == 0, done.stderr
        end_keepers(runtime_dir)  # nothing is in memory when it starts again

    first, *again = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0-0", "1-0", "1-1")]
    assert first["preloaded"] == {}
    size = sum(path.stat().st_size for path in root.glob("i000001-*/*.safetensors"))
    for facts in again:
        assert facts["weight"] == first["weight"]
        assert facts["preloaded"] == {"storage": size}
        assert facts["read_before"] == facts["read_after"] >= size
        assert set(facts["bytes"]) == {"preloaded"}
        assert "fetched them while the trainers started" in facts["why"]
