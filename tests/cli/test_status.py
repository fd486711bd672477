"""`holdfast status` beside a real trainer and its keeper."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
from cli.conftest import Run
from holdfast.cli.status import _lines
from keeper.rig import eventually

TRAINER = """
import sys
import torch
import holdfast
model = torch.nn.Linear(8, 8)
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, every=1, durable_every=0)
checkpointer.restore()
for step in range(3):
    checkpointer.save(step).wait("captured", 60)
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
    nobody = {"keepers": [], "durable_only": []}  # once the keeper has seen its only rank leave, and has ended
    eventually(lambda: json.loads(holdfast("status", "--json").stdout) == nobody)
    assert json.loads(holdfast("ls", root, "--json").stdout)["versions"][-1]["step"] == 2


def slot(number: int, version: str | None, **more: Any) -> dict[str, Any]:
    return {"slot": number, "version": version, "state": "sealed", "sealed_bytes": 1 << 20, "bytes": 2 << 20, **more}


WAITS = {
    "idle_s": 0.031,
    "period_s": 0.12,
    "copy_s": 0.004,
    "left_s": 0.0,
    "reason": "idle 31.0 ms of a step of 120.0 ms",
}
FACTS: dict[str, Any] = {
    "pid": 7, "uptime_s": 61.2, "resident_bytes": 30 << 20, "memory": {"used_bytes": 6 << 20, "allowed_bytes": 1 << 30},
    "preloaded": {"version": None}, "root": "/ck/run1", "incarnation": 3, "nodes": ["a", "b"], "resumed_from": "v1",
    "newest": {"captured": "v9", "replicated": "v8", "durable": None},
    "replication": {"behind_versions": 1, "lag_s": 2.25}, "counters": {"takeovers": 2.0},
    "run": {
        "goodput": 0.953, "wall_s": 1000.0, "incidents": 2, "recovery_s": {"T0": 1.5, "T3": 0.5},
        "watchdog": "careful", "reports": ["rank 3 is stuck: left alone"],
    },
    "ranks": {
        "0": {"pid": 8, "finished": False, "cadence": "every 3 steps", "restored": None, "slots": [slot(1, "v9")], "waits": WAITS},
        "1": {"pid": None, "finished": False, "cadence": "", "slots": [], "waits": None, "restored": {"version": "v1", "bytes": {"peer": 5 << 20}}},
    },
    "replicas": [slot(2, "v8", rank=5), slot(3, "v9", rank=4)],
    "activities": [],
    "suspects": {"v7": "rank 1 differs from ranks 0 and 2 in weight"},
    "alarms": [{"text": "storage is unserviceable", "age_s": 12.4}],
}  # fmt: skip


def test_a_person_is_told_what_is_safe_what_is_behind_and_what_is_wrong() -> None:
    lines = list(_lines(FACTS))
    for line in (
        "memory    6.0 MiB of 1.0 GiB allowed",
        "root      /ck/run1",
        "job       incarnation 3 on 2 nodes, resumed from v1",
        "safe      captured v9, replicated v8, durable none since it began",
        "lag       1 captured and not in two nodes yet, the oldest for 2.2 s",
        "takeovers 2: this node wrote what others should have written",
        "goodput   95.3 % of 1000 s, 2 incidents (2.0 s to come back)",
        "watchdog  careful",
        "watchdog  rank 3 is stuck: left alone",
        "cadence   every 3 steps",
        "backup    of ranks 4, 5",
        "rank 0    process 8; slot 1 v9 sealed, 1.0 MiB of 2.0 MiB",
        "          waits: idle 31.0 ms of a step of 120.0 ms",
        "rank 1    away; ",
        "          came back from v1: 5.0 MiB from peer",
        "replica   of rank 5: slot 2 v8 sealed, 1.0 MiB of 2.0 MiB",
        "SUSPECT   v7: rank 1 differs from ranks 0 and 2 in weight",
        "ALARM     storage is unserviceable (12 s ago)",
    ):
        assert line in lines
    sound = FACTS | {"replication": {"behind_versions": 0}, "counters": {}, "run": None, "replicas": []}
    words = {line.split()[0] for line in _lines(sound)}
    assert not words & {"lag", "takeovers", "goodput", "backup"}
    alone = FACTS | {"nodes": ["a"]}
    assert not [line for line in _lines(alone) if line.startswith("lag")], "one node has no second one to be behind"


def test_parity_is_told_apart_from_replicas() -> None:
    kept = FACTS | {"replicas": [slot(2, "v8", rank=-1)], "parity": {"members": 4}}
    lines = list(_lines(kept))
    assert [line for line in lines if line.startswith("parity    of 3 nodes: ")]
    assert not [line for line in lines if line.startswith(("replica", "backup"))]


def test_who_watches_through_a_pipe_sees_each_look_and_ends_it_when_he_likes(runtime_dir: Path) -> None:
    code = "import sys; from holdfast.cli.cli import app; app(['status', '--watch', '0.1', '--json'])"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell in the background ignore it
    try:
        watching = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with watching:
        assert watching.stdout is not None
        for _ in range(3):
            assert json.loads(watching.stdout.readline()) == {"keepers": [], "durable_only": []}
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
    assert watching.returncode == 0
