"""The documentation site: links between pages, tables, and a strict build where its tools are installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("website.pages")


def test_the_page_of_figures_has_a_table_for_each_benchmark_and_none_for_other_results(
    pages: ModuleType, tmp_path: Path
) -> None:
    figures = importlib.import_module("website.figures").figures
    row = {"metric": "stall_ratio", "value": 0.9, "unit": "", "goal": "<= 1.1"}
    (tmp_path / "stall.jsonl").write_text(json.dumps({"machine": {"cpu": "X"}}) + "\n" + json.dumps(row) + "\n")
    (tmp_path / "versions.jsonl").write_text(json.dumps({"row": "torch-2.14", "machine": "x86_64, 2 cores"}) + "\n")
    made = figures(tmp_path)
    assert "## stall" in made
    assert "0.9 of &lt;= 1.1, met" in made
    assert "versions" not in made
    assert "`stall_ratio`" in figures(ROOT / "benchmarks" / "results")


@pytest.mark.parametrize(
    ("place", "link", "led"),
    [
        ("elastic.md", "[a](watchdog.md#incidents)", "[a](watchdog.md#incidents)"),
        ("elastic.md", "[a](../README.md)", "[a](project/readme.md)"),
        ("project/readme.md", "[`a`](docs/spec/format.md#x)", "[`a`](../spec/format.md#x)"),
        ("spec/format.md", "[a](../../benchmarks/README.md)", "[a](../project/benchmarks.md)"),
        ("project/readme.md", "[a](src/holdfast/__init__.py)", "a"),
        ("project/readme.md", "[a](docs/gone.py)", "[a](docs/gone.py)"),
        ("elastic.md", "[a](https://pytorch.org) [b](#below)", "[a](https://pytorch.org) [b](#below)"),
        ("elastic.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(pages: ModuleType, place: str, link: str, led: str) -> None:
    assert pages.with_links(link, place, lambda path: (ROOT / path).exists()) == led


def test_cells_with_bars_and_line_ends_stay_one_cell(pages: ModuleType) -> None:
    assert pages.table(("a", "b"), [("x | y", "1\n2")]) == "| a | b |\n| --- | --- |\n| x \\| y | 1 2 |"


def test_every_setting_and_error_is_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    reference = importlib.import_module("website.reference")
    settings, errors, texts = reference.settings(), reference.error_codes(), reference.help_texts()
    assert "| `fence_timeout_s` | `1.0` |  | how long an optimizer step may wait" in settings
    assert "| [HF401](../troubleshooting.md" not in errors, "no such code"
    assert "| [HF400](../troubleshooting.md#hf400-memoryrefused) | `MemoryRefused` |" in errors
    assert "## holdfast verify" in texts
    assert "## holdfast status" in texts


def _row_of(text: str, name: str) -> tuple[str, str]:
    """The beginning of a metric's help, and what is said of its kind."""
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    _, told, kind = row.split(" | ")
    return told[:16], kind.removesuffix(" |")


def test_every_metric_is_on_its_page_and_one_without_help_fails_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    metrics = importlib.import_module("website.metrics")
    made = metrics.metrics(ROOT / "src" / "holdfast")
    keepers, _, trainers = made.partition("## Counters of a trainer")
    assert _row_of(keepers, "holdfast_slot_sealed_bytes") == (
        "Images in a slot",
        "gauge, bytes, `rank`, `replica`, `slot`",
    )
    assert _row_of(keepers, "holdfast_takeovers_total") == ("Times at which t", "counter")
    assert "holdfast_save_seconds" not in keepers, "a trainer counts it, and no port serves it"
    assert _row_of(trainers, "save_seconds") == ("Time in calls to", "counter, seconds")
    (tmp_path / "keeper").mkdir()
    (tmp_path / "keeper" / "new.py").write_text('self._events.count("new_bytes", 1)\n')
    with pytest.raises(ValueError, match="new_bytes is counted and not declared"):
        metrics.metrics(tmp_path)
    monkeypatch.setitem(metrics.COUNTERS, "takeovers", " ")
    with pytest.raises(ValueError, match="takeovers has no help text"):
        metrics.metrics(ROOT / "src" / "holdfast")


def test_every_scenario_is_on_its_page_as_it_is_played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    scenarios = importlib.import_module("website.scenarios")
    folder = ROOT / "tests" / "core" / "scenarios"
    made = scenarios.tested(folder)
    lines = set(made.splitlines())
    for path in folder.glob("*.txt"):
        assert f"{{#{path.stem}}}" in made
        blocks = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert set(blocks) <= lines, path.name
    assert scenarios.story("# stage: archive\n#\n# A *b*\n# c.\n\ndo\n----\n# told\n", "x") == (
        "A \\*b\\* c.\n\n```text\ndo\n----\n# told\n```"
    )
    (tmp_path / "novel_one.txt").write_text("# A story.\n")
    with pytest.raises(ValueError, match="'novel' a title"):
        scenarios.tested(tmp_path)
    with pytest.raises(ValueError, match="begin with a comment"):
        scenarios.story("do\n----\nnothing\n", "x")


def test_coverage_is_summed_up_by_folder_and_what_is_least_covered_is_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    covered = importlib.import_module("website.covered")

    def file(*counts: int) -> dict[str, dict[str, int]]:
        return {"summary": dict(zip(covered.COUNTS, counts, strict=True))}

    report, to = tmp_path / "report.json", tmp_path / "covered.json"
    files = {"src/holdfast/core/a/x.py": file(30, 30, 10, 10), "/far/src/holdfast/core/a/y.py": file(70, 20, 10, 0)}
    report.write_text(json.dumps({"files": files | {"src/holdfast/core/a/__init__.py": file(0, 0, 0, 0)}}))
    covered.main(str(report), str(to))
    counted = json.loads(to.read_text())
    assert counted == {"core/a/x.py": [30, 30, 10, 10], "core/a/y.py": [70, 20, 10, 0]}
    page = covered.covered(counted)
    assert "| `core/a` | 100 | 50% | 20 | 50% |" in page
    assert "| `all` | 100 | 50% | 20 | 50% |" in page
    assert "| `core/a/y.py` | 70 | 29% | 10 | 0% |" in page
    assert "x.py" not in page, "all of it ran"
    assert "Not measured yet" in covered.covered({})


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs the extra docs: make docs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "website" / "mkdocs.yml"),
    ]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], capture_output=True, text=True, check=False, timeout=200, cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    api = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="holdfast.checkpoint.checkpointer.checkpointer.Checkpointer.restore"' in api
