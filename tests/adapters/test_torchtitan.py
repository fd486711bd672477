"""TorchTitan's Trainer with FSDP2, tensor parallel and replicas through the contract of doors, on two ranks."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from doors_kit import HOLDFAST_RUN, SOURCE, TORCHRUN, starter, workshops
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop
from holdfast.tiers.storage.version_store import open_storage

WORKER = Path(__file__).with_name("torchtitan_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("torchtitan"), pytest.mark.timeout(600)]


def door(way: str, twins: int, *words: str, launcher: str = TORCHRUN) -> Door:
    return Door(
        starter(WORKER, "--way", way, *words, launcher=launcher),
        steps=6,
        twins=twins,
        root=lambda path: path / "holdfast",
        environment=SOURCE,
    )


WAYS = {"fsdp": ("fsdp", 1), "tp": ("tp", 1), "replicated": ("ddp", 2)}
DOORS = {name: door(*way) for name, way in WAYS.items()}
workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_of_two_ranks_one_is_killed(way: tuple[str, int], tmp_path: Path) -> None:
    """Between two batches of a step, where the other waits to save, or behind its save; the launcher starts both again."""
    accumulating = ("--accumulate", "2")
    with Workshop(tmp_path, timeout_s=150.0) as made:
        whole = made.run(door(*way, *accumulating), Task(made.directory("whole"), 2, 6))
        for moment, starts in {"batch": {3}, "save": {3}, "saved": {3, 4}}.items():
            root = made.directory(moment)
            dying = door(*way, *accumulating, "--kill", "3", "--moment", moment, launcher=HOLDFAST_RUN)
            told = made.run(dying, Task(root, 2, 6))
            assert (root / "killed").exists(), moment
            assert set(told.starts.values()) <= starts, moment
            # Where the restart begins behind the step of the kill, the killed rank has told of it to nobody.
            untold = {place for place in whole.steps if place[1] == 3 and told.starts[place[0]] == 4}
            assert told.steps.items() <= whole.steps.items(), moment
            assert whole.steps.keys() - told.steps.keys() <= untold, moment
            assert told.wholes[6] == whole.wholes[6], moment


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ranks_that_get_sigterm_stop_behind_one_step_that_is_saved(way: tuple[str, int], tmp_path: Path) -> None:
    """Between two batches, around a save, or by way of the launcher: code 0, and the next launch loses no step."""
    accumulating = ("--accumulate", "2")
    with Workshop(tmp_path, timeout_s=150.0) as made:
        whole = made.run(door(*way, *accumulating), Task(made.directory("whole"), 2, 8))
        for whom, moment in {"one": "batch", "all": "save", "job": "saved"}.items():
            root = made.directory(whom)
            struck = door(*way, *accumulating, "--kill", "3", "--moment", moment, "--term", whom, launcher=HOLDFAST_RUN)
            first = made.run(struck, Task(root, 2, 8))
            assert (root / "killed").exists(), whom
            told = made.run(door(*way, *accumulating, launcher=HOLDFAST_RUN), Task(root, 2, 8))
            (start,) = set(told.starts.values())
            assert 4 <= start <= 7, whom  # the ranks agree on a step that none has passed
            assert {step for _, step in told.steps} == set(range(start, 8)), whom
            # A rank may end in the call that reports the last step, before it tells us.
            untold = {(rank, start - 1) for rank in (0, 1)}
            assert whole.steps.keys() - first.steps.keys() - told.steps.keys() <= untold, whom
            assert {**first.steps, **told.steps}.items() <= whole.steps.items(), whom
            assert told.wholes[8] == whole.wholes[8], whom


def steps(made: Workshop, number: int, *words: str) -> set[int]:
    """Runs to that step; where the ranks began."""
    way = Door(starter(WORKER, "--way", "fsdp", "--keep", "2", *words), environment=SOURCE)
    return set(made.run(way, Task(made.directory("steps"), 2, number)).starts.values())


def test_what_torchtitan_is_told_of_steps_keeps_its_meaning(tmp_path: Path) -> None:
    """Every second step to storage, two of them kept; a step that is named is gone on from, though it is not the newest."""
    with Workshop(tmp_path) as made:
        assert steps(made, 6, "--interval", "2") == {0}
        storage = open_storage(made.directory("steps") / "holdfast", Events())
        assert [version.step for version in storage.versions()] == [3, 5]
        assert steps(made, 5, "--load-step", "4") == {4}


def test_a_run_that_goes_back_to_a_step_does_so_once(tmp_path: Path) -> None:
    """Killed and started again by the launcher, it keeps what it made since; a new launch of the same recipe goes back again."""
    with Workshop(tmp_path) as made:
        root = made.directory("steps")
        assert steps(made, 4, "--interval", "2") == {0}
        back = ("--way", "fsdp", "--keep", "9", "--load-step", "2")
        dying = Door(starter(WORKER, *back, "--kill", "4", launcher=HOLDFAST_RUN), environment=SOURCE)
        told = made.run(dying, Task(root, 2, 6))
        assert (root / "killed").exists()
        assert set(told.starts.values()) == {4}
        again = Door(starter(WORKER, *back, launcher=HOLDFAST_RUN), environment=SOURCE)
        assert set(made.run(again, Task(root, 2, 6)).starts.values()) == {2}


def test_a_checkpoint_of_torchtitans_own_counts_if_it_is_of_a_later_step(tmp_path: Path) -> None:
    with Workshop(tmp_path) as made:
        assert steps(made, 4, "--plain", "--interval", "2") == {0}
        shutil.rmtree(made.directory("steps") / "step-4")
        assert steps(made, 3) == {2}, "nothing of holdfast's yet"
        assert steps(made, 4) == {3}, "holdfast has step 3, TorchTitan step 2"


@pytest.mark.filterwarnings("ignore")  # what TorchTitan does when it is imported
def test_what_would_not_go_on_where_training_was_is_refused() -> None:
    torchtitan = importlib.import_module("holdfast.adapters.torchtitan")
    with pytest.raises(UsageError, match="leaves out the optimizer"):
        torchtitan.keep(torchtitan.CheckpointManager.Config(enable=True, exclude_from_loading=["optimizer"]))
    with pytest.raises(UsageError, match=r"is no CheckpointManager\.Config"):
        torchtitan.keep(object())
    with pytest.raises(UsageError, match=r"'evry'.*has no state"):
        torchtitan.keep(torchtitan.CheckpointManager.Config(enable=True), evry=3)
