"""DeepSpeed through the contract of doors: ZeRO 1, 2 and 3 of two ranks on CPU with the real package."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from doors_kit import SOURCE, starter
from holdfast.base.events import Events
from holdfast.testing.contracts.door import CHECKS, Door, Task, Workshop
from holdfast.tiers.storage import open_storage

WORKER = Path(__file__).with_name("deepspeed_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("deepspeed"), pytest.mark.timeout(900)]


def door(stage: int, *words: str) -> Door:
    return Door(
        starter(WORKER, "--stage", str(stage), *words, wide="--width 48"),
        steps=6,
        # Two moments and the master copy are each rank's own and outweigh the module, which both hold (stages 1 and 2).
        twins=1,
        refuses="size mismatch|[Ss]hape|does not fit|must match",
        root=lambda path: path / "holdfast",
        environment={**SOURCE, "DS_ACCELERATOR": "cpu"},
    )


@pytest.fixture(scope="module", params=[1, 2, 3], ids="zero{}".format)
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def workshop(stage: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    # The first run compiles DeepSpeed's communication operator.
    with Workshop(tmp_path_factory.mktemp(f"zero{stage}"), timeout_s=400.0) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check: object, stage: int, workshop: Workshop) -> None:
    check(door(stage), workshop)  # type: ignore[operator]


def test_what_only_memory_holds_comes_back_without_a_file_of_deepspeeds_own(stage: int, workshop: Workshop) -> None:
    """Killed before any of them was written, for all that the next run can see."""
    task = Task(workshop.directory("bare"), 2, 6)
    before = workshop.run(door(stage), task, kill_at=3)
    for tag in task.checkpoints.glob("global_step*"):
        shutil.rmtree(tag)
    (task.checkpoints / "latest").unlink(missing_ok=True)
    after = workshop.run(door(stage), task)
    assert set(after.starts.values()) <= {3, 4}
    whole = workshop.run(door(stage), Task(workshop.directory("undisturbed"), 2, 6))
    assert after.steps.items() <= whole.steps.items()
    assert before.steps.items() <= whole.steps.items()


def test_deepspeed_alone_loads_what_latest_names(stage: int, workshop: Workshop) -> None:
    """The same state of every rank, by DeepSpeed's own loader from its own files, without holdfast."""
    root = workshop.directory("native")
    ours = workshop.run(door(stage), Task(root, 2, 4))
    assert (root / "latest").read_text() == "global_step4"
    theirs = workshop.run(door(stage, "--native"), Task(root, 2, 4, plain=True))
    assert set(theirs.starts.values()) == {4}
    assert _states(theirs.output) == _states(ours.output) != {}


def _states(output: str) -> dict[str, str]:
    return dict(re.findall(r"state (\d+) ([0-9a-f]{16})", output))


def test_weights_that_all_ranks_hold_are_stored_once(stage: int, workshop: Workshop) -> None:
    root = workshop.directory("native") / "holdfast"
    if not root.is_dir():
        workshop.run(door(stage), Task(workshop.directory("native"), 2, 4))
    storage = open_storage(root, Events())
    manifest = storage.manifest(max(storage.versions()))
    shared = {bundle.file for bundle in manifest.bundles if bundle.ref.ranks == (0, 1)}
    assert bool(shared) == (stage < 3)
    for bundle in manifest.bundles:
        weights = [e for e in storage.image(manifest.version, bundle).entries if ".module." in e.name]
        assert stage == 3 or not weights or bundle.file in shared
