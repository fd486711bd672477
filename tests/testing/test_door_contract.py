"""The contract suite of doors finds what it is for: a fake door passes it, and each planted bug is found by its check."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.testing.contracts import adapter_processes
from holdfast.testing.contracts.adapter import CHECKS, Door, Task, Workshop, violations
from holdfast.testing.contracts.adapter_processes import Told
from sample_kit import MORE

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


@MORE
def test_a_door_that_does_what_it_must_passes(tmp_path: Path) -> None:
    with Workshop(tmp_path, timeout_s=60) as made:
        assert violations(fake(), made) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "check"), PLANTED.items(), ids=lambda text: text.replace(" ", "_"))
def test_every_planted_bug_is_found(bug: str, check: str, tmp_path: Path) -> None:
    with Workshop(tmp_path, timeout_s=60) as made:
        door = fake(bug)
        made.reference = made.run(fake(), Task(made.directory("sound"), door.ranks, door.steps, plain=True))
        if check == "the_same_script_runs_without_holdfast":
            made.reference = None
        with pytest.raises(AssertionError):
            CHECKS[check](door, made)


def test_the_kill_comes_when_all_ranks_have_finished_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence of the slowest proves the version before it; that of the quickest proves nothing."""
    told = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    text = "".join(f'door {{"rank": {rank}, "step": {step}, "digest": ""}}\n' for rank, step in told)
    killed: list[dict[tuple[int, int], str]] = []
    heard = Told()
    monkeypatch.setattr(adapter_processes, "kill_tree", lambda _: killed.append(dict(heard.steps)))
    process = SimpleNamespace(pid=0, stdout=io.StringIO(text))

    assert adapter_processes._listen(process, heard, {(0, 1), (1, 1)})

    assert [list(steps) for steps in killed] == [told[:5]]


def test_every_check_finds_a_planted_bug() -> None:
    assert set(PLANTED.values()) == set(CHECKS)
