"""The power drill on itself: real file systems are cut off after every kind of call, and every planted bug is found."""

from __future__ import annotations

import os

import pytest

from holdfast.testing.checks.power_cut_disk import JOURNAL_LOST, JOURNAL_WRITTEN, KINDS, why_not
from holdfast.testing.drill.crash_drill import Progress, open_lanes, run
from holdfast.testing.drill.trial_plan import Trial
from holdfast.testing.power import power
from planted import hunt

CUTS = 200
FOUND = {("ext4", large): [("persist", 1, 0), ("persist", 1, 1), ("commit", 1, 3)] for large in power.SIZES}


def quiet(total: int) -> Progress:
    return Progress(total, "trials", quiet=True)


def test_the_first_half_of_the_plan_has_every_boundary_once_and_the_whole_plan_both_cuts() -> None:
    trials = power.plan(FOUND, seed=3)
    assert trials == power.plan(FOUND, seed=3)
    assert trials != power.plan(FOUND, seed=4)
    places = [_place(trial) for trial in trials]
    assert len(trials) == 12
    assert len({place[:3] for place in places[:6]}) == 6
    assert len(set(places)) == 12
    assert {place[3] for place in places} == {JOURNAL_LOST, JOURNAL_WRITTEN}
    assert len({trial.number for trial in trials}) == 12


def _place(trial: Trial) -> tuple[bool, str, object, int]:
    aim = trial.lives[0].aim
    assert aim is not None
    return trial.large, aim.phase, aim.exact, aim.cut


def test_without_root_it_says_why_and_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert power.main(["--trials", "1"]) == 2
    assert "the power drill cannot run: it needs root" in capsys.readouterr().err


def test_wrong_usage_ends_with_two() -> None:
    for arguments in (["--trials", "-1"], ["--filesystem", "floppy"]):
        with pytest.raises(SystemExit) as error:
            power.main(arguments)
        assert error.value.code == 2


@pytest.fixture
def cuttable() -> None:
    for kind in KINDS:
        reason = why_not(kind)
        if reason:
            pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cuttable")
def test_two_hundred_cuts_on_two_file_systems_lose_and_tear_nothing() -> None:
    with open_lanes(3) as lanes:
        places = {(kind, large): power.boundaries(lanes, kind, large, 1) for kind in KINDS for large in power.SIZES}
        trials = power.plan(places, 1)
        outcomes = run(lanes, trials[:CUTS], quiet(CUTS))
    # persist, commit, retention of three versions: open, write, truncate, fsync, rename, link, unlink, mkdir, rmdir
    assert all(len(found) >= 100 for found in places.values()), {place: len(found) for place, found in places.items()}
    assert {phase for found in places.values() for phase, _, _ in found} == set(power.PHASES)
    bad = [(o.number, o.phase, o.victim, o.violations) for o in outcomes if o.violations]
    assert not bad, bad[:5]
    assert len(outcomes) == CUTS
    assert sum(outcome.struck for outcome in outcomes) >= 0.95 * CUTS, "the cuts miss"
    assert sum(outcome.acknowledged for outcome in outcomes) >= CUTS, "hardly anything was acknowledged"


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cuttable")
def test_every_planted_bug_is_found() -> None:
    with hunt.open_lanes(3) as lanes:
        trials = power.plan({(kind, False): power.boundaries(lanes, kind, False, 1) for kind in KINDS}, 1)
        quarries = hunt.hunt_by_cuts(lanes, tuple(hunt.CUT_IN), trials, quiet(len(hunt.CUT_IN)))
    missed = [str(quarry) for quarry in quarries if quarry.found_by is None]
    assert not missed, "\n".join(missed)
