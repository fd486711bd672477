"""`holdfast plan --pipeline`: a pipeline that is not built yet, with a checkpoint in its bubbles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from holdfast.base.errors import UsageError
from holdfast.cli import subcommands
from holdfast.cli.planning.pipeline_plan import WORDS, parse, pipeline, predicted
from holdfast.cli.planning.pipeline_timeline import Picture, draw
from holdfast.cli.trace import Span, Track


def test_the_figures_are_those_of_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline("1F1B ranks=4 microbatches=12 forward=10ms state=100MB rate=10GB", html=None, as_json=True) == 0
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
        assert pipeline(f"{words} budget={budget}", html=None, as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["period_seconds"] == pytest.approx(10.0)
        assert told["ranks"][0]["left_seconds"] == pytest.approx(1.0)
        cadences.append(told["every"])
    assert cadences == [2, 91]


def test_the_picture_shows_work_waits_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline("GPipe ranks=2 microbatches=2 forward=10ms state=100MB rate=1GB", html=None, as_json=False) == 0
    told = capsys.readouterr().out
    assert "rank 0" in told
    assert {"0", "a", "#"} <= set(told)
    assert "checkpoint every" in told


def test_layers_make_stages_and_the_slowest_stage_makes_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten equal layers and a head of four on four stages: 3, 3, 3 and 1 + 4 of a layer."""
    assert parse("1F1B ranks=4 microbatches=12 layers=10x1ms+4ms").forward == pytest.approx((3e-3, 3e-3, 3e-3, 5e-3))
    assert pipeline("1F1B ranks=4 microbatches=12 layers=10x1ms+4ms state=1MB", html=None, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["period_seconds"] == pytest.approx(3 * (12 * 5e-3 + 3 * 3e-3))
    idle = [rank["idle_share"] for rank in told["ranks"]]
    assert idle[3] < min(idle[:3])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "missing: the schedule"),
        ("1F1B ranks=4", "missing: microbatches, forward"),
        ("1F1B ranks=4 microbatches=8 forward=10ms colour=red", "unknown: colour"),
        ("1F1B ranks=4 microbatches=8 forward=10ms ranks=8", "twice: ranks"),
        ("1F1B ranks=four microbatches=8 forward=10ms", "ranks: 'four' is not a whole number"),
        ("1F1B ranks=0 microbatches=8 forward=10ms", "ranks is zero"),
        ("1F1B ranks=4 microbatches=8 forward=0s", "forward is zero"),
        ("1F1B ranks=4 microbatches=8 layers=3x1ms", "4 stages cannot share 3 layers"),
        ("1F1B ranks=4 microbatches=8 layers=8x1ms forward=1ms", "layers say what forward"),
        ("1F1B ranks=4 microbatches=8 layers=eightx1ms", "layers: 'eight'"),
        ("1F1B ranks=4 microbatches=8 forward=10ms,12ms", "forward has 2 values for 4 stages; give one for all"),
        ("Interleaved1F1B ranks=4 microbatches=8 forward=1ms state=1GB,1GB", "state has 2 values for 8 stages"),
        ("1F1B ranks=4 microbatches=8 forward=1ms sync=1ms,2ms,3ms", "sync has 3 values for 4 ranks"),
        ("1F1B ranks=4 microbatches=8 forward=1ms hop=quick", "hop: 'quick' is not a duration; write it as"),
        ("1F1B ranks=4 microbatches=8 forward=1ms state=1GB,big,1GB,1GB", "state: 'big' is not a size"),
        ("1F1B ranks=4 microbatches=8 forward=1ms call=-1ms", "call: '-1ms' is not a duration"),
        ("1F1B ranks=4 microbatches=8 forward=1ms budget=2", "budget: '2' is not a share"),
        ("1F1B ranks=4 microbatches=8 forward=1ms from=2ms to=1ms", "to=1ms is not after from=2ms"),
    ],
)
def test_what_cannot_be_read_is_named_with_an_example(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        parse(text)
    assert "1F1B ranks=4" in str(caught.value)
    assert caught.value.where == f"--pipeline {text!r}"


def told(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    assert pipeline(text, html=None, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_what_lies_between_ranks_and_after_the_last_action_lengthens_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two stages of 1 + 2 ms, GPipe, two micro-batches: 9 ms; a hop forth and one back; rank 1 ends first, rank 0 last."""
    words = "GPipe ranks=2 microbatches=2 forward=1ms state=1MB"
    assert told(capsys, words)["period_seconds"] == pytest.approx(9e-3)
    assert told(capsys, f"{words} hop=0.5ms")["period_seconds"] == pytest.approx(10e-3)
    assert told(capsys, f"{words} sync=3ms optimizer=1ms")["period_seconds"] == pytest.approx(13e-3)
    one = told(capsys, f"{words} hop=0.5ms sync=3ms,5ms optimizer=1ms,2ms")
    assert [(rank["sync_seconds"], rank["optimizer_seconds"]) for rank in one["ranks"]] == [(3e-3, 1e-3), (5e-3, 2e-3)]
    assert one["period_seconds"] == pytest.approx(13e-3 + 1e-3), "3 ms more on a rank that had 2 ms of room"


def test_each_stage_has_its_bytes_and_a_rank_copies_those_of_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    words = "Interleaved1F1B ranks=2 microbatches=4 forward=10ms rate=1GB"
    for state, seconds in (("2MB", [0.004, 0.004]), ("1MB,2MB,4MB,8MB", [0.005, 0.010])):
        ranks = told(capsys, f"{words} state={state}")["ranks"]
        assert [one["hidden_seconds"] + one["left_seconds"] for one in ranks] == pytest.approx(seconds)
    forward = parse("1F1B ranks=2 microbatches=4 forward=10ms,30ms")
    assert (forward.forward, forward.backward) == ((0.01, 0.03), (0.02, 0.06))


def test_the_call_of_a_save_counts_in_the_cadence(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything fits into the waits of a step of 9 ms; a call of 0.09 ms is a hundredth of it."""
    words = "GPipe ranks=2 microbatches=2 forward=1ms state=1MB chunk=100kB"
    assert told(capsys, words)["every"] == 1
    assert told(capsys, f"{words} call=0.09ms")["every"] == 2
    assert told(capsys, f"{words} call=0.09ms budget=1.1%")["every"] == 1


SIXTEEN = "Interleaved1F1B ranks=16 microbatches=64 forward=10ms state=2GiB"


def rows(text: str) -> list[str]:
    """The lines of a picture without their names."""
    return [line[9:] for line in text.splitlines() if line.startswith("rank ") and "idle" not in line]


def test_a_big_pipeline_is_drawn_by_what_fills_a_column_with_a_page_beside_it(holdfast: Run, tmp_path: Path) -> None:
    """16 ranks of two stages, 64 micro-batches: actions of 10 and 20 ms in columns of 38 ms."""
    page = tmp_path / "step.html"
    answer = holdfast("plan", "--pipeline", SIXTEEN, "--html", page)
    assert answer.returncode == 0, answer.stderr
    drawn = rows(answer.stdout)
    assert len(drawn) == 16
    # Forwards, a wait with copies, then one of each in turn, waits between backwards, backwards. No noise.
    assert re.fullmatch(r" +░{10,}[-+#]+▒+[-+#]+▒{60,}▓+\++▓+", drawn[0])
    assert re.fullmatch(r"#{9,}\.?░+▒{80,}▓+", drawn[15].strip())
    widths = [len(row) - len(row.lstrip()) for row in drawn]
    assert widths == sorted(widths, reverse=True), "the last rank waits from before the first one begins"
    share = [sum(map(row.count, "#.")) / len(row.strip()) for row in drawn]
    assert all(0.03 < one < 0.12 for one in share), "a tenth of a step is idle, a part of it between two actions"
    assert "a column is more than an action: ░ forwards, ▓ backwards, ▒ both" in answer.stdout
    data = json.loads(re.search(r"^const data = (.*);$", page.read_text(), re.MULTILINE)[1])
    assert [track["name"] for track in data["tracks"]] == [f"rank {rank}" for rank in range(16)]
    for track in data["tracks"]:
        by_kind = {kind: [s for s in track["spans"] if data["kinds"][s[1]] == kind] for kind in data["kinds"]}
        assert len(by_kind["compute"]) == 2 * 2 * 64
        idle = sum(end - start for _, _, start, end, _ in by_kind["bubble"])
        assert idle == pytest.approx((16 - 1) * 0.03, abs=1e-5), "Narayanan et al. 2021, with two stages a rank"
        copies = [s for s in by_kind["copy"] if s[0] == "copy"]
        assert copies
        assert all(any(w[2] <= s[2] and s[3] <= w[3] for w in by_kind["bubble"]) for s in copies)


def test_a_part_of_the_step_is_drawn_action_by_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline(f"{SIXTEEN} from=330ms to=1330ms", html=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "from 0.33 s to 1.33 s, 8.3 ms a column" in text
    # Its last forwards ahead, its wait with the copy, and then a backward and a forward in turn.
    assert re.fullmatch(r"[0-9]{40,}#{10,}\.+a{2,3}\d?b{2,3}#{10,}\.+\d+c{2,3}\d{1,2}d{2,3}.*", rows(text)[0])
    with pytest.raises(UsageError, match=r"from=9s: the step is over after 4\.\d+ s"):
        pipeline(f"{SIXTEEN} from=9s", html=None, as_json=False)


def test_gradient_sync_and_optimizer_are_drawn_after_the_last_backward(capsys: pytest.CaptureFixture[str]) -> None:
    words = "GPipe ranks=2 microbatches=2 forward=10ms sync=10ms optimizer=20ms state=10MB"
    assert pipeline(words, html=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert all(re.search(r"b~{8,9}={16,18}$", row) for row in rows(text)), text
    assert "~ gradient sync; = optimizer" in text


def test_what_no_wait_hides_stands_beside_the_work(tmp_path: Path) -> None:
    """One rank never waits: its second of copying runs beside its first second of work."""
    found = predicted(parse("GPipe ranks=1 microbatches=3 forward=1s state=1GB rate=1GB"))
    (beside,) = [span for span in found.tracks[0].spans if span.kind == "copy"]
    assert (beside.what, beside.start, beside.end) == ("copy beside", 0.0, pytest.approx(1.0))


@pytest.mark.parametrize(("shades", "expected"), [("░▓▒█", "░▓▒█-+.# =▓"), ("fbxw", "fbxw-+.# =b")])
def test_a_column_is_what_fills_most_of_it(shades: str, expected: str) -> None:
    def column(at: int, *parts: tuple[str, float]) -> list[Span]:
        """A column of ten short spans."""
        return [Span(what, "compute", at + start, at + start + 0.1, {}) for what, start in parts]

    def tenths(at: int, forward: int, backward: int, weight: int, wait: int, copies: int) -> list[Span]:
        kinds = ["0F0"] * forward + ["0I0"] * backward + ["0W0"] * weight + ["wait"] * wait
        spans = column(at, *[(what, 0.1 * place) for place, what in enumerate(kinds)])
        start = 0.1 * (forward + backward + weight)
        return spans + column(at, *[("copy", start + 0.1 * place) for place in range(copies)])

    columns = [
        (8, 2, 0, 0, 0), (2, 8, 0, 0, 0), (5, 5, 0, 0, 0), (1, 1, 8, 0, 0), (0, 6, 0, 4, 1), (0, 4, 0, 6, 3),
        (1, 0, 0, 9, 4), (1, 0, 0, 9, 5), (0, 0, 0, 0, 0),
    ]  # fmt: skip
    spans = [span for at, one in enumerate(columns) for span in tenths(at, *one)]
    spans += column(9, ("optimizer", 0.0))
    spans += column(10, *[("0B0" if place < 6 else "gradient sync", 0.1 * place) for place in range(10)])
    (line,) = draw([Track("rank 0", 0, tuple(spans))], Picture(1.0, shades=shades))
    assert line == f"rank 0  {expected}"


def test_a_page_needs_a_step_and_a_place(holdfast: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no step to draw") as caught:
        pipeline(None, html="step.html", as_json=False)
    assert "--pipeline" in caught.value.remedy
    missing = tmp_path / "missing" / "step.html"
    with pytest.raises(UsageError, match="the page cannot be written: No such file") as caught:
        pipeline("GPipe ranks=2 microbatches=2 forward=10ms", html=str(missing), as_json=False)
    assert str(missing) in caught.value.where


def test_help_tells_every_word(holdfast: Run) -> None:
    text = holdfast("plan", "--help").stdout
    assert all(re.search(rf"^ +{word} +{re.escape(what)}$", text, re.MULTILINE) for word, what in WORDS.items()), text


def test_the_interleaved_schedule_halves_the_bubbles_and_torch_is_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narayanan et al. 2021: two stages a rank halve them. Torch's micro-batches that make no rounds are refused."""
    monkeypatch.setattr(subcommands, "ask", lambda *_: pytest.fail("that takes seconds"))
    ranks = told(capsys, "Interleaved1F1B ranks=16 microbatches=64 forward=10ms")["ranks"]
    assert [rank["idle_share"] for rank in ranks] == pytest.approx([7.5 / (64 + 7.5)] * 16, rel=0.02)
    with pytest.raises(UsageError, match="9 micro-batches cannot be divided into 2 rounds"):
        pipeline("Interleaved1F1B ranks=4 microbatches=9 forward=10ms", html=None, as_json=True)


@pytest.mark.slow
def test_other_schedules_are_asked_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = told(capsys, "ZBVZeroBubble ranks=4 microbatches=16 forward=10ms backward=20ms state=1GiB")["ranks"]
    assert len(ranks) == 4
    assert max(rank["idle_share"] for rank in ranks) < 0.1
    with pytest.raises(UsageError, match="no schedule of the installed torch"):
        pipeline("NoSuch ranks=2 microbatches=4 forward=1ms", html=None, as_json=True)
