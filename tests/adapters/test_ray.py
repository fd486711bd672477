"""Ray Train through the contract of doors, with the real package: a local cluster, two workers, DDP."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doors_kit import SOURCE, workshops
from holdfast.base.errors import LevelNotReached
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop
from holdfast.testing.contracts.adapter_processes import Told
from holdfast.tiers.storage.version_store import open_storage

WORKER = str(Path(__file__).with_name("ray_worker.py"))

pytestmark = [pytest.mark.slow, pytest.mark.rival("ray"), pytest.mark.timeout(1500)]


def door(*words: str, steps: int = 8) -> Door:
    def start(task: Task) -> list[str]:
        wide = ["--wide"] if task.changed else []
        script = [
            WORKER,
            str(task.checkpoints),
            "--steps",
            str(task.steps),
            "--workers",
            str(task.ranks),
            *words,
            *wide,
        ]
        return [sys.executable, "-W", "ignore", *script]

    environment = {**SOURCE, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    root = lambda path: path / "run" / "holdfast"  # noqa: E731
    return Door(start, steps=steps, twins=2, other_ranks=1, root=root, environment=environment)


DOORS = {"ddp": door()}
workshop = workshops(DOORS, timeout_s=400.0)  # on a busy machine Ray alone takes minutes to start its workers


@pytest.fixture(scope="module")
def undisturbed(workshop: tuple[Door, Workshop]) -> Told:
    return workshop[1].run(door(), Task(workshop[1].directory("whole"), 2, 8))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_restarted_ray_workers_resume_exactly_and_report_durable_versions(
    workshop: tuple[Door, Workshop], undisturbed: Told
) -> None:
    """Worker 1 kills itself with SIGKILL in the middle; Ray makes a new worker group in the same run."""
    _, made = workshop
    killed = made.run(door("--kill", "4", "--durable-every", "2"), Task(made.directory("worker"), 2, 8))
    assert killed.steps == undisturbed.steps
    assert set(killed.starts.values()) == {5}  # of the second group
    root = made.directory("worker") / "run" / "holdfast"
    durable = {str(version) for version in open_storage(root, Events()).versions()}
    pointer = json.loads(re.findall(r"^pointer (.*)$", killed.output, re.MULTILINE)[-1])
    assert pointer == {"path": str(root), "version": max(durable), "step": 7}


@pytest.mark.parametrize("whom", ["one", "all"])
def test_workers_that_get_sigterm_are_started_again_and_end_undisturbed(
    workshop: tuple[Door, Workshop], undisturbed: Told, whom: str
) -> None:
    """Ray ends a worker at SIGTERM, whatever it does, and starts the group again; no step is lost."""
    _, made = workshop
    root = made.directory(f"term, {whom}")
    told = made.run(door("--kill", "4", "--term", whom), Task(root, 2, 8))
    assert (root / "killed1").exists()
    assert set(told.starts.values()) == {5}
    assert told.steps == undisturbed.steps
    assert told.wholes[8] == undisturbed.wholes[8]


def test_a_driver_that_gets_sigterm_loses_no_step(workshop: tuple[Door, Workshop], undisturbed: Told) -> None:
    """It ends its workers before they could save; the next one finds what the keepers have."""
    _, made = workshop
    root = made.directory("term, driver")
    first = made.run(door("--kill", "4", "--term", "driver"), Task(root, 2, 8), fails=True)
    assert (root / "killed0").exists()
    assert max(step for _, step in first.steps) == 4
    told = made.run(door(), Task(root, 2, 8))
    assert set(told.starts.values()) == {5}
    assert {**first.steps, **told.steps} == undisturbed.steps
    assert told.wholes[8] == undisturbed.wholes[8]


def test_a_preemption_that_ray_announces_makes_the_next_step_durable(workshop: tuple[Door, Workshop]) -> None:
    """The node is really being drained; without the notice nothing would be durable but the last step, one later."""
    _, made = workshop
    drained = door("--drain", "2", "--durable-every", "100000")
    told = made.run(drained, Task(made.directory("drained"), 2, 4))
    noticed = [
        int(step) for step in re.findall(r"Ray takes a node away .*: step (\d+) is saved to storage", told.output)
    ]
    assert noticed
    versions = open_storage(drained.root(made.directory("drained")), Events()).versions()
    assert min(noticed) in {version.step for version in versions}


@pytest.mark.filterwarnings("ignore")  # what Ray does when it is imported
def test_a_report_uploads_nothing_and_names_what_is_durable_on_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cluster: what Ray's own `report` is called with."""
    train, door_of_ray = importlib.import_module("ray.train"), importlib.import_module("holdfast.adapters.ray")
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(train, "report", lambda metrics, **options: told.append({"metrics": metrics, **options}))
    made = object.__new__(door_of_ray.RayCheckpointer)
    made._place, made._files = str(tmp_path), importlib.import_module("pyarrow.fs").LocalFileSystem()
    made._root, made._newest, made._told, made._lock = "/ckpts/run1", None, None, threading.Lock()
    made._reported = None

    def report(rank: int) -> Any:
        monkeypatch.setattr(train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: rank))
        made._report({"loss": 0.5})
        assert told[-1]["metrics"] == {"loss": 0.5}
        assert told[-1]["checkpoint_upload_mode"] is train.CheckpointUploadMode.NO_UPLOAD
        return told[-1]["checkpoint"]

    assert report(0) is None
    made._is_durable(Version(1, 3), None)
    made._is_durable(Version(1, 5), LevelNotReached("it is not durable"))
    made._is_durable(Version(1, 1), None)  # told late
    pointer = report(0)
    assert json.loads((Path(pointer.path) / "holdfast.json").read_text()) == {
        "path": "/ckpts/run1",
        "version": str(Version(1, 3)),
    }
    assert Path(pointer.path).parent == tmp_path
    assert report(1) is None
