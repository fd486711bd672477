"""The demo's judge: what it must find, and what it must not be fooled by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.testing.demo.cluster import DemoFailure, wait_until
from holdfast.testing.demo.facts import Facts, compare


def run(directory: Path, losses: list[tuple[int, float]], weight: np.ndarray) -> Facts:
    directory.mkdir()
    lines = [json.dumps({"event": "step", "time": float(n), "step": s, "loss": x}) for n, (s, x) in enumerate(losses)]
    (directory / "rank0.jsonl").write_text("".join(line + "\n" for line in lines))
    save_file({"parameter:w": weight}, directory / "final-rank0.safetensors")
    facts = Facts(directory, world_size=1)
    facts.refresh()
    return facts


WEIGHT = np.arange(6, dtype=np.float32)


def test_equal_runs_are_equal_also_when_steps_were_made_again(tmp_path: Path) -> None:
    reference = run(tmp_path / "a", [(0, 3.0), (1, 2.5)], WEIGHT)
    again = run(tmp_path / "b", [(0, 3.0), (1, 2.5), (1, 2.5)], WEIGHT)
    result = compare(again, reference)
    assert result.differences == ()
    assert (result.num_tensors, result.num_values, result.num_losses) == (1, 6, 3)


@pytest.mark.parametrize("losses", [[(0, 3.0)], [(0, 3.0), (1, 2.4999999999)], [(0, 3.0), (1, 2.0), (1, 2.5)]])
def test_a_missing_or_different_loss_is_found(tmp_path: Path, losses: list[tuple[int, float]]) -> None:
    reference = run(tmp_path / "a", [(0, 3.0), (1, 2.5)], WEIGHT)
    result = compare(run(tmp_path / "b", losses, WEIGHT), reference)
    assert len(result.differences) == 1
    assert "step 1" in result.differences[0]


def test_one_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    flipped = WEIGHT.copy()
    flipped.view(np.uint8)[5] ^= 1
    reference = run(tmp_path / "a", [(0, 3.0)], WEIGHT)
    assert compare(run(tmp_path / "b", [(0, 3.0)], flipped), reference).differences == ("parameter:w of rank 0",)


def test_a_zero_of_the_other_sign_is_not_equal(tmp_path: Path) -> None:
    reference = run(tmp_path / "a", [(0, 3.0)], np.array([0.0], dtype=np.float32))
    negative = run(tmp_path / "b", [(0, 3.0)], np.array([-0.0], dtype=np.float32))
    assert compare(negative, reference).differences


def test_missing_final_state_is_a_difference(tmp_path: Path) -> None:
    reference = run(tmp_path / "a", [(0, 3.0)], WEIGHT)
    dead = run(tmp_path / "b", [(0, 3.0)], WEIGHT)
    (tmp_path / "b" / "final-rank0.safetensors").unlink()
    assert compare(dead, reference).differences


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    facts = run(tmp_path / "a", [(0, 3.0)], WEIGHT)
    with (tmp_path / "a" / "rank0.jsonl").open("a") as file:
        file.write('{"event": "step", "time": 1.0, "st')
        file.flush()
        facts.refresh()
        assert facts.finished_step() == 0
        file.write('ep": 1, "loss": 2.0}\n')
    facts.refresh()
    assert facts.finished_step() == 1
    assert facts.finished_step(before=0.5) == 0


def test_a_recovery_counts_once_a_step_followed_the_last_restore(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text(
        '{"event": "restored", "time": 5.0, "start": 3}\n{"event": "restored", "time": 6.0, "start": 3}\n'
    )
    facts = Facts(tmp_path, world_size=1)
    facts.refresh()
    assert facts.recovery(0, after=4.0) is None
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"event": "step", "time": 7.0, "step": 3, "loss": 1.0}\n')
    facts.refresh()
    found = facts.recovery(0, after=4.0)
    assert found is not None
    assert (found[0]["time"], found[1]["step"]) == (6.0, 3)
    assert facts.recovery(0, after=6.5) is None


def told(directory: Path, *rows: tuple[str, float, int]) -> Facts:
    """Rank 0 told these: event, time, process or step."""
    lines = [
        {"event": event, "time": time, "pid" if event == "start" else "step": number, "loss": 0.0}
        for event, time, number in rows
    ]
    (directory / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = Facts(directory, world_size=1)
    facts.refresh()
    return facts


def test_who_kept_its_process_is_told_by_its_number(tmp_path: Path) -> None:
    """A script that is run again in the same process starts again, and has kept it."""
    assert told(tmp_path, ("start", 1.0, 7), ("start", 3.0, 7)).kept(2.0) == (0,)
    assert told(tmp_path, ("start", 1.0, 7), ("start", 3.0, 8)).kept(2.0) == ()
    assert told(tmp_path, ("start", 3.0, 8)).kept(2.0) == (), "it was not there"


def test_plain_torchrun_is_back_with_the_first_step_after_its_last_start(tmp_path: Path) -> None:
    facts = told(tmp_path, ("start", 1.0, 7), ("step", 2.0, 0), ("start", 4.0, 8), ("start", 5.0, 9), ("step", 6.5, 0))
    again = facts.restarted(0, after=3.0)
    assert again is not None
    assert again["time"] == 6.5
    assert facts.restarted(0, after=6.0) is None
    assert told(tmp_path, ("start", 1.0, 7), ("step", 2.0, 0), ("step", 4.0, 1)).restarted(0, after=3.0) is None


def test_waiting_has_a_deadline_and_says_for_what() -> None:
    with pytest.raises(DemoFailure, match="pigs fly"):
        wait_until(lambda: False, 0.05, "pigs fly")
