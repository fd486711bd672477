"""The DCP door through the contract suite of doors: real ranks, kill -9, bit for bit, other layouts, errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forked
from holdfast.testing.contracts.door import CHECKS, Check, Door, Task, Workshop

WORKER = str(Path(__file__).with_name("dcp_worker.py"))


def starter(*flags: str) -> Callable[[Task], list[str]]:
    def start(task: Task) -> list[str]:
        launcher = "torch.distributed.run" if task.plain else "holdfast.train.elastic"
        command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(task.ranks)]
        changed = ["--wide"] if task.changed else []
        return [*command, WORKER, str(task.checkpoints), "--steps", str(task.steps), *flags, *changed]

    return start


# A state with a generator of each rank fits no other number of ranks, as DCP has it: a missing name is an error.
WRONG = "Size mismatch|size mismatch|MismatchError"
DOORS = {
    "fsdp": Door(starter(), refuses=WRONG),
    "ddp": Door(starter("--ddp"), twins=2, refuses=WRONG),
    "async": Door(starter("--stage"), behind=2, refuses=WRONG),
}


def popen(*args: object, **options: object) -> forked.Popen:
    return forked.Popen(*args, **options, warm_children=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=DOORS)
def workshop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Door, Workshop]]:
    with Workshop(tmp_path_factory.mktemp(request.param), popen=popen) as made:
        yield DOORS[request.param], made


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_killed_in_the_middle_and_back_bit_for_bit(tmp_path: Path) -> None:
    with Workshop(tmp_path, popen=popen) as made:
        door = Door(starter(), steps=6)
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](door, made)
