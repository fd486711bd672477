"""Two checkpointers of one script that come back to different steps: a warning names both, and no other pair gets one."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from kit.checkpointers import Make, Trainee
from sample_kit import MORE, sampled

SAID = "goes on at step"


def restored(make: Make, path: Path) -> tuple[Trainee, holdfast.Checkpointer, int]:
    trainee = Trainee()
    checkpointer = make(trainee, path=path)
    return trainee, checkpointer, checkpointer.restore()


@pytest.mark.parametrize("steps", [(3, 2), *(pytest.param(steps, marks=MORE) for steps in ((0, 2), (2, 2)))])
def test_two_that_go_on_at_different_steps_are_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: tuple[int, int]
) -> None:
    paths = [tmp_path / "generator", tmp_path / "critic"]
    for path, num_steps in zip(paths, steps, strict=True):
        trainee, checkpointer, _ = restored(make, path)
        for step in range(num_steps):
            trainee.train()
            checkpointer.step(step)
        checkpointer.close() if num_steps else checkpointer.abandon()
    assert SAID not in caplog.text
    assert tuple(restored(make, path)[2] for path in paths) == steps
    told = [record.getMessage().partition(" If ")[0] for record in caplog.records if SAID in record.getMessage()]
    expected = f"{paths[1]} goes on at step {steps[1]}, and {paths[0]} at step {steps[0]}."
    assert told == ([expected] if steps[0] != steps[1] else [])


def test_a_training_that_begins_behind_the_steps_of_another_one_is_not_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for num_steps in (1, 2):  # the second time, the first training goes on at 1 and the other one anew
        trainee, first, start = restored(make, tmp_path / "first")
        assert start == num_steps - 1
        trainee.train()
        first.step(start)
        _, second, start = restored(make, tmp_path / "second")
        assert start == 0
        second.abandon()
        first.close()
    assert SAID not in caplog.text


@pytest.mark.parametrize("is_first", sampled([True, False], True))
def test_a_teacher_that_is_not_trained_is_not_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    """It has no optimizer, and stays as it is."""
    trainee, checkpointer, _ = restored(make, tmp_path / "teacher")
    trainee.train()
    checkpointer.step(0)
    checkpointer.close()
    student = None if is_first else restored(make, tmp_path / "student")
    config = holdfast.Config(runtime_dir=str(checkpointer._config.runtime_dir), linger_s=1.0)
    teacher = holdfast.Checkpointer(tmp_path / "teacher", model=Trainee().model, config=config)
    assert teacher.restore(strict=False) == 1
    student = student or restored(make, tmp_path / "student")
    assert student[2] == 0
    teacher.abandon()
    assert SAID not in caplog.text
