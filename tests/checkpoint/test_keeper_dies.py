"""The keeper of a node dies while its two ranks go back in the middle of training: both begin the restore anew, together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked

WORKER = str(Path(__file__).with_name("keeper_dies_worker.py"))
MOMENTS = ["KeeperClient.obtain", "KeeperLink.assembled", "Saver.reserve", "KeeperClient.resume"]


@pytest.mark.parametrize(
    "moment",
    [moment if not number else pytest.param(moment, marks=pytest.mark.slow) for number, moment in enumerate(MOMENTS)],
)
def test_both_ranks_find_what_was_captured(tmp_path: Path, runtime_dir: Path, moment: str) -> None:
    arguments = [str(tmp_path / "store"), str(tmp_path / "ckpt"), moment]
    ranks = [
        forked.Popen([sys.executable, WORKER, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [json.loads(rank.communicate(timeout=90)[0]) for rank in ranks] == [{"start": 2, "same": True}] * 2
