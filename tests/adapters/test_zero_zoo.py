"""Every script of the zoo, killed once: it ends as if nothing had been, or it was said why nothing was kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from adapters import zero_unrehearsed, zero_zoo
from adapters.zero_zoo import KEPT, Case
from sample_kit import sampled

CASES = {**zero_zoo.CASES, **zero_unrehearsed.CASES}

LIFE = str(Path(__file__).with_name("zero_life.py"))
# A sample of all kinds; the others are slow.
SAMPLE = {
    "global counter", "global set in the loop, read in a function", "closure with nonlocal", "namespace that counts",
    "killed behind the loop, number of the loss", "killed behind the loop, loss as it is", "resumes by itself, far",
    "shorter at the second time", "loop of a package on the path", "function of an installed package that counts",
    "settings whose attributes are their items", "submodule in use changes", "head that is used at times, zeroed before the step", "tensor that is resized", "settings by exec",
    "list of two names that changes late",
    "size of a log", "file of its own that is there", "time in a closure, and a loss by it", "times that are told",
}  # fmt: skip
WITH_A_KEEPER = {
    "global counter", "killed behind the loop", "killed behind the loop, loss as it is", "early break", "killed behind a break",
    "stride", "backwards", "longer at the second time", "random.Random", "loop in a function with nonlocal",
}  # fmt: skip


def live(
    case: Case, home: Path, root: str, *, again: bool = True, pocket: bool = True
) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    script, package = (home / "scripts", home / case.packaged) if case.packaged else (home, home)
    for place in (script, package):
        place.mkdir(exist_ok=True)
    (script / "train.py").write_text(case.text())
    (package / "helper.py").write_text(case.helper)
    environment = {
        **os.environ, "MARK": str(home / "mark"), "PYTHONPATH": f"{Path(LIFE).parent.parent}{os.pathsep}{package}", "HOLDFAST_DURABLE_EVERY": "1",
        "THREADS": str(case.threads),
        **(dict(case.again) if again else {}), **({"POCKET": "1"} if pocket else {}),
    }  # fmt: skip
    command = [sys.executable, LIFE, root, str(script / "train.py")]
    return forked.run(command, capture_output=True, text=True, env=environment, timeout=60)


def check(case: Case, tmp_path: Path, *, pocket: bool) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "mark").touch()  # nobody dies here
    expected = live(case, undisturbed, "-")
    assert expected.returncode == 0, expected.stderr
    assert "END" in expected.stdout
    home, root = tmp_path / "killed", str(tmp_path / "root")
    first = live(case, home, root, again=False, pocket=pocket)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = live(case, home, root, pocket=pocket)
    assert second.returncode == 0, second.stderr
    assert second.stdout == expected.stdout, first.stderr + second.stderr
    said = [line for line in (first.stderr + second.stderr).splitlines() if "nothing of it is saved" in line]
    if case.expected == KEPT:
        assert not said
        assert "made 0\n" not in second.stderr, "it began anew"
    else:
        assert said, second.stderr
        assert all(case.expected in line for line in said), said


@pytest.mark.parametrize("name", sampled(CASES, *SAMPLE))
def test_a_script_of_the_zoo_is_never_wrong(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, pocket=True)


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize("name", sampled(sorted(WITH_A_KEEPER), "killed behind the loop"))
def test_with_a_keeper_it_is_the_same(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path, pocket=False)


def test_the_samples_are_of_the_zoo() -> None:
    assert len(CASES) >= 60
    assert CASES.keys() >= SAMPLE | WITH_A_KEEPER
