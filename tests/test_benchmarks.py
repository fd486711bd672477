"""What benchmarks say: one line for each figure with its unit and its goal, on the screen and in the file, and the goals
are those of benchmarks/README.md. How long anything takes is not asserted here.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
BOUND = re.compile(r"(<=|>=) ([\d.]+)")


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.measure")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "pressure", lambda: 1.5)
    return module


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_each_figure_is_one_line_with_its_unit_and_its_goal(
    measure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool, quick: bool
) -> None:
    report = measure.Report("speed", quick=quick, as_json=as_json)
    report.figure("ratio_of_both", 1.123456, "ratio", "<= 1.1", ranks=2)
    report.figure("bytes_per_second", 7, "B/s", ">= 0.7")
    report.figure("only_told", None, "s")
    report.save()

    expected = [
        {"metric": "ratio_of_both", "value": 1.1235, "unit": "ratio", "goal": "<= 1.1", "pressure": 1.5, "ranks": 2},
        {"metric": "bytes_per_second", "value": 7, "unit": "B/s", "goal": ">= 0.7", "pressure": 1.5},
        {"metric": "only_told", "value": None, "unit": "s", "goal": "", "pressure": 1.5},
    ]
    shown = capsys.readouterr().out.splitlines()
    if as_json:
        assert list(map(json.loads, shown)) == expected
    else:
        assert [" ".join(line.split()) for line in shown] == [
            "ratio_of_both 1.1235 ratio <= 1.1 MISSED",
            "bytes_per_second 7 B/s >= 0.7 met",
            "only_told None s",
        ]
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == ("speed-quick.jsonl" if quick else "speed.jsonl")
    machine, *kept = map(json.loads, file.read_text().splitlines())
    assert {"cpu", "cores", "python", "torch", "date"} <= machine["machine"].keys()
    assert kept == expected


def test_a_goal_is_met_up_to_its_bound_and_not_beyond(measure: Any) -> None:
    assert [measure.met(value, "<= 1.1") for value in (1.0, 1.1, 1.11)] == [True, True, False]
    assert [measure.met(value, ">= 0.85") for value in (0.84, 0.85, 2.0)] == [False, True, True]


def test_every_replica_that_is_measured_is_sent(measure: Any, tmp_path: Path) -> None:
    """A keeper sends no image again that its peer has already."""
    del measure  # it makes `benchmarks` importable
    replicate = importlib.import_module("benchmarks.replicate")
    with replicate.pair_in(tmp_path / "pair", 1 << 20, {}) as pair:
        sent = [pair.replicate() for _ in range(4)]
    assert all(rate > 0 for rate in sent), sent


def documented() -> dict[str, dict[str, set[tuple[str, float]]]]:
    """Program -> metric -> its bounds; where the bound depends on the number of ranks, one for each."""
    found: dict[str, dict[str, set[tuple[str, float]]]] = {}
    program = ""
    for line in (BENCHMARKS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 4 or not cells[1].startswith("`"):
            continue
        program = cells[0].strip("`").removesuffix(".py") or program
        relation, numbers = cells[2][:2], [float(n) for n in re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", cells[2]))]
        if "/ N" in cells[2]:
            numbers = [float(f"{numbers[0] / ranks:.2f}") for ranks in (2, 4, 8)]
        for metric in re.findall(r"`(\w+)", cells[1]):
            found.setdefault(program, {})[metric] = {(relation, number) for number in numbers}
    return found


def bound_of(text: str) -> tuple[str, float]:
    relation, number = text.split()
    return relation, float(number)


@pytest.mark.parametrize("program", documented())
def test_goals_are_those_of_the_documents(program: str) -> None:
    """Both in the program and in what it said last."""
    metrics = documented()[program]
    said = {
        bound_of(node.value)
        for node in ast.walk(ast.parse((BENCHMARKS / f"{program}.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and BOUND.fullmatch(node.value)
    }
    assert said == set().union(*metrics.values())
    kept = map(json.loads, (BENCHMARKS / "results" / f"{program}.jsonl").read_text().splitlines()[1:])
    for figure in kept:
        if figure["goal"]:
            assert bound_of(figure["goal"]) in metrics[re.match(r"\w+", figure["metric"])[0]], figure["metric"]


@pytest.fixture
def bubbles(measure: Any) -> Any:
    return importlib.import_module("benchmarks.bubbles")


def step(whole: float, *, others: float = 0.0, follows: bool = False) -> dict[str, float]:
    return {"whole": whole, "others": others, "follows": float(follows)}


def test_where_nothing_differs_a_pair_tells_no_overhead_on_average(bubbles: Any) -> None:
    pairs = [(step(busy), step(plain)) for busy in (0.9, 1.0, 1.1) for plain in (0.9, 1.0, 1.1)]

    assert sum(bubbles.shares(pairs, "whole")) == pytest.approx(0.0, abs=1e-12)
    (one,) = bubbles.shares([(step(1.02), step(1.0))], "whole")
    assert one == pytest.approx(0.02, rel=0.02)


def test_what_a_save_leaves_for_the_next_step_is_told(bubbles: Any) -> None:
    busy = [step(1.0, others=0.03, follows=True), step(1.0, others=0.05, follows=True)]
    idle = [step(1.0, others=0.01)]

    assert bubbles.carried([*busy, *idle]) == pytest.approx(3.0)
    assert bubbles.carried([*idle, step(1.0, others=0.01, follows=True)]) == pytest.approx(0.0)
