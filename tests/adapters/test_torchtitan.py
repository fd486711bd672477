"""TorchTitan's Trainer with FSDP2, tensor parallel and replicas through the contract of doors, on two ranks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from doors_kit import SOURCE, starter, workshops
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.testing.contracts.door import CHECKS, Check, Door, Task, Workshop
from holdfast.tiers.storage import open_storage

WORKER = Path(__file__).with_name("torchtitan_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("torchtitan"), pytest.mark.timeout(600)]


def door(way: str, twins: int) -> Door:
    return Door(
        starter(WORKER, "--way", way), steps=6, twins=twins, root=lambda path: path / "holdfast", environment=SOURCE
    )


DOORS = {"fsdp": door("fsdp", 1), "tp": door("tp", 1), "replicated": door("ddp", 2)}
workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_what_torchtitan_is_told_of_steps_keeps_its_meaning(tmp_path: Path) -> None:
    """Every second step to storage, two of them kept; a step that is named; a newer checkpoint of TorchTitan's own counts."""

    def run(steps: int, *words: str) -> set[int]:
        way = Door(starter(WORKER, "--way", "fsdp", "--keep", "2", *words), environment=SOURCE)
        return set(made.run(way, Task(root, 2, steps)).starts.values())

    with Workshop(tmp_path) as made:
        root = made.directory("steps")
        assert run(6, "--interval", "2") == {0}
        stored = [version.step for version in open_storage(root / "holdfast", Events()).versions()]
        assert stored == [3, 5]
        made.forget_memory()
        assert run(5, "--load-step", "4") == {4}
        assert run(8, "--plain", "--interval", "8", "--load-step", "-1") == {0}, "TorchTitan sees no files of its own"
        assert run(9) == {8}, "which is newer than step 5 of holdfast's"


def test_what_would_not_go_on_where_training_was_is_refused() -> None:
    torchtitan = importlib.import_module("holdfast.adapters.torchtitan")
    with pytest.raises(UsageError, match="leaves out the optimizer"):
        torchtitan.keep(torchtitan.CheckpointManager.Config(enable=True, exclude_from_loading=["optimizer"]))
    with pytest.raises(UsageError, match=r"is no CheckpointManager\.Config"):
        torchtitan.keep(object())
