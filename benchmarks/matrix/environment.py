"""Makes one environment, runs tests in it, says how they ended, and removes it."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.matrix.rows import Row

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".venv-matrix"
WHOLE = "all"
_ASK = """
import importlib.metadata, json, platform, sys
import torch
versions = {}
for name in ["torch", *sys.argv[1:]]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "versions": versions, "cuda": torch.version.cuda or ""}))
"""


def run(row: Row, tests: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Returns the result of one row; its environment is there meanwhile and gone afterwards.

    Args:
        row: what is installed.
        tests: paths of tests, instead of those of the row.
        options: more arguments of pytest.
    """
    chosen = [*(tests or row.tests), *options]
    result: dict[str, Any] = {
        "row": row.name,
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "tests": " ".join(chosen) or WHOLE,
    }
    started = time.monotonic()
    with _environment(row) as (python, why):
        if why:
            return result | {"ended": f"not installed: {why}"}
        asked = subprocess.run([python, "-c", _ASK, *row.shown], capture_output=True, text=True, check=False)
        if asked.returncode != 0:
            return result | {"ended": f"torch is not imported: {_last(asked.stderr)}"}
        return (
            result | json.loads(asked.stdout) | _tested(python, chosen) | {"seconds": round(time.monotonic() - started)}
        )


@contextmanager
def _environment(row: Row) -> Iterator[tuple[str, str]]:
    """A Python with everything in it, and why it has not."""
    python = str(PLACE / "bin" / "python")
    shutil.rmtree(PLACE, ignore_errors=True)
    try:
        maker = f"python{row.python}" if row.python else sys.executable
        if shutil.which(maker) is None:
            yield python, f"there is no {maker}"
            return
        why = _failed([maker, "-m", "venv", str(PLACE)])
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(pins) + "\n")
            file.flush()
            own = f".[dev{',' if row.extra else ''}{row.extra}]"
            install = [python, "-m", "pip", "install", "--quiet", "--constraint", file.name]
            yield python, why or _failed([*install, *row.packages, "--editable", own])
    finally:
        shutil.rmtree(PLACE, ignore_errors=True)


def _failed(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return _last(done.stderr) or f"exit code {done.returncode}" if done.returncode != 0 else ""


def _last(text: str) -> str:
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("WARNING", "[notice]"))]
    return next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "")[:200]


def _tested(python: str, chosen: Sequence[str]) -> dict[str, Any]:
    """Runs them and reads the report. One process of xdist runs the tests, so that one that ends it is one failure."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [python, "-m", "pytest", "-n", "1", "--dist", "loadfile", f"--junitxml={report}", *chosen]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            return {"ended": f"no report, exit code {done.returncode}"}
        return counted(report.read_text(encoding="utf-8"))


def counted(report: str) -> dict[str, Any]:
    """Returns how many tests passed and were skipped, and which failed.

    Args:
        report: what pytest wrote, in the form of JUnit.
    """
    passed, skipped, failed = 0, 0, set()
    for case in ET.fromstring(report).iter("testcase"):
        kinds = {part.tag for part in case}
        if kinds & {"failure", "error"}:
            failed.add(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": sorted(failed), "ended": ""}
