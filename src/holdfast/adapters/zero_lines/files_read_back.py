"""Sees files by which a script hands something from one step to a later one: no version has what is in them.

    watch = FileWatch(root)               as the script begins
    watch.loop_begins()
    reason, warning = watch.step_made()   behind every step; what was read since the last one is judged

Two habits are wrong behind a restart. A file that is read and then written in the same step is read again by the step that is made
again, with what it wrote itself. And a file that the script writes before its loop, and in it, is written anew by a restart: the steps
that read it find what is no longer so, and who only fills it loses what stood there, which is told.

What is opened is told by Python's own audit events, and by `torch.save`, which opens its file in C; that a file was written is seen by its
time and size, so it does not matter who wrote it. Not seen: files that other libraries of C open by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

# So many files are looked at of one step, and of what was written before the loop.
MAX_FILES = 64
_CODE = (".py", ".pyc", ".so", ".pth")
# Their caches hold code, which is the same whether a step is made once or twice.
_COMPILERS = ("torch._inductor.", "torch._dynamo.pgo", "triton.")
_WRITES = os.O_WRONLY | os.O_RDWR
_Facts = tuple[int, int, int]


class FileWatch:
    """Watches the files of one run of a script, as the thread and the process that made it open them.

    Args:
        without: directory of the checkpoints, which are no concern of the script's.
        loads: whether the script may read, behind its loop too, what it has saved by `torch.save`.
    """

    def __init__(self, without: str, *, loads: bool = False) -> None:
        self._loads, self._saved = loads, set[str]()
        self._without = os.path.join(os.path.abspath(without), "")
        self._owner = (os.getpid(), threading.get_ident())
        self._began_ns = 0
        self._written: dict[str, bool] = {}  # whether from its beginning, at least once
        self._read: dict[str, _Facts] = {}
        self._made = set[str]()  # written from their beginning in this step: who makes it again reads the same
        self._reason = ""
        self._told = False
        self._held = ""  # a file that was opened to be written from its beginning, and stays open as the loop begins
        _Hook.watch(self)

    def loop_begins(self) -> None:
        """Notes that the loop begins: what was written before is written again by a restart."""
        self._began_ns = time.time_ns()
        self._read.clear()
        self._made.clear()
        self._held = next((path for path in _open_files() if self._written.get(path)), "")

    def step_made(self) -> tuple[str, str]:
        """Returns why a restart would read something else, and what it would lose; empty if neither."""
        for path, facts in self._read.items():
            if not self._reason and _facts(path) != facts:
                self._reason = (
                    f"{os.path.relpath(path)!r}, a file, is read in the loop and then written, and is in no version"
                )
        self._read.clear()
        self._made.clear()
        warning = ""
        for path, anew in self._written.items() if not self._told else ():
            facts = _facts(path)
            if anew and facts[0] > self._began_ns:
                self._told = True
                if self._loads and path in self._saved:
                    self._reason = self._reason or _anew(path, "which the script may load")
                    return self._reason, ""
                warning = (
                    f"{os.path.relpath(path)!r} is written before the loop and in it: a restart writes it anew, without what the "
                    f"steps before it had put there"
                )
                break
        if self._held and not self._told:
            self._told = True
            warning = f"{os.path.relpath(self._held)!r} is open for writing as the loop begins: a restart writes it anew, without what the steps before it had put there"
        return self._reason, warning

    def end(self) -> None:
        """Watches no more."""
        _Hook.forget(self)

    def saves(self, path: str) -> None:
        """A file is about to be written by `torch.save`."""
        self._saved.add(os.path.abspath(path))
        self.opened(path, os.O_WRONLY | os.O_TRUNC)

    def opened(self, path: str, flags: int) -> None:
        """A file is about to be opened."""
        if self._owner != (os.getpid(), threading.get_ident()) or path.endswith(_CODE):
            return
        path = os.path.abspath(path)
        if path.startswith(self._without) or _is_none_of_the_scripts(sys._getframe(1)):
            return
        if flags & _WRITES:
            if not self._began_ns and len(self._written) < MAX_FILES and not path.startswith(("/dev/", "/proc/")):
                self._written[path] = self._written.get(path, False) or not flags & os.O_APPEND
            if flags & (os.O_TRUNC | os.O_EXCL):
                self._made.add(path)
        elif self._began_ns and path not in self._read and path not in self._made and len(self._read) < MAX_FILES:
            if os.path.isdir(path):  # on its way out
                return
            facts = _facts(path)
            if path in self._written and facts[0] > self._began_ns:
                self._reason = self._reason or _anew(path, "and read")
            self._read[path] = facts


class _Hook:
    """Python's audit events: a hook cannot be taken away again, so there is one for all runs, which is idle between them."""

    _installed = False
    _watch: FileWatch | None = None

    @classmethod
    def watch(cls, watch: FileWatch) -> None:
        cls._watch = watch
        if not cls._installed:
            cls._installed = True
            sys.addaudithook(cls._heard)
            torch.save = cls._heard_of(torch.save)

    @classmethod
    def forget(cls, watch: FileWatch) -> None:
        if cls._watch is watch:
            cls._watch = None

    @classmethod
    def _heard_of(cls, save: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(save)
        def wrapped(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            watch = cls._watch
            if watch is not None and isinstance(f, str | os.PathLike):
                watch.saves(os.fsdecode(f))
            save(obj, f, *args, **kwargs)

        return wrapped

    @classmethod
    def _heard(cls, event: str, arguments: Any) -> None:
        watch = cls._watch
        if watch is None or event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str) and isinstance(flags, int):
            watch.opened(path, flags)


def _open_files() -> list[str]:
    """Lists the files that this process has open, where the system tells."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _anew(path: str, why: str) -> str:
    return f"{os.path.relpath(path)!r}, a file, is written before the loop and in it, {why}: a restart writes it anew"


def _is_none_of_the_scripts(frame: FrameType | None) -> bool:
    """Tell whether a file is opened for holdfast or for a compiler: on the way up to the script there is a frame of it."""
    seen = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "__main__":
            return False
        if name.startswith(_COMPILERS):
            return True
        if name.startswith("holdfast."):
            if seen or name != __name__:
                return True
        else:
            seen = True
        frame = frame.f_back
    return False


def _facts(path: str) -> _Facts:
    """Returns when a file was written, how large it is, and which one; nothing of what is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
