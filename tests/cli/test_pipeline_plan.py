"""`holdfast plan --pipeline`: a pipeline that is not built yet, with a checkpoint in its bubbles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.conftest import Run
from holdfast.base.errors import UsageError
from holdfast.cli import subcommands
from holdfast.cli.planning.pipeline_plan import HELP, Description, load, pipeline, predicted
from holdfast.cli.planning.pipeline_timeline import Picture, draw
from holdfast.cli.timeline import Span, Track
from kit.pipelines import described

Tell = Callable[..., dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tell:
    """What the command says of a pipeline."""

    def tell(*counts: Any, **keys: Any) -> dict[str, Any]:
        assert pipeline(described(tmp_path, *counts, **keys), html=None, as_json=True) == 0
        return json.loads(capsys.readouterr().out)

    return tell


def test_the_figures_are_those_of_the_closed_form(told: Tell) -> None:
    found = told("1F1B", 4, 12, forward="10ms", state="100MB", rate="10GB")
    assert found["period_seconds"] == pytest.approx((12 + 3) * 0.03)
    assert [rank["idle_share"] for rank in found["ranks"]] == pytest.approx([3 / 15] * 4)
    assert all(rank["left_seconds"] == 0 for rank in found["ranks"])
    assert all(rank["hidden_seconds"] == pytest.approx(0.01) for rank in found["ranks"]), "bytes over bandwidth"
    assert found["every"] == 1


def test_what_fits_into_no_wait_decides_the_cadence_by_the_budget(told: Tell) -> None:
    """One rank never waits: a second of copying in a step of ten, the optimizer's included, is saved every so many steps."""
    cadences = []
    for budget in (0.06, 0.0011):
        found = told("GPipe", 1, 3, forward="1s", optimizer="1s", state="1GB", rate="1GB", budget=budget)
        assert found["period_seconds"] == pytest.approx(10.0)
        assert found["ranks"][0]["left_seconds"] == pytest.approx(1.0)
        cadences.append(found["every"])
    assert cadences == [2, 91]


def test_the_picture_shows_work_waits_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(tmp_path, "GPipe", 2, 2, forward="10ms", state="100MB", rate="1GB")
    assert pipeline(file, html=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "rank 0" in text
    assert {"0", "a", "#"} <= set(text)
    assert "checkpoint every" in text


def test_layers_make_stages_and_the_slowest_stage_makes_the_step(tmp_path: Path, told: Tell) -> None:
    """Ten equal layers and a head of four on four stages: 3, 3, 3 and 1 + 4 of a layer."""
    pipe = {"layers": [[10, "1ms"], "4ms"]}
    assert load(described(tmp_path, "1F1B", 4, 12, **pipe)).forward == pytest.approx((3e-3, 3e-3, 3e-3, 5e-3))
    found = told("1F1B", 4, 12, **pipe, state="1MB")
    assert found["period_seconds"] == pytest.approx(3 * (12 * 5e-3 + 3 * 3e-3))
    idle = [rank["idle_share"] for rank in found["ranks"]]
    assert idle[3] < min(idle[:3])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"ranks": "four"}, r"Expected `int`, got `str` - at `\$.ranks`"),
        ({"ranks": 0}, r"Expected `int` >= 1 - at `\$.ranks`"),
        ({"forward": []}, "forward or layers is missing"),
        ({"forward": "0s"}, "forward is zero"),
        ({"forward": [], "layers": [[3, "1ms"]]}, "4 stages cannot share 3 layers"),
        ({"layers": [[8, "1ms"]]}, "layers say what forward"),
        ({"forward": [], "layers": [["eight", "1ms"]]}, r"Expected `int`, got `str` - at `\$.layers"),
        ({"forward": ["10ms", "12ms"]}, "forward has 2 values for 4 stages; give one for all"),
        ({"schedule": "Interleaved1F1B", "state": ["1GB", "1GB"]}, "state has 2 values for 8 stages"),
        ({"sync": ["1ms", "2ms", "3ms"]}, "sync has 3 values for 4 ranks"),
        ({"hop": "quick"}, "hop: 'quick' is not a duration; write it as"),
        ({"state": ["1GB", "big", "1GB", "1GB"]}, "state: 'big' is not a size"),
        ({"call": "-1ms"}, "call: '-1ms' is not a duration"),
        ({"budget": 2}, "budget: '2' is not a share"),
        ({"rate": "0B"}, "rate is zero"),
        ({"start": "2ms", "end": "1ms"}, "to = 1ms is not after from = 2ms"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    file = described(tmp_path, **{"schedule": "1F1B", "ranks": 4, "microbatches": 8, "forward": "10ms", **keys})
    with pytest.raises(UsageError, match=named) as caught:
        load(file)
    assert "--help" in caught.value.remedy
    assert file in caught.value.where


def test_words_are_refused_with_the_way_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no longer described by words") as caught:
        load("1F1B ranks=4 microbatches=8 forward=10ms")
    assert "TOML file" in caught.value.remedy
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load(str(tmp_path / "pipeline.toml"))


def test_what_lies_between_ranks_and_after_the_last_action_lengthens_the_step(told: Tell) -> None:
    """Two stages of 1 + 2 ms, GPipe, two micro-batches: 9 ms; a hop forth and one back; rank 1 ends first, rank 0 last."""
    two = partial(told, "GPipe", 2, 2, forward="1ms", state="1MB")
    assert two()["period_seconds"] == pytest.approx(9e-3)
    assert two(hop="0.5ms")["period_seconds"] == pytest.approx(10e-3)
    assert two(sync="3ms", optimizer="1ms")["period_seconds"] == pytest.approx(13e-3)
    one = two(hop="0.5ms", sync=["3ms", "5ms"], optimizer=["1ms", "2ms"])
    assert [(rank["sync_seconds"], rank["optimizer_seconds"]) for rank in one["ranks"]] == [(3e-3, 1e-3), (5e-3, 2e-3)]
    assert one["period_seconds"] == pytest.approx(13e-3 + 1e-3), "3 ms more on a rank that had 2 ms of room"


def test_each_stage_has_its_bytes_and_a_rank_copies_those_of_its_stages(tmp_path: Path, told: Tell) -> None:
    for state, seconds in (("2MB", [0.004, 0.004]), (["1MB", "2MB", "4MB", "8MB"], [0.005, 0.010])):
        ranks = told("Interleaved1F1B", 2, 4, forward="10ms", rate="1GB", state=state)["ranks"]
        assert [one["hidden_seconds"] + one["left_seconds"] for one in ranks] == pytest.approx(seconds)
    forward = load(described(tmp_path, "1F1B", 2, 4, forward=["10ms", "30ms"]))
    assert (forward.forward, forward.backward) == ((0.01, 0.03), (0.02, 0.06))


def test_the_call_of_a_save_counts_in_the_cadence(told: Tell) -> None:
    """Everything fits into the waits of a step of 9 ms; a call of 0.09 ms is a hundredth of it."""
    two = partial(told, "GPipe", 2, 2, forward="1ms", state="1MB", chunk="100kB")
    assert two()["every"] == 1
    assert two(call="0.09ms")["every"] == 2
    assert two(call="0.09ms", budget="1.1%")["every"] == 1


SIXTEEN: dict[str, Any] = {
    "schedule": "Interleaved1F1B", "ranks": 16, "microbatches": 64, "forward": "10ms", "state": "2GiB"
}  # fmt: skip


def rows(text: str) -> list[str]:
    """The lines of a picture without their names."""
    return [line[9:] for line in text.splitlines() if line.startswith("rank ") and "idle" not in line]


def test_a_big_pipeline_is_drawn_by_what_fills_a_column_with_a_page_beside_it(holdfast: Run, tmp_path: Path) -> None:
    """16 ranks of two stages, 64 micro-batches: actions of 10 and 20 ms in columns of 38 ms."""
    page = tmp_path / "step.html"
    answer = holdfast("plan", "--pipeline", described(tmp_path, **SIXTEEN), "--html", page)
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


def test_a_part_of_the_step_is_drawn_action_by_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline(described(tmp_path, **SIXTEEN, start="330ms", end="1330ms"), html=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "from 0.33 s to 1.33 s, 8.3 ms a column" in text
    # Its last forwards ahead, its wait with the copy, and then a backward and a forward in turn.
    assert re.fullmatch(r"[0-9]{40,}#{10,}\.+a{2,3}\d?b{2,3}#{10,}\.+\d+c{2,3}\d{1,2}d{2,3}.*", rows(text)[0])
    with pytest.raises(UsageError, match=r"from = 9 s: the step is over after 4\.\d+ s"):
        pipeline(described(tmp_path, **SIXTEEN, start="9s"), html=None, as_json=False)


def test_gradient_sync_and_optimizer_are_drawn_after_the_last_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = described(tmp_path, "GPipe", 2, 2, forward="10ms", sync="10ms", optimizer="20ms", state="10MB")
    assert pipeline(file, html=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert all(re.search(r"b~{8,9}={16,18}$", row) for row in rows(text)), text
    assert "~ gradient sync; = optimizer" in text


def test_what_no_wait_hides_stands_beside_the_work(tmp_path: Path) -> None:
    """One rank never waits: its second of copying runs beside its first second of work."""
    found = predicted(load(described(tmp_path, "GPipe", 1, 3, forward="1s", state="1GB", rate="1GB")))
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
        pipeline(described(tmp_path, "GPipe", 2, 2, forward="10ms"), html=str(missing), as_json=False)
    assert str(missing) in caught.value.where


def test_help_shows_every_key_in_a_file_that_can_be_read(holdfast: Run, tmp_path: Path) -> None:
    text = holdfast("plan", "--help").stdout
    lines = [line for line in HELP.splitlines() if " = " in line]
    assert all(line.strip() in text for line in lines)
    keys = {field.encode_name for field in msgspec.structs.fields(Description)}
    assert {line.split()[0] for line in lines} == keys
    file = tmp_path / "pipeline.toml"
    file.write_text("\n".join(line for line in lines if not line.strip().startswith("layers")))
    assert load(str(file)).schedule == "1F1B"


def test_the_interleaved_schedule_halves_the_bubbles_and_torch_is_not_asked(
    told: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narayanan et al. 2021: two stages a rank halve them. Torch's micro-batches that make no rounds are refused."""
    monkeypatch.setattr(subcommands, "ask", lambda *_: pytest.fail("that takes seconds"))
    ranks = told("Interleaved1F1B", 16, 64, forward="10ms")["ranks"]
    assert [rank["idle_share"] for rank in ranks] == pytest.approx([7.5 / (64 + 7.5)] * 16, rel=0.02)
    with pytest.raises(UsageError, match="9 micro-batches cannot be divided into 2 rounds"):
        told("Interleaved1F1B", 4, 9, forward="10ms")


@pytest.mark.slow
def test_other_schedules_are_asked_of_torch(told: Tell) -> None:
    ranks = told("ZBVZeroBubble", 4, 16, forward="10ms", backward="20ms", state="1GiB")["ranks"]
    assert len(ranks) == 4
    assert max(rank["idle_share"] for rank in ranks) < 0.1
    with pytest.raises(UsageError, match="no schedule of the installed torch"):
        told("NoSuch", 2, 4, forward="1ms")
