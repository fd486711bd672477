"""The DCP door through the contract suite of doors: real ranks, kill -9, bit for bit, other layouts, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from doors_kit import starter, warm, workshops
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop

WORKER = Path(__file__).with_name("dcp_worker.py")


def way(*words: str) -> Callable[[Task], list[str]]:
    return starter(WORKER, *words, launcher="holdfast.elastic.launch.run_command")


WRONG = "Size mismatch|size mismatch|MismatchError"
DOORS = {
    # A state with a generator of each rank fits no other number of ranks, as DCP has it: a missing name is an error.
    "fsdp": Door(way(), refuses=WRONG),
    "ddp": Door(way("--ddp"), twins=2, refuses=WRONG),
    "async": Door(way("--stage"), behind=2, refuses=WRONG),
    "resharded": Door(way("--no-random"), other_ranks=1, refuses=WRONG),
    "replicas": Door(way("--ddp", "--no-random"), twins=2, other_ranks=1, refuses=WRONG),
}
workshop = workshops(DOORS, popen=warm)

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)
