"""`holdfast plan --pipeline`: a pipeline that is not built yet, with a checkpoint in its bubbles."""

from __future__ import annotations

import json

import pytest

from holdfast.base.errors import UsageError
from holdfast.tools.pipeline import parse, pipeline


def test_the_figures_are_those_of_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline("1F1B ranks=4 microbatches=12 forward=10ms state=100MB rate=10GB", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["period_seconds"] == pytest.approx((12 + 3) * 0.03)
    assert [rank["idle_share"] for rank in told["ranks"]] == pytest.approx([3 / 15] * 4)
    assert all(rank["left_seconds"] == 0 for rank in told["ranks"])
    assert all(rank["hidden_seconds"] == pytest.approx(0.01) for rank in told["ranks"]), "bytes over bandwidth"
    assert told["every"] == 1


def test_what_fits_into_no_wait_decides_the_cadence_by_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank never waits: a second of copying in a step of ten, the optimizer's included, is saved every so many steps."""
    words = "GPipe ranks=1 microbatches=3 forward=1s optimizer=1s state=1GB rate=1GB"
    cadences = []
    for budget in (0.06, 0.0011):
        assert pipeline(f"{words} budget={budget}", as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["period_seconds"] == pytest.approx(10.0)
        assert told["ranks"][0]["left_seconds"] == pytest.approx(1.0)
        cadences.append(told["every"])
    assert cadences == [2, 91]


def test_the_picture_shows_work_waits_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline("GPipe ranks=2 microbatches=2 forward=10ms state=100MB rate=1GB", as_json=False) == 0
    told = capsys.readouterr().out
    assert "rank 0" in told
    assert {"0", "a", "#"} <= set(told)
    assert "checkpoint every" in told


def test_layers_make_stages_and_the_slowest_stage_makes_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten equal layers and a head of four on four stages: 3, 3, 3 and 1 + 4 of a layer."""
    assert parse("1F1B ranks=4 microbatches=12 layers=10x1ms+4ms").forward == pytest.approx((3e-3, 3e-3, 3e-3, 5e-3))
    assert pipeline("1F1B ranks=4 microbatches=12 layers=10x1ms+4ms state=1MB", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["period_seconds"] == pytest.approx(3 * (12 * 5e-3 + 3 * 3e-3))
    idle = [rank["idle_share"] for rank in told["ranks"]]
    assert idle[3] < min(idle[:3])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "missing"),
        ("1F1B ranks=4", "missing: microbatches, forward"),
        ("1F1B ranks=4 microbatches=8 forward=10ms colour=red", "unknown: colour"),
        ("1F1B ranks=four microbatches=8 forward=10ms", "four"),
        ("1F1B ranks=0 microbatches=8 forward=10ms", "zero"),
        ("1F1B ranks=4 microbatches=8 layers=3x1ms", "4 stages cannot share 3 layers"),
        ("1F1B ranks=4 microbatches=8 layers=8x1ms forward=1ms", "layers say what forward"),
        ("1F1B ranks=4 microbatches=8 layers=eightx1ms", "eight"),
    ],
)
def test_what_cannot_be_read_is_named_with_an_example(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        parse(text)
    assert "1F1B ranks=4" in str(caught.value)


@pytest.mark.slow
def test_other_schedules_are_asked_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline("Interleaved1F1B ranks=16 microbatches=64 forward=10ms state=8GiB", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["ranks"]) == 16
    # Two stages a rank halve the bubbles (Narayanan et al. 2021).
    assert [rank["idle_share"] for rank in told["ranks"]] == pytest.approx([7.5 / (64 + 7.5)] * 16, rel=0.02)
    with pytest.raises(UsageError, match="no schedule of the installed torch"):
        pipeline("NoSuch ranks=2 microbatches=4 forward=1ms", as_json=True)
