"""Tests on the simulated device run in a child process, one for each file: it may not be loaded where others fork.

A test with the fixture `sim` is not run by the pytest that collected it. The first of a file starts a pytest for all of
that file that are wanted; the reports of the child are told as if the tests had run here. A child that dies fails the
tests that it has not reported, with the end of its output. Tests that start processes of their own need no child; like
the others they carry the mark `device`, so that they are skipped where no device can be built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import forked

ROOT = Path(__file__).resolve().parent.parent
CHILD = "TEST_SUITE_OF_HOLDFAST_DEVICE_CHILD"  # in a child: the file for its reports
REPORTS = pytest.StashKey[dict[str, list[dict[str, Any]]]]()


def unavailable() -> str | None:
    """Why there is no simulated device here; imports PyTorch."""
    from holdfast.testing.device import build

    return build.unavailable()


def is_child() -> bool:
    return CHILD in os.environ


def belongs_to_child(item: pytest.Item) -> bool:
    return "sim" in getattr(item, "fixturenames", ()) and not _is_skipped(item) and not is_child()


def _is_skipped(item: pytest.Item) -> bool:
    return any(item.iter_markers("skip"))


def prepare(session: pytest.Session) -> None:
    """Build the device before any test's time runs."""
    wanted = [item for item in session.items if item.get_closest_marker("device") and not _is_skipped(item)]
    if wanted and not is_child():
        from holdfast.testing.device import build

        build.build()


def report(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Tell what became of a test in the child of its file, which the first of them starts."""
    reports = item.session.stash.setdefault(REPORTS, {})
    if item.nodeid not in reports:
        reports |= _run_file(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in reports[item.nodeid]:
        told = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        if isinstance(told.longrepr, list):  # of a skipped test; JSON knows no tuple
            told.longrepr = tuple(told.longrepr)
        item.ihook.pytest_runtest_logreport(report=told)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(following)  # what a test before this one left for its folder or file
    return True


def _run_file(first: pytest.Item) -> dict[str, list[dict[str, Any]]]:
    wanted = [item for item in first.session.items if item.path == first.path and belongs_to_child(item)]
    slow = ["--slow"] if first.config.getoption("--slow") else []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "reports"
        file.touch()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *slow]
        answer = forked.run(
            [*command, *(item.nodeid for item in wanted)],
            cwd=ROOT,
            env=os.environ | {CHILD: str(file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        told = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    reports: dict[str, list[dict[str, Any]]] = {item.nodeid: [] for item in wanted}
    for data in told:
        reports[data["nodeid"]].append(data)
    _fail_what_is_missing(reports, wanted, answer)
    return reports


def _fail_what_is_missing(
    reports: dict[str, list[dict[str, Any]]], wanted: list[pytest.Item], answer: subprocess.CompletedProcess[str]
) -> None:
    missing = [item for item in wanted if not any(data["when"] == "teardown" for data in reports[item.nodeid])]
    if not missing and answer.returncode in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        told_failure = any(data["outcome"] == "failed" for all_of_it in reports.values() for data in all_of_it)
        if answer.returncode == pytest.ExitCode.OK or told_failure:
            return
    why = f"the child of this file ended with {answer.returncode}:\n{answer.stdout[-6000:]}"
    for item in missing or wanted[-1:]:
        failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "teardown")
        reports[item.nodeid].append(item.config.hook.pytest_report_to_serializable(config=item.config, report=failed))


def tell_parent(report: pytest.TestReport) -> None:
    """In a child: write a report down for the parent."""
    if is_child():
        with open(os.environ[CHILD], "a", encoding="utf-8") as file:
            file.write(json.dumps(report._to_json() | {"$report_type": "TestReport"}) + "\n")
