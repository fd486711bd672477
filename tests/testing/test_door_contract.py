"""The contract suite of doors finds what it is for: a fake door passes it, and each planted bug is found by its check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.testing.contracts.door import CHECKS, Door, Task, Workshop, violations

FAKE = Path(__file__).with_name("door_fake.py")

# Planted bug -> the check that finds it.
PLANTED = {
    "cannot be switched off": "the_same_script_runs_without_holdfast",
    "changes numbers": "holdfast_changes_no_number",
    "saves seldom": "killed_in_the_middle_it_goes_on_bit_for_bit",
    "starts afresh": "killed_in_the_middle_it_goes_on_bit_for_bit",
    "half a state": "with_all_memory_lost_it_goes_on_from_storage",
    "twins are not known": "twins_are_known",
    "another layout is loaded wrong": "another_number_of_ranks_goes_on",
    "takes any model": "another_model_is_refused_and_harms_nothing",
    "believes files": "a_damaged_version_is_never_trained_with",
}


def fake(bug: str = "") -> Door:
    def start(task: Task) -> list[str]:
        changed = ["--shape", "48"] if task.changed else []
        arguments = [str(task.checkpoints), "--ranks", str(task.ranks), "--steps", str(task.steps), "--bug", bug]
        return [sys.executable, str(FAKE), *arguments, *changed]

    return Door(start, ranks=2, twins=2, other_ranks=1, steps=8, behind=2)


def test_a_door_that_does_what_it_must_passes(tmp_path: Path) -> None:
    with Workshop(tmp_path, timeout_s=60) as workshop:
        assert violations(fake(), workshop) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "check"), PLANTED.items(), ids=lambda text: text.replace(" ", "_"))
def test_every_planted_bug_is_found(bug: str, check: str, tmp_path: Path) -> None:
    with Workshop(tmp_path, timeout_s=60) as workshop:
        door = fake(bug)
        workshop.reference = workshop.run(fake(), Task(workshop.directory("sound"), door.ranks, door.steps, plain=True))
        if check == "the_same_script_runs_without_holdfast":
            workshop.reference = None
        with pytest.raises(AssertionError):
            CHECKS[check](door, workshop)


def test_every_check_finds_a_planted_bug() -> None:
    assert set(PLANTED.values()) == set(CHECKS)
