"""The crash drill on itself: trials on real processes without a violation, and every planted bug found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from holdfast.testing.checks import evidence
from holdfast.testing.drill import crash_drill
from holdfast.testing.drill.crash_drill import Lanes, Progress, drill, main, run
from holdfast.testing.drill.outcome import Outcome
from holdfast.testing.drill.trial_plan import (
    CELLS,
    LAST_LIFE,
    PAIR,
    PHASES,
    STRIKES,
    Aim,
    LifePlan,
    Trial,
    full_starts,
    plan,
    script,
)
from holdfast.tiers.memory.slots import Slot
from planted import crash
from planted.hunt import hunt, open_lanes


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    """Two lanes for all tests: warming up is half of their time."""
    with open_lanes(2) as lanes:
        yield lanes


def said(outcomes: list[Outcome]) -> str:
    """What went wrong, for the message of a failing test."""
    bad = [outcome for outcome in outcomes if outcome.violations]
    lines = []
    for outcome in bad[:3]:
        lines += [f"trial {outcome.number}: {outcome.phase}, {outcome.victim}"]
        lines += [f"  {invariant}: {what}" for invariant, what in outcome.violations]
        lines += [f"    {line}" for line in outcome.evidence[:120]]
    return "\n".join(lines)


def test_the_same_seed_gives_the_same_plan_whatever_the_number() -> None:
    assert plan(48, 3) == plan(200, 3)[: 48 // STRIKES]
    assert plan(48, 3) != plan(48, 4)
    (cut, whole) = (plan(50, 3)[-1], plan(52, 3)[-1])
    assert cut.number == whole.number == 48
    assert cut.cells == whole.cells[:2]
    aims = [life.aim for life in cut.lives if life.aim]
    assert aims == [life.aim for life in whole.lives if life.aim][:2]


def test_every_phase_and_victim_gets_its_turn_and_every_phase_follows_every_other() -> None:
    assert sorted(cell for trial in plan(len(CELLS), 1) for cell in trial.cells) == sorted(CELLS)
    jobs = plan(1000, 1)
    pairs = {(one[0], next_[0]) for job in jobs for one, next_ in pairwise(job.cells)}
    assert pairs == set(product(PHASES, PHASES))


@pytest.mark.timeout(300)
def test_sixty_trials_violate_nothing(lanes: Lanes) -> None:
    seed = 1  # the same plan in every run; other seeds: `holdfast drill crash --seed`
    outcomes = run(lanes, plan(60, seed), Progress(60, "trials", quiet=True))
    assert not any(outcome.violations for outcome in lanes.warm_up), said(lanes.warm_up)
    assert not any(outcome.violations for outcome in outcomes), f"seed {seed}\n{said(outcomes)}"
    assert sorted(outcome.number for outcome in outcomes) == list(range(60)), f"seed {seed}"
    assert sum(outcome.struck for outcome in outcomes) >= 55, f"seed {seed}: the strikes miss"
    assert sum(outcome.acknowledged for outcome in outcomes) >= 120, f"seed {seed}: hardly anything was acknowledged"


@pytest.mark.timeout(120)
def test_slots_whose_images_all_failed_are_free_again(lanes: Lanes) -> None:
    """Every memory copy is damaged, the version comes back from storage, and the saves after that find a slot."""
    aim = Aim("persist", "k0", "t0", 0.33, True, 0.9)
    lives = (LifePlan(script("D1 c1 d1 D3 C2"), aim), replace(LAST_LIFE, damage="memory"))
    trial = Trial(134, 11, PAIR, (("persist", "trainer"),), lives)
    (outcome,) = run(lanes, [trial], Progress(1, "trials", quiet=True))
    assert outcome.struck
    assert not outcome.violations, said([outcome])


@pytest.mark.timeout(300)
def test_every_planted_bug_is_found(lanes: Lanes) -> None:
    names = tuple(crash.BUGS)
    assert len(names) >= 12
    quarries = hunt(lanes, names, 1, Progress(len(names), "bugs", quiet=True))
    missed = [str(quarry) for quarry in quarries if quarry.found_by is None]
    assert not missed, "\n".join(missed)


Told = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def told(lanes: Lanes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """The rows that the command prints with these options, on lanes that are open already."""
    monkeypatch.setattr(crash_drill, "open_lanes", lambda _: nullcontext(lanes))

    def rows(*options: str) -> list[dict[str, Any]]:
        assert main(["crash", *options, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows


@pytest.mark.timeout(120)
def test_one_trial_alone_is_its_job_up_to_it(told: Told) -> None:
    rows = told("--only", "5")
    assert [row["number"] for row in rows] == [4, 5]
    assert [(row["phase"], row["victim"]) for row in rows] == list(plan(6, 1)[1].cells)


@pytest.mark.timeout(120)
def test_a_job_ends_with_the_trial_that_violates_something(lanes: Lanes) -> None:
    trial = replace(plan(STRIKES, 1)[0], plant="values-forgotten")
    outcomes = run(lanes, [trial], Progress(STRIKES, "trials", quiet=True))
    assert len(outcomes) < STRIKES
    assert [bool(outcome.violations) for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]


@pytest.mark.parametrize(
    ("broken", "column"), [("S1", "lost"), ("S11", "lost"), ("S5", "torn"), ("S10", "torn"), ("V5", "other")]
)
def test_the_table_counts_what_was_violated_and_the_exit_code_tells(
    capsys: pytest.CaptureFixture[str], broken: str, column: str
) -> None:
    good = [Outcome(number, "seal", "trainer", "", True, 3, 1, 0.5) for number in range(2)]
    bad = Outcome(2, "commit", "keeper", "", False, 0, 0, 0.5, violations=((broken, "what was seen"),))

    assert crash_drill.report(good, as_json=False, verbose=False) == 0
    capsys.readouterr()
    assert crash_drill.report([*good, bad], as_json=False, verbose=False) == 1

    titles, *rows, blank, trial, what = capsys.readouterr().out.splitlines()
    cells = {tuple(row.split()[:2]): dict(zip(titles.split()[2:], row.split()[2:], strict=True)) for row in rows[:-1]}
    counts = {"lost": "0", "torn": "0", "other": "0"}
    assert cells["seal", "trainer"] == {
        "trials": "2", "struck": "2", "acknowledged": "6", **counts, "refused": "2", "seconds": "1.0"
    }  # fmt: skip
    assert {name: cells["commit", "keeper"][name] for name in counts} == counts | {column: "1"}
    assert rows[-1].split()[:2] == ["all", "3"]
    assert (blank, trial, what) == ("", "trial 2 (commit, keeper):", f"  {broken}: what was seen")


def test_memory_that_is_just_being_made_and_other_memory_files_are_no_slots() -> None:
    """A keeper makes slots while others look; its pages, notes and keys are memory files too."""
    slot = Slot.create(4096)
    other = [os.memfd_create("holdfast"), os.memfd_create("holdfast-windows")]
    os.ftruncate(other[1], 64)
    found = list(evidence.slot_descriptors(os.getpid(), set()))
    try:
        inodes = {os.fstat(fd).st_ino for fd in found}
        assert os.fstat(slot.fd).st_ino in inodes
        assert not inodes & {os.fstat(fd).st_ino for fd in other}
        assert evidence.read_memory({0: [os.getpid()]}, num_entries=1).copies == ()
    finally:
        slot.close()
        for fd in (*found, *other):
            os.close(fd)


def test_wrong_usage_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["crash", "--trials", "-1"], ["crash", "--trials", "0"], ["crash", "--only", "-1"], ["flood"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
    assert "flood" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_trials_violate_nothing() -> None:
    outcomes = drill(plan(1000, 1), num_lanes=3, progress=Progress(1000, "trials", quiet=True))
    assert not any(outcome.violations for outcome in outcomes), said(outcomes)
    assert sum(outcome.struck for outcome in outcomes) >= 950, "the strikes miss"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_trials_of_fresh_interpreters_violate_nothing() -> None:
    outcomes = drill(full_starts(50, 1), num_lanes=2, progress=Progress(50, "trials", quiet=True))
    assert not any(outcome.violations for outcome in outcomes), said(outcomes)
