"""Pipelines that are killed, hang and change: what comes back, bit for bit, and what a change may cost.

Every rank tells the digest of model and optimizer after every step; `Lives` holds what is restored, and every step that is
made again, against an undisturbed run.
"""

from __future__ import annotations

import statistics
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lives_kit import Lives, Row

JOB = Path(__file__).with_name("pipeline_job.py")
DRIFT = Path(__file__).with_name("drift_job.py")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
STEPS = 14


def killed_and_restored(tmp_path: Path, *words: object, ranks: int = 2) -> list[Row]:
    """Ends of an undisturbed run; the same job, killed within its tenth step, must go on as that one did."""
    with Lives(tmp_path / "straight", JOB, STEPS, *words, ranks=ranks) as straight:
        ends = [rows[-1] for rows in straight.live()]
    with Lives(tmp_path / "killed", JOB, STEPS, *words, ranks=ranks, known=straight.known) as killed:
        killed.live(until=lambda row: row.get("step") == 9, victim=1, later=lambda step_s: step_s / 2)
        back = killed.live()
    (lost,) = killed.lost
    assert lost <= 2, "the version of the last step may be on its way, and ranks are a step apart"
    assert {rows[-2]["step"] for rows in back} == {STEPS - 1}
    assert [rows[-1]["last_loss"] for rows in back] == [end["last_loss"] for end in ends]
    assert all("storage" not in rows[-1]["sources"] for rows in back)
    return ends


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Interleaved1F1B")) for name in SCHEDULES]
)
def test_a_pipeline_killed_in_the_middle_goes_on_bit_for_bit(runtime_dir: Path, tmp_path: Path, name: str) -> None:
    for end in killed_and_restored(tmp_path, name):
        assert end["saved"] == list(range(STEPS)), "every step was saved"
        assert end["late"] > 0, "after three proofs the copies go on behind the call"
        assert end["copy"] > 0
        print(
            f"\n{name}: {end['stalled'] / end['seconds']:.1%} of {end['seconds']:.2f} s, {end['inside']:.4f} of {end['copy']:.4f} s"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inside"), [("1F1B", "fsdp"), ("1F1B", "tp"), ("Interleaved1F1B", "fsdp")])
def test_stages_that_several_ranks_divide_are_copied_in_their_waits_and_go_on_bit_for_bit(
    runtime_dir: Path, tmp_path: Path, name: str, inside: str
) -> None:
    for end in killed_and_restored(tmp_path, name, inside, ranks=4):
        assert end["late"] > 0
        assert end["inside"] >= 0.5 * end["copy"] > 0


def test_the_last(tmp_path: Path) -> None:
    pass


@pytest.mark.slow
def test_a_kill_in_every_phase_of_a_pipeline_that_changes_costs_two_steps_at_most_and_no_bit(
    runtime_dir: Path, tmp_path: Path
) -> None:
    """A stage three times as slow; its peer that hangs in a wait; all waits cut to a third."""
    with Lives(tmp_path / "straight", DRIFT, 48, "none") as straight:
        straight.live()
    with Lives(tmp_path / "killed", DRIFT, 48, "every", known=straight.known) as killed:
        killed.live(until=lambda row: row.get("step") == 29, victim=1, later=lambda step_s: step_s / 2)
        killed.live(until=lambda row: "hangs" in row, victim=1, later=lambda _: 1.2)
        killed.live(until=lambda row: row.get("step") == 42, victim=0, later=lambda step_s: step_s / 2)
        ends = [rows[-1] for rows in killed.live()]
    assert len(killed.lost) == 3
    assert max(killed.lost) <= 2
    assert not any(end["given_up"] for end in ends)
