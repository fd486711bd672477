"""transformers.Trainer and Accelerate through the contract of doors, with the real packages, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from doors_kit import SOURCE, folds_end_as_in_plain_python, launching, starter, untouched, workshops
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop

WORKER = Path(__file__).with_name("hf_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("transformers"), pytest.mark.timeout(600)]


DOORS = {
    "trainer": Door(starter(WORKER, "--way", "trainer"), twins=2),
    "accelerate": Door(starter(WORKER, "--way", "accelerate"), twins=2, other_ranks=1),
    "fsdp": Door(starter(WORKER, "--way", "fsdp"), twins=1, other_ranks=1),
}


workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_a_path_that_is_given_is_that_path_and_the_trainers_own_saves_go_on(tmp_path: Path) -> None:
    """holdfast has step 3 then; the new lineage is what the next run goes on with."""
    own = tmp_path / "own"
    saving = Door(starter(WORKER, "--way", "trainer", "--own", str(own)))
    told = Door(starter(WORKER, "--way", "trainer", "--resume", str(own / "checkpoint-2")))
    with Workshop(tmp_path) as made:
        task = made.directory("both")
        first = made.run(saving, Task(task, 2, 4))
        assert {path.name for path in own.iterdir()} == {"checkpoint-2", "checkpoint-4"}
        again = made.run(told, Task(task, 2, 5))
        assert set(again.starts.values()) == {2}
        assert sorted(again.steps) == [(rank, step) for rank in (0, 1) for step in (2, 3, 4)]
        assert {place: digest for place, digest in again.steps.items() if place[1] < 4}.items() <= first.steps.items()
        last = made.run(DOORS["trainer"], Task(task, 2, 6))
        assert set(last.starts.values()) == {5}


def test_a_trainer_that_knows_nothing_of_holdfast_is_kept(tmp_path: Path) -> None:
    door = Door(untouched(WORKER.with_name("hf_zero_script.py")), steps=6)
    with Workshop(tmp_path) as made:
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](door, made)


def test_folds_that_know_nothing_of_holdfast_each_train(tmp_path: Path) -> None:
    folds_end_as_in_plain_python(WORKER.with_name("hf_folds.py"), tmp_path)


@pytest.mark.parametrize(
    ("words", "is_stopped"),
    [(("trainer",), False), (("accelerate",), True), (("accelerate", "find"), False)],
    ids=["trainer", "accelerate", "accelerate, told"],
)
def test_one_process_is_ddp_under_the_launcher_and_may_stop_at_what_a_step_does_not_use(
    tmp_path: Path, words: tuple[str, ...], is_stopped: bool
) -> None:
    """In plain python it is no DDP. Where it trains, it does so with the same numbers."""
    script, told = str(WORKER.with_name("hf_unused.py")), []
    environment = {**os.environ, **SOURCE, "OMP_NUM_THREADS": "1", "HOLDFAST_RUNTIME_DIR": str(tmp_path / "rt")}
    for number, start in enumerate(([sys.executable], [*launching(1), "--max-restarts", "0"])):
        facts = tmp_path / str(number)
        done = subprocess.run(
            [*start, script, str(facts), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        if number and is_stopped:
            assert done.returncode != 0
            assert "parameters that were not used in producing loss" in done.stderr
            return
        assert done.returncode == 0, done.stderr
        told.append(json.loads(facts.read_text()))
    assert [each["kind"] for each in told] == ["Halves", "DistributedDataParallel"]
    assert told[0]["weights"] == told[1]["weights"]
