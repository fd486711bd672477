"""Scripts with loops inside each other: killed where it hurts, they end as if nothing had been, or it is said why nothing was kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from adapters.nested_zoo import CASES, KEPT, Case

LIFE = str(Path(__file__).with_name("zero_life.py"))
# A sample of all kinds, with one kill each; all others are slow.
SAMPLE = {
    "epochs of a function": "2,3",
}  # fmt: skip


def live(case: Case, home: Path, root: str, kill: str, *, again: bool = True) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    (home / "train.py").write_text(case.script())
    environment = {
        **os.environ, "MARK": str(home / "mark"), "DIE": kill, "POCKET": "1", "PYTHONPATH": str(Path(LIFE).parent.parent),
        **(dict(case.again) if again else {}),
    }  # fmt: skip
    command = [sys.executable, LIFE, root, str(home / "train.py")]
    return forked.run(command, capture_output=True, text=True, env=environment, timeout=60)


def ends(told: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in told.stdout.splitlines() if line.startswith("END")]


def made(told: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in told.stderr.splitlines() if line.startswith("made")]


def kills() -> list[Any]:
    return [
        pytest.param(name, kill, marks=[] if SAMPLE.get(name) == kill else [pytest.mark.slow])
        for name, case in CASES.items()
        for kill in case.kills
    ]


@pytest.mark.parametrize(("name", "kill"), kills())
def test_a_script_with_loops_in_loops_is_never_wrong(name: str, kill: str, tmp_path: Path) -> None:
    case = CASES[name]
    if "tqdm" in case.text:
        pytest.importorskip("tqdm")
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "mark").touch()  # nobody dies here
    expected = live(case, undisturbed, "-", kill)
    assert expected.returncode == 0, expected.stderr
    assert ends(expected)
    home, root = tmp_path / "killed", str(tmp_path / "root")
    first = live(case, home, root, kill, again=False)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = live(case, home, root, kill)
    assert second.returncode == 0, second.stderr
    assert ends(second) == ends(expected), first.stderr + second.stderr
    said = [line for line in (first.stderr + second.stderr).splitlines() if "nothing of it is saved" in line]
    if case.expected == KEPT:
        assert not said
        assert made(second)[:1] != made(expected)[:1], "it began anew"
    else:
        assert said, second.stderr
        assert all(case.expected in line for line in said), said


def test_the_samples_are_of_the_zoo() -> None:
    assert len(CASES) >= 40
    assert all(kill in CASES[name].kills for name, kill in SAMPLE.items())
