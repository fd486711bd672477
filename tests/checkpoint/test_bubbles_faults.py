"""Pipelines that are killed, hang and change: what comes back, bit for bit, and what a change may cost.

Every rank tells the digest of model and optimizer after every step; `Lives` holds what is restored, and every step that is
made again, against an undisturbed run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from kit.schedules import NO_V, V_SHAPED, WHY_NO_V
from lives_kit import Lives, Row
from sample_kit import MORE

JOB = Path(__file__).with_name("pipeline_job.py")
DRIFT = Path(__file__).with_name("drift_job.py")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
STEPS = 14
HANG_S = 1.5  # of drift_job
Span = tuple[str, float, float]


def killed_and_restored(tmp_path: Path, *words: object, ranks: int = 2) -> list[Row]:
    """Ends of an undisturbed run; the same job, killed within its tenth step, must go on as that one did."""
    if NO_V and words[0] in V_SHAPED:
        pytest.skip(WHY_NO_V)
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
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "LoopedBFS")) for name in SCHEDULES]
)
def test_a_pipeline_killed_in_the_middle_goes_on_bit_for_bit(runtime_dir: Path, tmp_path: Path, name: str) -> None:
    for end in killed_and_restored(tmp_path, name):
        assert end["saved"] == list(range(STEPS)), "every step was saved"
        assert end["late"] > 0, "after three proofs the copies go on behind the call"
        assert end["copies"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inside"), [("1F1B", "fsdp"), ("1F1B", "tp"), ("Interleaved1F1B", "fsdp")])
def test_stages_that_several_ranks_divide_are_copied_in_their_waits_and_go_on_bit_for_bit(
    runtime_dir: Path, tmp_path: Path, name: str, inside: str
) -> None:
    for end in killed_and_restored(tmp_path, name, inside, ranks=4):
        assert end["late"] > 0
        assert end["inside"] >= 0.8 * end["copies"] > 0, (
            "counted, not timed: one copy that loses its processor is longer than all others"
        )


@pytest.mark.slow
def test_kill_in_any_pipeline_phase_costs_two_steps(runtime_dir: Path, tmp_path: Path) -> None:
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


@dataclass(frozen=True)
class Step:
    """One step of one rank: what saving stopped it for, its waits, and the copies that ran in it, as (what, start, end)."""

    phase: str
    number: int
    is_saved: bool
    seconds: float
    stall: float
    waits: Sequence[Span]
    copies: Sequence[Span]

    @property
    def copied(self) -> float:
        return sum(end - start for _, start, end in self.copies)

    @property
    def inside(self) -> float:
        """Seconds of the copies that lay in waits: a copy that outlasts its wait counts as far as the wait went."""
        return sum(
            max(0.0, min(end, over) - max(start, begun))
            for _, start, end in self.copies
            for _, begun, over in self.waits
        )

    def overruns(self) -> list[list[float]]:
        """Per wait in which copies had a turn: of each that was not done when it ended, the seconds after that end."""
        found: dict[int, list[float]] = {}
        for what, start, end in self.copies:
            if what == "copy":
                (*_, number) = [number for number, (_, begun, _) in enumerate(self.waits) if begun <= start]
                past = end - max(start, self.waits[number][2])
                found.setdefault(number, []).extend([past] if past > 0 else [])
        return list(found.values())


def steps_of(end: Row) -> list[Step]:
    """From what a rank told at its end."""
    steps = []
    for row in end["rows"]:
        spans = [span for span in end["spans"] if row["began"] <= span[1] < row["ended"]]
        waits, copies = ([span for span in spans if (span[0] == "wait") == is_wait] for is_wait in (True, False))
        stall = row["save_seconds"] + row["fence_wait_seconds"]
        steps.append(Step(row["phase"], row["number"], row["saved"], row["ended"] - row["began"], stall, waits, copies))
    return steps


@MORE
def test_at_least_nine_tenths_of_the_copying_lie_in_waits(runtime_dir: Path, tmp_path: Path) -> None:
    """Stages that sleep instead of computing, saved at every step. The median step: a busy machine disturbs single ones."""
    with Lives(tmp_path / "job", DRIFT, 18, "every") as job:
        ends = [rows[-1] for rows in job.live()]
    for end in ends:
        settled = [step for step in steps_of(end) if step.copies]
        assert len(settled) >= 12, "after three proofs all is copied late"
        assert all(step.copied > 0 for step in settled)
        assert statistics.median(step.inside / step.copied for step in settled) >= 0.9


@pytest.mark.slow
def test_disturbed_waits_cost_at_most_one_chunk_each(runtime_dir: Path, tmp_path: Path) -> None:
    """Against steps of the same phase of the same run that were not saved."""
    with Lives(tmp_path / "job", DRIFT, 61, "block", 384) as job:
        ends = [rows[-1] for rows in job.live()]
    assert not any(end["given_up"] for end in ends)
    ranks = [steps_of(end) for end in ends]
    typical: dict[str, tuple[float, float]] = {}
    for phase in ("even", "slow", "hung", "short"):
        for rank, steps in enumerate(ranks):
            mine = [step for step in steps if step.phase == phase]
            judge(f"rank {rank}, {phase}", mine, fits=phase in ("slow", "hung"))
        typical[phase] = saved, plain = medians(phase, ranks)
        print(f"\n{phase}: a step with a save takes {saved * 1e3:.1f} ms, without {plain * 1e3:.1f} ms", end="")
    for phase, most in (("even", 1.5), ("slow", 1.15), ("short", 1.5)):
        saved, plain = typical[phase]
        assert saved <= most * plain, f"{phase}: beside steps of the same phase that were not saved"
    assert typical["hung"][0] <= HANG_S + 2 * typical["even"][1]
    (hung,) = [step for step in ranks[0] if step.phase == "hung"]
    (longest,) = [(begun, over) for _, begun, over in hung.waits if over - begun >= HANG_S]
    assert all(longest[0] <= start < longest[1] for _, start, _ in hung.copies[1:]), "copied while the peer hung"


def judge(name: str, steps: Sequence[Step], *, fits: bool) -> None:
    """Of one phase; `fits`: its waits hold a whole copy, and copies are late in all of it."""
    saved = [step for step in steps if step.copies]
    overruns = [past for step in saved for past in step.overruns()]
    chunks = sorted(over - start for step in saved for _, start, over in step.copies)
    stalled, whole = sum(step.stall for step in saved), sum(step.seconds for step in saved)
    copied, inside = sum(step.copied for step in saved), sum(step.inside for step in saved)
    print(
        f"\n{name}: {len(saved)} saves of {len(chunks) // len(saved)} chunks, {stalled / whole:.2%} stalled,"
        f" {inside / copied:.1%} in waits, {sum(map(sum, overruns)) * 1e3:.2f} ms past the end of {len(overruns)} waits,"
        f" a slow chunk {chunks[int(0.95 * len(chunks))] * 1e3:.2f} ms",
        end="",
    )
    assert max(map(len, overruns)) <= 1, "one chunk at most is under way when a wait ends"
    assert sum(map(sum, overruns)) <= 0.02 * whole, "and takes no more from the step than a chunk does"
    assert stalled <= (0.05 if fits else 0.2) * whole, "call and fence; what found no wait is copied at the fence"
    assert inside >= (0.9 if fits else 0.0) * copied


def medians(phase: str, ranks: Sequence[Sequence[Step]]) -> tuple[float, float]:
    """Seconds of a step whose copies were late, and of one without a save (0: there is none); means of the ranks, for they
    end a step at different moments.
    """
    saved, plain = [], []
    for before, now in pairwise(zip(*ranks, strict=True)):
        if now[0].phase == phase and all(step.copies for step in now):
            saved.append(statistics.fmean(step.seconds for step in now))
        # The first step after a block of saved ones still finishes what these began.
        elif now[0].phase == phase and not before[0].is_saved and not now[0].is_saved:
            plain.append(statistics.fmean(step.seconds for step in now))
    return statistics.median(saved), statistics.median(plain or [0.0])
