"""Puts doors through their checks: processes that are started, heard, killed and cleaned up.

One Workshop holds the directories of one door's checks and a runtime directory for the keepers. Everything that was
started is ended by `close`: launchers and ranks with SIGKILL, keepers by the directory on their command line, so nothing
else on the machine is ever touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

KEEPER_MODULE = "holdfast.keeper"
MARK = "door "


class Violation(AssertionError):
    """A door did not do what it must."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a door's script.

    Attributes:
        checkpoints: the directory it is given.
        steps: it ends when so many steps are made, those of earlier runs included.
        plain: without holdfast: under plain torchrun, holdfast switched off.
        changed: with a model that earlier checkpoints do not fit.
    """

    checkpoints: Path
    ranks: int
    steps: int
    plain: bool = False
    changed: bool = False


@dataclass(slots=True)
class Told:
    """Holds what the ranks of one run printed.

    Attributes:
        starts: rank -> the step it went on with.
        steps: (rank, step) -> digest.
        wholes: step -> digest of the whole tensors.
        code: exit code of the launcher.
        output: everything that was printed, for messages.
    """

    starts: dict[int, int] = field(default_factory=dict)
    steps: dict[tuple[int, int], str] = field(default_factory=dict)
    wholes: dict[int, str] = field(default_factory=dict)
    code: int = 0
    output: str = ""

    def hear(self, line: str) -> None:
        """Takes one line of output; torchrun may have put `[rank0]:` before it."""
        self.output += line
        _, mark, text = line.partition(MARK + "{")
        if not mark:
            return
        try:
            said = json.loads("{" + text)
        except ValueError:
            return  # two ranks wrote into one line
        if "start" in said:
            self.starts[said["rank"]] = said["start"]
        elif "step" in said:
            self.steps[said["rank"], said["step"]] = said["digest"]
        elif "whole" in said:
            self.wholes[said["at"]] = said["whole"]


class Startable(Protocol):
    """A door, as far as it is needed to run it."""

    @property
    def start(self) -> Callable[[Task], Sequence[str]]:
        """The command line of a task."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for every run."""


class Workshop:
    """Directories and processes of one door's checks.

    Args:
        home: an empty directory.
        popen: as `subprocess.Popen`, for who starts processes in a quicker way.
        timeout_s: seconds that one run may take.
    """

    def __init__(self, home: Path, *, popen: Callable[..., Any] = subprocess.Popen, timeout_s: float = 150.0) -> None:
        self._home = home
        self._popen = popen
        self._timeout_s = timeout_s
        # Sockets lie in a directory of their own: a socket's path may have 107 bytes.
        self._runtimes = Path(tempfile.mkdtemp(prefix="hf-door-"))
        self._running: list[Any] = []
        self._lives = 0
        self.reference: Told | None = None

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def directory(self, name: str) -> Path:
        return self._home / name

    def run(self, door: Startable, task: Task, *, kill_at: int | None = None, fails: bool = False) -> Told:
        """Runs a task to its end, or until all ranks have finished step `kill_at` and everything but the keepers is killed.

        Args:
            door: how it is started.
            task: what is run.
            kill_at: the step; None lets it end by itself.
            fails: it may end with an error.

        Raises:
            Violation: it ended with an error, or not in time, or before `kill_at`.
        """
        told = Told()
        with tempfile.TemporaryFile("w+") as errors:
            process = self._popen(
                list(door.start(task)),
                env=self._environment(door, task),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            self._running.append(process)
            # A run that hangs is cut off, and then its output ends.
            watch = threading.Timer(self._timeout_s, kill_tree, [process.pid])
            watch.start()
            try:
                last = set() if kill_at is None else {(rank, kill_at) for rank in range(task.ranks)}
                killed = _listen(process, told, last)
                told.code = process.wait(timeout=self._timeout_s)
            finally:
                watch.cancel()
                watch.join()
                kill_tree(process.pid)
            process.stdout.close()
            self._running.remove(process)
            errors.seek(0)
            told.output += errors.read()
        if kill_at is not None and not killed:
            raise Violation(f"it ended with code {told.code} before step {kill_at}: {told.output[-4000:]}")
        if told.code and not killed and not fails:
            raise Violation(f"it ended with code {told.code}: {told.output[-4000:]}")
        return told

    def forget_memory(self) -> None:
        """Kills the keepers, with all they hold; the next run has a new runtime directory."""
        for keeper in keepers_under(self._runtimes):
            _kill(keeper.pid)
        self._lives += 1

    def close(self) -> None:
        """Ends everything and removes the runtime directories."""
        for process in self._running:
            kill_tree(process.pid)
            process.wait(timeout=20)
            process.stdout.close()
        self._running.clear()
        self.forget_memory()
        shutil.rmtree(self._runtimes, ignore_errors=True)

    def _environment(self, door: Startable, task: Task) -> dict[str, str]:
        runtime = self._runtimes / str(self._lives)
        runtime.mkdir(mode=0o700, exist_ok=True)
        environment = {
            **os.environ,
            "HOLDFAST_RUNTIME_DIR": str(runtime),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            **door.environment,
        }
        environment.pop("HOLDFAST_DISABLE", None)
        return {**environment, "HOLDFAST_DISABLE": "1"} if task.plain else environment


def _listen(process: Any, told: Told, last: set[tuple[int, int]]) -> bool:
    """Hears the process until its output ends; kills it when all these ranks and steps were told, and says whether."""
    killed = False
    for line in process.stdout:
        told.hear(line)
        if last and not killed and told.steps.keys() >= last:
            kill_tree(process.pid)
            killed = True
    return killed


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and everything below it, keepers excepted. Those that are gone already do not matter."""
    try:
        root = psutil.Process(pid)
        root.suspend()  # it starts nobody while its children are looked for
        family = root.children(recursive=True)
    except psutil.Error:
        return
    for process in family:
        try:
            if KEEPER_MODULE not in process.cmdline():
                _kill(process.pid)
        except psutil.Error:
            continue  # ended by itself meanwhile
    _kill(pid)


def _kill(pid: int) -> None:
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return  # ended by itself meanwhile
    except psutil.Error as error:
        raise Violation(f"process {pid} cannot be killed: {error}") from error


def keepers_under(directory: Path) -> list[psutil.Process]:
    """The keepers whose runtime directory is this one, or lies in it."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if KEEPER_MODULE in words and any(Path(word).is_relative_to(directory) for word in words):
            found.append(process)
    return found
