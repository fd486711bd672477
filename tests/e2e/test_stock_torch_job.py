"""A checkpoint of a real sharded job is read by stock PyTorch: every tensor entry, in a Python without holdfast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
from tiers.test_stock_torch import READER

WORKER = Path(__file__).with_name("stock_worker.py")


def test_stock_pytorch_reads_what_two_sharded_ranks_saved(tmp_path: Path, runtime_dir: Path) -> None:
    root, expected = tmp_path / "job", tmp_path / "expected.json"
    launcher = [sys.executable, "-m", "holdfast.train.elastic", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = forked.run(
        [*launcher, str(WORKER), str(root), str(expected)],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr

    versions = list(root.glob("i0*"))
    assert len(versions) == 1, f"{versions}\n{job.stderr}"
    (version,) = versions
    reader = [sys.executable, "-I", "-c", READER, str(version), str(expected)]
    stock = subprocess.run(reader, capture_output=True, text=True, check=False, timeout=120)
    assert stock.returncode == 0, stock.stderr
    facts = json.loads(stock.stdout)
    assert facts["wrong"] == []
    assert facts["count"] == 6 * 4  # six parameters with two moments and a step count each
