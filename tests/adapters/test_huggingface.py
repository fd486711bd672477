"""transformers.Trainer and Accelerate through the contract of doors, with the real packages, on two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.testing.contracts.door import CHECKS, Check, Door, Task, Workshop

WORKER = str(Path(__file__).with_name("hf_worker.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

pytestmark = [pytest.mark.slow, pytest.mark.rival("transformers"), pytest.mark.timeout(600)]


def starter(way: str) -> Callable[[Task], list[str]]:
    def start(task: Task) -> list[str]:
        script = [WORKER, str(task.checkpoints), "--steps", str(task.steps), "--way", way]
        return [*TORCHRUN, "--nproc-per-node", str(task.ranks), *script, *(["--wide"] if task.changed else [])]

    return start


DOORS = {
    "trainer": Door(starter("trainer"), twins=2),
    "accelerate": Door(starter("accelerate"), twins=2, other_ranks=1),
    "fsdp": Door(starter("fsdp"), twins=1, other_ranks=1),
}


@pytest.fixture(scope="module", params=DOORS)
def workshop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Door, Workshop]]:
    with Workshop(tmp_path_factory.mktemp(request.param)) as made:
        yield DOORS[request.param], made


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_a_trainer_that_knows_nothing_of_holdfast_is_kept(tmp_path: Path) -> None:
    script = str(Path(WORKER).with_name("hf_zero_script.py"))

    def start(task: Task) -> list[str]:
        ranks = ["--standalone", "--nproc-per-node", str(task.ranks), script, "--steps", str(task.steps)]
        if task.plain:
            return [sys.executable, "-m", "torch.distributed.run", *ranks]
        return [sys.executable, "-m", "holdfast.adapters.run", "--checkpoint-dir", str(task.checkpoints), *ranks]

    with Workshop(tmp_path) as made:
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](Door(start, steps=6), made)
