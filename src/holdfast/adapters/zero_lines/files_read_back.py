"""Sees files by which a script hands something from one step to a later one: no version has what is in them.

    watch = FileWatch(root)               as the script begins
    watch.loop_begins()
    reason, warning = watch.step_made()   behind every step; what was read since the last one is judged

Three habits are wrong behind a restart. A file that is read and then written in the same step, or written at its end and then read, is
read again by the step that is made again, with what it wrote itself. A step that trains by how large a file of the script's is, whether it
is there, or what lies in its directory, is told something else (`outside_values` finds these in the text). And a file that the script
writes before its loop, and in it, is written anew by a restart: the steps that read it find what is no longer so, and who only fills it
loses what stood there, which is told.

What is opened is told by Python's own audit events, and by `torch.save`, which opens its file in C; that a file was written is seen by its
time and size, so it does not matter who wrote it. Not seen: files that other libraries of C open by themselves.
"""

from __future__ import annotations

import functools
import glob
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import xxhash

from holdfast.base.handler_errors import forgive, pass_on

# So many files are looked at of one step, and of what was written before the loop.
MAX_FILES = 64
# So many files that came to be in the loop, or went.
MAX_BORN = 4096
_CODE = (".py", ".pyc", ".so", ".pth")
# Their caches hold code, which is the same whether a step is made once or twice.
_COMPILERS = ("torch._inductor.", "torch._dynamo.pgo", "triton.")
_WRITES = os.O_WRONLY | os.O_RDWR
_Facts = tuple[int, int, int]
# What asks only whether a file is there.
_THERE = {"exists", "lexists", "isfile", "isdir", "is_file", "is_dir"}
_TRUTH = ("True", "False")
# Audit events, and how many of what they tell are paths.
_EVENTS = {"open": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}


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
        self._ours = set[str]()  # opened to be written, at any time
        self._born = set[str]()  # came to be in the loop, or went
        self._asked: dict[str, tuple[_Facts, bool, str]] = {}
        self._judged = set[str]()  # of which a version says what they are
        self._step_ns = 0  # when the last step was made
        self._made = set[str]()  # written from their beginning in this step: who makes it again reads the same
        self._reason = ""
        self._told = False
        self._held = ""  # a file that was opened to be written from its beginning, and stays open as the loop begins
        _Hook.watch(self)

    def loop_begins(self) -> None:
        """Notes that the loop begins: what was written before is written again by a restart."""
        self._began_ns = self._step_ns = time.time_ns()
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
        self._step_ns = time.time_ns()
        for path, (facts, there, what) in self._asked.items():
            if not self._reason and self._is_other(path, facts, there=there):
                self._reason = _asked(path, what)
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

    def asked(self, ask: Any, args: Sequence[Any], what: str, *, ends: bool) -> None:
        """Something is about to be asked of a file, by which the script trains.

        Args:
            ask: the function or method that is called.
            args: what it is given.
            what: which call it is, and where its answer goes.
            ends: whether only the end of a loop hangs on it: somebody else may have made the file, to stop the script.
        """
        mine = getattr(ask, "__self__", None)
        name = getattr(ask, "__name__", "")
        if callable(getattr(mine, "writable", None)):
            with forgive(ValueError):  # it is closed
                if mine is not None and mine.writable():
                    self._reason = self._reason or _asked(str(getattr(mine, "name", mine)), what)
            return
        path = mine if isinstance(mine, os.PathLike) else args[0] if args else "."
        if not isinstance(path, str | os.PathLike) or self._owner != (os.getpid(), threading.get_ident()):
            return
        path = os.path.abspath(os.fsdecode(path))
        while glob.has_magic(path) and not os.path.exists(path):
            path = os.path.dirname(path)
        if path in self._made or path.startswith(self._without):
            return
        there = name in _THERE
        if self._is_other(path, None, there=there):
            self._reason = self._reason or _asked(path, what)
        elif len(self._asked) < MAX_FILES:
            self._asked.setdefault(path, (_facts(path), there, what))
            if not ends:
                self._judged.add(path)

    def answers(self) -> dict[str, list[str]]:
        """Returns what the files, by which steps were trained, are as of now, and for what they were asked: a version says it."""
        return {
            path: [_answer(path, there=there), what]
            for path, (_, there, what) in self._asked.items()
            if path in self._judged
        }

    def why_other(self, answers: Mapping[str, Sequence[str]]) -> str:
        """Returns which file is another one than as a version said; empty if none is: who was killed had made it since, or it is not here."""
        for path, (answer, what) in answers.items():
            if _answer(path, there=answer in _TRUTH) != answer:
                return _asked(path, what)
        return ""

    def _is_other(self, path: str, facts: _Facts | None, *, there: bool) -> bool:
        """Tell whether a file is another one than as the loop began, or than by these facts, by what the script has done.

        Args:
            path: of a file or a directory.
            facts: what it was as it was asked for.
            there: whether only that it is there counts.
        """
        if there:
            return path in self._born
        if os.path.isdir(path):
            within = os.path.join(path, "")
            return any(each.startswith(within) for each in self._born)
        now = _facts(path)
        return path in self._ours and (now[0] > self._began_ns if facts is None else now != facts)

    def moved(self, *paths: str) -> None:
        """Files or directories are about to come to be, or to go."""
        if self._began_ns and self._owner == (os.getpid(), threading.get_ident()):
            if len(paths) == 2 and os.path.abspath(paths[0]) in self._made:
                self._made.add(os.path.abspath(paths[1]))
            self._born.update(os.path.abspath(path) for path in paths if len(self._born) < MAX_BORN)

    def opened(self, path: str, flags: int) -> None:
        """A file is about to be opened."""
        if self._owner != (os.getpid(), threading.get_ident()) or path.endswith(_CODE):
            return
        path = os.path.abspath(path)
        if path.startswith(self._without) or _is_none_of_the_scripts(sys._getframe(1)):
            return
        if flags & _WRITES:
            if len(self._ours) < MAX_BORN:
                self._ours.add(path)
            if self._began_ns and len(self._born) < MAX_BORN and not os.path.exists(path):
                self._born.add(path)
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
            elif path in self._ours and facts[0] > self._step_ns:
                self._reason = self._reason or (
                    f"{os.path.relpath(path)!r}, a file, is written in the loop and then read, and is in no version"
                )
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
        if watch is None or event not in _EVENTS:
            return
        if event != "open":
            paths = [path for path in arguments[: _EVENTS[event]] if isinstance(path, str | bytes | os.PathLike)]
            if arguments[-1] == -1:  # else they are no paths of this directory
                watch.moved(*map(os.fsdecode, paths))
            return
        path, _, flags = arguments
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str) and isinstance(flags, int):
            watch.opened(path, flags)


def _open_files() -> list[str]:
    """Lists the files that this process has open, where the system tells."""
    found: list[str] = []
    with forgive(OSError):
        for number in os.listdir("/proc/self/fd"):
            with forgive(OSError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _answer(path: str, *, there: bool) -> str:
    """Returns what a step is told of a file or a directory."""
    with forgive(OSError):
        if there:
            return str(os.path.lexists(path))
        if os.path.isdir(path):
            return xxhash.xxh3_64_hexdigest("/".join(sorted(os.listdir(path))).encode("utf-8", "surrogateescape"))
        return f"{os.stat(path).st_size} bytes"
    return "nothing"


def _asked(path: str, what: str) -> str:
    return f"{os.path.relpath(path)!r}, a file, is written or made by the loop, and {what}: a restart is told something else; train by nothing that is in no version"


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
    except (OSError, ValueError) as error:
        pass_on(error)
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)
