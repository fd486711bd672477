"""Runs of one script as processes: started in a place of their own, waited for, ended with all that they started.

Every run has a directory: what it printed, the steps of its ranks, its checkpoints, and with a fresh copy its working directory. The
sockets of keepers lie elsewhere, for a socket's path may have 107 bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.base import program
from holdfast.testing.contracts.adapter_processes import keepers_under, kill_tree
from holdfast.testing.prove.run_notes import NOTES_VARIABLE, RunNotes
from holdfast.testing.prove.step_log import Life, read_lives

PROGRAM = "holdfast.testing.prove.watched_script"
# In the arguments of the script: a directory that is new in each run.
PLACE = "{dir}"
# How long a program that was told to end is waited for.
END_S = 20.0
TAIL_LINES, TAIL_BYTES = 3, 1 << 14
# Of a working directory so many files are looked at, to tell which ones the script writes.
MAX_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Target:
    """Says what is proved.

    Attributes:
        words: the script, or the module, and its arguments.
        is_module: whether it is a module, as after `python -m`.
        ranks: how many processes it is run with.
        keeps_itself: whether it saves by itself: then it gets no `--checkpoint-dir`.
    """

    words: tuple[str, ...]
    is_module: bool
    ranks: int
    keeps_itself: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """Says who is killed, and when: `moment` is `BEFORE` or `BEHIND` step `step` of this rank's optimizers, counted from 1."""

    rank: int
    step: int
    moment: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Says what became of a run.

    Attributes:
        code: the exit code; None if it was ended because its time was up.
        seconds: how long it ran.
        lives: of each rank.
        output: the last lines of its standard output.
        directory: where its logs are.
    """

    code: int | None
    seconds: float
    lives: dict[int, list[Life]]
    output: tuple[str, ...]
    directory: Path


class ScriptRuns:
    """The runs of one script.

    Args:
        timeout_s: how long one run may take.
        fresh_copy: whether each run has a copy of the working directory.
        popen: as `subprocess.Popen`, for who starts processes in a quicker way.

    Attributes:
        home: as given.
    """

    def __init__(
        self,
        home: Path,
        target: Target,
        *,
        timeout_s: float,
        fresh_copy: bool = False,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.home, self._target, self._timeout_s, self._popen = home, target, timeout_s, popen
        self._fresh_copy = fresh_copy
        self._runtime = Path(tempfile.mkdtemp(prefix="hf-prove-"))

    def run(self, name: str, kill: Kill | None = None) -> Ended:
        """Runs the script once, undisturbed or with a kill; whatever happens, nothing of it runs on."""
        directory = self.home / name
        for each in ("steps", "own"):
            (directory / each).mkdir(parents=True)
        place = Path.cwd()
        if self._fresh_copy:
            home = self.home.resolve()
            place = directory / "work"
            shutil.copytree(
                Path.cwd(),
                place,
                symlinks=True,
                ignore=lambda at, names: [each for each in names if (Path(at) / each).resolve() == home],
            )
        started = time.monotonic()
        with (directory / "output").open("wb") as output, (directory / "errors").open("wb") as errors:
            process = self._popen(
                self._command(directory, place, kill),
                env=self._environment(directory, place, kill),
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                code = self._wait(process)
            finally:
                self._end(process, directory / "steps")
        return Ended(
            code, time.monotonic() - started, read_lives(directory / "steps"), tail(directory / "output"), directory
        )

    def close(self) -> None:
        """Removes the directory of the keepers' sockets."""
        shutil.rmtree(self._runtime, ignore_errors=True)

    def forget(self, name: str) -> None:
        """Removes what a run kept, all but its logs."""
        for each in ("checkpoints", "own", "work"):
            shutil.rmtree(self.home / name / each, ignore_errors=True)

    def _wait(self, process: Any) -> int | None:
        try:
            return int(process.wait(timeout=self._timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def _end(self, process: Any, log: Path) -> None:
        kill_tree(process.pid)
        for stray in strays(log):  # a daemon is nobody's child any more
            kill_tree(stray)
        process.wait(timeout=END_S)
        for keeper in keepers_under(self._runtime):
            kill_tree(keeper.pid)

    def _command(self, directory: Path, place: Path, kill: Kill | None) -> list[str]:
        target = self._target
        words = [word.replace(PLACE, str(directory / "own")) for word in target.words]
        here = Path.cwd()
        script = Path(words[0])
        if not target.is_module and script.is_absolute() and script.is_relative_to(here):
            words[0] = str(place / script.relative_to(here))
        flags = ["--nproc-per-node", str(target.ranks)]
        if kill is None:
            flags += ["--max-restarts", "0"]  # whoever fails undisturbed would fail again
        elif not target.keeps_itself:
            flags += ["--checkpoint-dir", str(directory / "checkpoints")]
        return program.command(PROGRAM, *flags, *(["-m"] if target.is_module else []), *words)

    def _environment(self, directory: Path, place: Path, kill: Kill | None) -> dict[str, str]:
        places = [str(directory / "own"), str(directory / "checkpoints"), *([str(place)] if self._fresh_copy else [])]
        notes = RunNotes(str(directory / "steps"), places)
        if kill is not None:
            notes = RunNotes(notes.log, places, kill.rank, kill.step, kill.moment)
        return {**os.environ, **notes.variable(), "HOLDFAST_RUNTIME_DIR": str(self._runtime)}


def strays(log: Path) -> list[int]:
    """Returns the processes that have the notes of a run in their environment.

    Args:
        log: where the run's steps are written.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            notes = process.environ().get(NOTES_VARIABLE)
            if notes is not None and RunNotes.parse(notes).log == str(log):
                found.append(process.pid)
    return found


def tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """Returns the last lines of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return tuple(file.read().decode(errors="replace").splitlines()[-lines:])


def files_below(place: Path, without: Path) -> dict[str, tuple[int, int]]:
    """Returns time and size of the files below a directory, of a large one those of its first part. The directory
    `without` in it is left out, as hidden ones are.
    """
    found: dict[str, tuple[int, int]] = {}
    for directory, names, files in os.walk(place):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "__pycache__")
        names[:] = [name for name in names if Path(directory, name) != without]
        for name in files:
            path = os.path.join(directory, name)
            try:
                facts = os.lstat(path)
            except OSError:
                continue  # it is gone
            found[os.path.relpath(path, place)] = (facts.st_mtime_ns, facts.st_size)
        if len(found) > MAX_FILES:
            break
    return found
