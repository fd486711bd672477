"""The matrix of releases: its rows are those of the package's own files, and what is made from its results is what stands."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.core.test_a" name="test_one"/>
<testcase classname="tests.core.test_a" name="test_two"><failure message="no">no</failure></testcase>
<testcase classname="tests.core.test_a" name="test_two"><error message="teardown">no</error></testcase>
<testcase classname="tests.core.test_b" name="test_three[x]"><skipped message="not here"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.matrix.__main__")


def result(row: str, torch: str, **more: Any) -> dict[str, Any]:
    ended = {"passed": 3, "skipped": 1, "failed": [], "ended": ""}
    facts = {"row": row, "date": "2026-11-27", "tests": "all", "python": "3.11.7", "versions": {"torch": torch}}
    return {**facts, "cuda": "", **ended, **more}


def test_every_minor_release_of_torch_that_is_asked_for_has_a_row(matrix: Any) -> None:
    rows = matrix.rows(ROOT)
    numbers = [int(name.removeprefix("torch-2.")) for name in rows if name.startswith("torch-2.")]
    (asked,) = re.findall(r'"torch>=2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert numbers == list(range(int(asked), max(numbers) + 1))


def test_every_framework_has_its_oldest_and_its_newest_release_with_the_tests_of_its_door(matrix: Any) -> None:
    rows = matrix.rows(ROOT)
    (line,) = re.findall(r"^DOORS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for door in line.split():
        oldest, newest = rows[f"{door}-oldest"], rows[f"{door}-newest"]
        assert all("==" in each for each in oldest.packages)
        assert any(">=" in each for each in newest.packages)
        assert oldest.tests == newest.tests
        assert all((ROOT / test).is_file() for test in oldest.tests)
        assert not {"ray[train]"} & {*oldest.shown}, "names of distributions, without extras"


def test_what_failed_is_named_once_and_what_was_skipped_did_not_pass(matrix: Any) -> None:
    assert matrix.environment.counted(REPORT) == {
        "passed": 1,
        "skipped": 1,
        "failed": ["tests.core.test_a::test_two"],
        "ended": "",
    }


def test_of_each_row_and_selection_the_last_result_counts(matrix: Any) -> None:
    first = [
        result("torch-2.11", "2.11.0", failed=["a"]),
        result("torch-2.9", "2.9.0"),
        result("python-3.12", "2.14.1"),
    ]
    found = matrix.pages.newest([*first, result("torch-2.11", "2.11.0")])
    assert [each["row"] for each in found] == ["torch-2.9", "torch-2.11", "python-3.12"]
    assert found[1]["failed"] == []


@pytest.mark.parametrize("bad", [{"failed": ["a"]}, {"ended": "no report, exit code 2"}])
def test_a_release_on_which_something_failed_is_outside_of_the_range(matrix: Any, bad: dict[str, Any]) -> None:
    results = [
        result("torch-2.9", "2.9.0"),
        result("torch-2.10", "2.10.1"),
        result("torch-2.11", "2.11.0", tests="tests/core", **bad),
    ]
    assert matrix.pages.ranges([*results, result("torch-2.11", "2.11.0")]) == {
        "python": ["3.11.7", "3.11.7"],
        "torch": ["2.9.0", "2.10.1"],
    }


def test_the_table_stands_between_its_marks_and_names_what_failed(matrix: Any) -> None:
    pages = matrix.pages
    page = f"before\n{pages.BEGIN}\nold\n{pages.END}\nbehind\n"
    refused = {"row": "torch-9", "date": "2026-11-27", "tests": "all", "ended": "not installed: no such release"}
    made = pages.with_tables(page, [result("torch-2.9", "2.9.0", failed=["tests.a::b"], cuda="13.0"), refused])
    assert made.startswith("before\n")
    assert made.endswith(f"{pages.END}\nbehind\n")
    assert "old\n" not in made
    row = "| torch-2.9 | 3.11.7 | torch 2.9.0 | CUDA 13.0 | the whole suite | 3 | 1 | 1 | 2026-11-27 |"
    assert row in made
    assert "| torch-9 |  |  |  | the whole suite |  |  | not installed: no such release | 2026-11-27 |" in made
    assert "- `tests.a::b`" in made


def test_the_page_and_the_ranges_of_doctor_are_those_of_the_results(matrix: Any) -> None:
    """`python -m benchmarks.matrix --pages` makes them again."""
    found = matrix.results()
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.pages.with_tables(page, found) == page
    assert json.loads(matrix.RANGES.read_text(encoding="utf-8")) == matrix.pages.ranges(found)
