"""`holdfast status` beside a real trainer and its keeper."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
from tools.conftest import Run

TRAINER = """
import sys
import torch
import holdfast
model = torch.nn.Linear(8, 8)
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, every=1, durable_every=0)
checkpointer.restore()
for step in range(3):
    checkpointer.save(step).wait("captured", 30)
print("ready", flush=True)
sys.stdin.readline()
checkpointer.close()
"""


def test_status_shows_what_is_safe(holdfast: Run, tmp_path: Path, runtime_dir: Path) -> None:
    root = tmp_path / "checkpoints"
    trainer = forked.Popen(
        [sys.executable, "-c", TRAINER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        assert trainer.stdout.readline() == "ready\n"
        (keeper,) = json.loads(holdfast("status", "--json").stdout)["keepers"]
        text = holdfast("status")
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.communicate()
    assert keeper["alive"] is True
    assert keeper["status"]["root"] == str(root)
    assert keeper["status"]["newest"]["captured"] == "i000001-s0000000002"
    assert text.returncode == 0
    assert "captured i000001-s0000000002" in text.stdout
    assert "rank 0" in text.stdout
    assert json.loads(holdfast("status", "--json").stdout) == {"keepers": [], "durable_only": []}
    assert json.loads(holdfast("ls", root, "--json").stdout)["versions"][-1]["step"] == 2
