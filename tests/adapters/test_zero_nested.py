"""Scripts with loops inside each other: killed where it hurts, they end as if nothing had been, or it is said why nothing was kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from adapters.growing_zoo import GROWING
from adapters.nested_zoo import CASES, KEPT, Case
from adapters.staying_zoo import STAYING
from holdfast.adapters.zero_lines.files_read_back import FileWatch
from holdfast.adapters.zero_lines.reach.attributes import silence_writers

LIFE = str(Path(__file__).with_name("zero_life.py"))
# A sample of all kinds, with one kill each; all others are slow.
SAMPLE = {
    "epochs of a function": "2,3", "inline": "0,6", "generator that draws step by step": "2,3",
    "numbers in numbers, order drawn between": "2,6",
    "workers that stay and draw": "2,3", "writer of TensorBoard": "2,3", "files that are only written": "2,3",
    "file that is read and written": "0,4",
    "best state of all epochs": "1,3", "order that a tensor of later steps tells": "1,3", "tensor of all epochs of two names": "2,3",
    "batches that are asked for": "2,3",
    "tensor of its own that an optimizer steps": "2,3",
    "weights that are read from a path that the time of the start names": "2,3",
    "name that nobody can see to be drawn": "2,3",
    "pictures of a generator": "2,3", "predictions of an epoch, put together": "2,3", "views of a buffer that is written": "0,4",
    "window and counter that come to be in the loop": "2,3", "what is drawn by how many numbers are there": "2,3",
}  # fmt: skip
WITH_A_KEEPER = {
    "epochs of a function": "2,3", "three loops": "1,1,5", "inline": "2,6", "two trainings": "b,0,3",
    "workers that stay, in a class": "1,0", "history of tensors": "2,3",
}  # fmt: skip
ALL = {**CASES, **STAYING, **GROWING}


def live(
    case: Case, home: Path, root: str, kill: str, *, again: bool = True, pocket: bool = True
) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    (home / "train.py").write_text(case.script())
    if case.package:
        (home / "site-packages").mkdir(exist_ok=True)
        (home / "site-packages" / "shelf.py").write_text(case.package)
    environment = {
        **os.environ, "MARK": str(home / "mark"), "DIE": kill, "PYTHONPATH": str(Path(LIFE).parent.parent),
        "HOLDFAST_DURABLE_EVERY": "1", **(dict(case.again) if again else {}), **({"POCKET": "1"} if pocket else {}),
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
        for name, case in ALL.items()
        for kill in case.kills
    ]


def check(case: Case, kill: str, tmp_path: Path, *, pocket: bool) -> None:
    if "tqdm" in case.text:
        pytest.importorskip("tqdm")
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "mark").touch()  # nobody dies here
    expected = live(case, undisturbed, "-", kill)
    assert expected.returncode == 0, expected.stderr
    assert ends(expected)
    home, root = tmp_path / "killed", str(tmp_path / "root")
    first = live(case, home, root, kill, again=False, pocket=pocket)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = live(case, home, root, kill, pocket=pocket)
    assert second.returncode == 0, second.stderr
    assert ends(second) == ends(expected), first.stderr + second.stderr
    said = [line for line in (first.stderr + second.stderr).splitlines() if "nothing of it is saved" in line]
    if case.expected == KEPT:
        assert not said
        assert made(second)[:1] != made(expected)[:1], "it began anew"
    else:
        assert said, second.stderr
        assert all(case.expected in line for line in said), said


@pytest.mark.parametrize(("name", "kill"), kills())
def test_a_script_with_loops_in_loops_is_never_wrong(name: str, kill: str, tmp_path: Path) -> None:
    check(ALL[name], kill, tmp_path, pocket=True)


@pytest.mark.parametrize("loads", [False, True])
def test_weights_that_are_saved_before_the_loop_and_in_it_are_told(tmp_path: Path, *, loads: bool) -> None:
    watch, path = FileWatch(str(tmp_path / "root"), loads=loads), tmp_path / "best.pt"
    try:
        torch.save({}, path)
        watch.loop_begins()
        torch.save({}, path)
        os.utime(path, (2 * time.time(), 2 * time.time()))  # clocks of files are coarse
        reason, warning = watch.step_made()
    finally:
        watch.end()
    assert "best.pt' is written before the loop and in it" in warning if not loads else not warning
    assert "which the script may load" in reason if loads else not reason


def test_a_rehearsal_is_not_held_up_by_a_queue_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    writer = type("EventFileWriter", (), {"add_event": lambda _, event: told.append(event), "flush": told.clear})
    module = types.SimpleNamespace(EventFileWriter=writer)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", module)
    silence_writers()
    writer().add_event("loss")
    writer().flush()
    assert not told


def test_a_file_that_stays_open_is_told_if_a_restart_begins_it(tmp_path: Path) -> None:
    watch = FileWatch(str(tmp_path / "root"))
    try:
        with (tmp_path / "log").open("a") as log, (tmp_path / "new").open("w") as new:
            new.write("0")
            watch.loop_begins()
            log.write("1")
            log.flush()
            os.utime(log.name, (2 * time.time(), 2 * time.time()))
            _, warning = watch.step_made()
            assert watch.step_made() == ("", "")
        assert "new' is open for writing as the loop begins: a restart writes it anew" in warning
    finally:
        watch.end()


def test_a_file_that_a_step_makes_and_reads_itself_hands_nothing_on(tmp_path: Path) -> None:
    """Temporary files and directories, and what a compiler keeps; a file that was there before is told."""
    watch, path = FileWatch(str(tmp_path / "root")), tmp_path / "notes"
    try:
        path.write_text("of before")
        watch.loop_begins()
        with tempfile.TemporaryDirectory() as directory:
            other = Path(directory) / "made"
            other.write_text("1")
            assert other.read_text() == "1"
        with tempfile.NamedTemporaryFile("r+") as file:
            file.write("2")
            assert Path(file.name).read_text() == ""
        compiler = {"__name__": "torch._inductor.codecache"}
        exec(
            "try: open(path)\nexcept OSError: pass\npath.write_text('code')",
            compiler | {"path": tmp_path / "cached"},
        )
        assert watch.step_made() == ("", "")
        path.write_text(path.read_text() + " and now")
        reason, _ = watch.step_made()
    finally:
        watch.end()
    assert "notes', a file, is read in the loop and then written" in reason


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "inline" else [pytest.mark.slow]) for name in WITH_A_KEEPER]
)
def test_with_a_keeper_loops_in_loops_are_the_same(name: str, tmp_path: Path) -> None:
    check(ALL[name], WITH_A_KEEPER[name], tmp_path, pocket=False)


def test_the_samples_are_of_the_zoo() -> None:
    assert len(ALL) == len(CASES) + len(STAYING) + len(GROWING) >= 70
    assert all(kill in ALL[name].kills for name, kill in (*SAMPLE.items(), *WITH_A_KEEPER.items()))
