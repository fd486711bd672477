"""`holdfast report` reads journals, also those of runs that were cut off."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cli.conftest import Run
from holdfast.base.errors import UsageError
from holdfast.cli import report
from holdfast.elastic.watchdog.run_journal import Journal
from holdfast.keeper.observe.run_summary import newest_run

LINES = [
    {"event": "run", "t": 100.0},
    {"event": "progress", "t": 104.0, "step": 1, "spent": {"START": 3.0}},
    {"event": "progress", "t": 110.0, "step": 9, "spent": {"START": 3.0, "STEP": 5.0, "SAVING": 1.0}},
    {"event": "incident", "t": 112.0, "ranks": [1], "found_s": 0.5, "seconds": {"T1": 1.0}, "first_error": "boom"},
]


def test_two_jobs_that_share_a_journal_are_told_apart(tmp_path: Path) -> None:
    """They have one run id on one node; the newer one is told of."""
    lines = [{"by": 1, "event": "run", "t": 90.0}]
    for line in LINES:
        lines += [{**line, "by": 2}, {"by": 1, "event": "progress", "t": line["t"], "step": 400, "spent": {}}]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone = [{**line, "by": 2} for line in LINES]
    (tmp_path / "alone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alone))
    assert newest_run(tmp_path / "journal.jsonl") == newest_run(tmp_path / "alone.jsonl")


def test_a_keeper_tells_of_the_run_that_saves_to_its_path(tmp_path: Path) -> None:
    """Another job of the same name may have begun later on that node."""
    path = tmp_path / "journal.jsonl"
    begins = [{"event": "run", "t": 90.0, "by": by} for by in (1, 2)]
    roots = [{"event": "works on", "t": 91.0, "root": f"/of/{by}", "by": by} for by in (1, 2)]
    rows = [{**line, "by": by} for line in LINES[1:3] for by in (1, 2)]
    rows += [{"event": "progress", "t": 111.0, "step": 30 * by, "spent": {"STEP": 6.0}, "by": by} for by in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*begins, *roots, *rows)))
    steps = {root: found.steps for root in ("/of/1", "/of/2", "") if (found := newest_run(path, root)) is not None}
    assert steps == {"/of/1": 30, "/of/2": 60, "": 60}
    assert newest_run(path, "/of/another") is None


def test_a_launcher_writes_down_where_its_job_saves(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.works_on("/of/1")
    journal.progress(time.monotonic(), {})
    journal.close(0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("root")) for line in lines] == [
        ("run", None),
        ("works on", "/of/1"),
        ("end", None),
    ]


def test_incidents_of_an_earlier_launcher_are_told(holdfast: Run, tmp_path: Path) -> None:
    """A launcher that was killed and started again writes into the journal of before."""
    later = [{"event": "run", "t": 200.0}, {"event": "progress", "t": 210.0, "step": 20, "spent": {"STEP": 9.0}}]
    lines = [*({**line, "by": 1} for line in LINES), *({**line, "by": 2} for line in later)]
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = json.loads(holdfast("report", str(journal), "--json").stdout)
    assert document["incidents"] == []
    assert [[row["first_error"] for row in run["incidents"]] for run in document["earlier"]] == [["boom"]]
    assert "an earlier run in this journal: 12.0 s, 9 steps, 1 incidents; goes on, or was ended" in (
        holdfast("report", str(journal)).stdout
    )


def test_report_of_a_run_id_a_directory_and_the_newest(holdfast: Run, runtime_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run-a-n0"
    directory.mkdir()
    journal = directory / "journal.jsonl"
    old = json.dumps({"event": "run", "t": 1.0}) + "\n"
    journal.write_text(old + "".join(json.dumps(line) + "\n" for line in LINES) + '{"event": "prog')
    answer = holdfast("report", str(directory), "--json")
    document = json.loads(answer.stdout)
    assert answer.returncode == 1  # an incident, and no good end
    assert document["seconds"]["detection"] == 0.5
    assert [(row["total_s"], row["seconds"]) for row in document["incidents"]] == [(1.0, {"T1": 1.0})]
    assert abs(sum(document["seconds"].values()) - document["wall_s"]) < 0.01
    journal.write_text(journal.read_text() + "\n" + json.dumps({"event": "end", "t": 113.0, "code": 0}) + "\n")
    answer = holdfast("report", str(journal))
    assert answer.returncode == 0
    assert "boom" in answer.stdout
    assert "goodput" in answer.stdout
    assert holdfast("report", "no-such-run").returncode == 2


def test_an_exact_name_wins_over_similar_ones_that_are_newer(
    holdfast: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of `run1-b` was told of, where `run1` was asked for."""
    steps = {"run1-n0": 9, "run1-b-n0": 20, "run1-b-n1": 30}
    for age, (name, step) in enumerate(steps.items()):
        directory = runtime_dir / f"run-{name}"
        directory.mkdir(mode=0o700)
        lines = [LINES[0], {**LINES[1], "step": step}]
        journal = directory / "journal.jsonl"
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.utime(journal, (1e9 + age, 1e9 + age))

    def told(name: str, node: str) -> tuple[int, str]:
        monkeypatch.setenv("HOLDFAST_NODE_LABEL", node)
        answer = holdfast("report", name, "--json")
        return json.loads(answer.stdout)["steps"], answer.stderr

    assert told("run1", "n0") == told("run-run1-n0", "x") == (9, "")
    assert told("run1-b", "n0") == (20, "")
    assert told("run1-b", "elsewhere") == (
        30, "several journals are of run1-b, and the newest is taken: run-run1-b-n1, run-run1-b-n0\n"
    )  # fmt: skip


def test_names_that_only_begin_so_are_refused_where_there_are_several(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest was taken, which may be another job."""
    monkeypatch.setenv("HOLDFAST_NODE_LABEL", "worker-3")
    for name in ("run-a-worker-3", "run-a-big-worker-3", "run-a2-worker-3", "run-b-big-n7", "run-b-bad-n7"):
        (runtime_dir / name).mkdir()
        (runtime_dir / name / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def told(run: str) -> str:
        return report.observed(run)[0].parent.name

    assert [told(run) for run in ("a", "a2", "run-a2", "run-b-big-n7", "b-bad")] == [
        "run-a-worker-3", "run-a2-worker-3", "run-a2-worker-3", "run-b-big-n7", "run-b-bad-n7",
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"no run is called b, and several begin so: run-b-b.*, run-b-b") as caught:
        told("b")
    assert "run-a" not in caught.value.what
    assert caught.value.remedy
    with pytest.raises(UsageError, match="no journal of c"):
        told("c")
