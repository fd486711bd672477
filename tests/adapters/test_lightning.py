"""Lightning with DDP and with FSDP2 (ModelParallelStrategy) through the contract of doors, with the real package, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from doors_kit import starter, untouched, workshops
from holdfast.testing.contracts.door import CHECKS, Check, Door, Task, Workshop

WORKER = Path(__file__).with_name("lightning_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("lightning"), pytest.mark.timeout(600)]


# Batches of the worker's data.
EPOCH = 7
DOORS = {
    "ddp": Door(starter(WORKER, "--way", "ddp"), twins=2),
    "fsdp": Door(starter(WORKER, "--way", "fsdp"), twins=1),
}


workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_from_the_end_of_an_epoch_the_next_one_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    """The version is exactly between two epochs: shuffling and dropout of the next draw the same numbers."""
    with Workshop(tmp_path) as made:
        undisturbed = made.run(DOORS["ddp"], Task(made.directory("whole"), 2, 2 * EPOCH, plain=True))
        made.run(DOORS["ddp"], Task(made.directory("broken"), 2, EPOCH))
        after = made.run(DOORS["ddp"], Task(made.directory("broken"), 2, 2 * EPOCH))
    assert set(after.starts.values()) == {EPOCH}
    assert after.steps == {place: told for place, told in undisturbed.steps.items() if place[1] >= EPOCH}


def test_a_trainer_that_knows_nothing_of_holdfast_is_kept(tmp_path: Path) -> None:
    door = Door(untouched(WORKER.with_name("lightning_zero_script.py")), steps=6)
    with Workshop(tmp_path) as made:
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](door, made)
