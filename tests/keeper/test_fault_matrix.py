"""Faults x phases: real keepers and trainers are hurt at every place that bytes and messages pass, and the course is judged.

The cells stand in `holdfast.testing.faults.cells`, what a job lives through in `.job`; `holdfast drill faults` runs the
same. Three cells and one planted bug run by default; all of them with --slow, and print what came of them with -s. Bugs that are planted on
purpose show that cells and judge are not blind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.model import Version
from holdfast.testing.checks.invariants import Resumed, judge
from holdfast.testing.faults.cells import CELLS, GROUPS, PHASES, Cell, chosen
from holdfast.testing.faults.fault_drill import main, run_cell
from holdfast.testing.faults.faulted_job import Job, run
from holdfast.testing.faults.rig import Rig
from planted import faults as planted
from planted.faults_keeper import BUGS as IN_KEEPERS
from sample_kit import MORE

DEFAULT = {"kill@commit-0", "flip@memory-1"}
CALM = Cell("", "idle", 0, "lifecycle")
PLANTED_DEFAULT = ("past-saves",)


def test_there_are_cells_enough_for_every_phase_and_group() -> None:
    assert len(CELLS) >= 40
    assert set(CELLS) >= DEFAULT
    assert {cell.phase for cell in CELLS.values()} == set(PHASES)
    assert {cell.group for cell in CELLS.values()} == set(GROUPS)
    assert {str(cell) for cell in chosen(("kill@*",), phase="takeover")} == {"kill@takeover-0", "kill@takeover-1"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CELLS]
)
def test_no_fault_in_any_phase_breaks_a_promise(base: Path, name: str) -> None:
    outcome = run(CELLS[name], base)
    found = [f"{invariant}: {what}" for invariant, what in outcome.violations]
    print(f"{name}: {outcome.acknowledged} levels named, came back with {outcome.back}, {len(found)} violations")
    assert found == [], "\n".join((outcome.why, *outcome.evidence))
    assert outcome.acknowledged >= 16, "what is saved before the fault has its levels"


def test_planted_bugs_are_of_every_kind_and_there_are_cells_for_them() -> None:
    kinds = Counter(bug.kind for bug in planted.BUGS.values())
    assert set(kinds) == {"replication", "takeover", "commit", "loading", "retention", "fencing"}
    assert len(planted.BUGS) >= 15
    assert set(planted.BUGS) >= set(IN_KEEPERS)
    assert all(cell in CELLS for bug in planted.BUGS.values() for cell in bug.cells)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PLANTED_DEFAULT else pytest.mark.slow) for name in planted.BUGS]
)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = planted.BUGS[name]
    assert planted.hunt(name)[1] is not None, f"{name} is missed: {bug.what}, in {bug.cells}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({cell for bug in planted.BUGS.values() for cell in bug.cells}))
def test_the_cells_that_find_bugs_are_clean_without_them(name: str) -> None:
    outcome = run_cell(CELLS[name])
    assert outcome.violations == (), "\n".join(outcome.evidence)


@MORE
def test_the_judge_of_the_matrix_is_not_blind(base: Path) -> None:
    """What a bug would leave behind is put into the facts of a good course, and each is reported by its invariant."""
    rig = Rig(base, num_nodes=2)
    job = Job(rig)
    try:
        job.begin()
        job.heal(CALM)
        job.come_back(CALM)
        assert [str(violation) for violation in judge(job.course)] == []
        _spoil(job)
    finally:
        job.close()


def _spoil(job: Job) -> None:
    assert job.life.storage is not None
    newest, older = max(job.life.storage.committed), Version(1, 1)
    one, other = job.resumed
    root = job.rig.base / "ck" / str(Version(2, 100))

    def reported(*resumed: Resumed) -> set[str]:
        job.course.lives[-1].resumed, job.course.lives[-1].storage = list(resumed), job.look()
        return {violation.invariant for violation in judge(job.course)}

    def of(rank: Resumed, version: Version) -> Resumed:
        return replace(rank, version=version, digest=job.life.states[version, rank.rank])

    assert newest == Version(1, 2)
    assert "S1" in reported(of(one, older), of(other, older)), "a durable version is passed over"
    assert "S10" in reported(of(one, older), other), "the ranks load two versions"
    assert "S5" in reported(replace(one, digest="other"), other), "other bytes are loaded"
    (root / "notes.txt").write_text("mine")
    assert reported(one, other) == set(), "what is not ours is nobody's business"
    file = next(root.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "S2" in reported(one, other), "a file is torn"
    file.unlink()
    assert "S2" in reported(one, other), "a file is gone"
    file.write_bytes(whole)
    (root / "manifest.json").unlink()
    assert reported(one, other) & {"S8", "S11", "S13"}, "the newest durable version goes back"
    root = job.rig.base / "ck" / str(newest)
    manifest = (root / "manifest.json").read_bytes()
    (root / "manifest.json").write_bytes(manifest.replace(b'"layout"', b'"layouT"'))
    assert "S7" in reported(one, other), "a manifest has another content than before"


@pytest.mark.slow
def test_the_command_runs_cells_and_says_by_its_exit_code_what_it_found() -> None:
    command = [sys.executable, "-m", "holdfast.testing", "faults", "--cells", "skip@save-1", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    (row,) = [json.loads(line) for line in answer.stdout.splitlines()]
    assert (row["cell"], row["violations"]) == ("skip@save-1", [])


def test_wrong_usage_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cells", "nothing-like-it"]) == 2
    for arguments in (["--phase", "lunch"], ["--jobs", "0"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
    capsys.readouterr()
    assert main(["--list", "--fault", "kill", "--phase", "commit"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"kill@commit-0", "kill@announce-0"}
