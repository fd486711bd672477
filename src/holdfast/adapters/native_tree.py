"""Has what adapters for frameworks with files of their own share: plain trees, and the framework's own files in the
background.

A framework hands over nested state with objects of its own in it (a loss scaler, an address). `plain` turns those that
the adapter lists into dicts that holdfast can save, `live` turns them back; nothing else is accepted, and no name that
comes from a file is ever imported. `NativeWriter` writes the files that the framework itself reads, from a copy in
memory, and the tracker file last: it never names a directory in which a file is missing or half written.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.base.errors import LevelNotReached
from holdfast.base.replacing import replacing

logger = logging.getLogger(__name__)

_KIND, _FACTS = "holdfast.kind", "holdfast.facts"
_SIZE, _DTYPE, _PAIRS = "torch.Size", "torch.dtype", "pairs"
LOOK_EVERY_S = 0.05
# Copies in memory that may wait for the disk; a save that would need one more waits.
MAX_WAITING = 1

# Name in the tree -> the class it stands for.
Classes = Mapping[str, type]


def plain(value: Any, classes: Classes) -> Any:
    """The tree with listed objects, and dicts with other keys than strings and numbers, as dicts of two words; tensors are
    detached, enumerations become their values.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, torch.Size):
        return {_KIND: _SIZE, _FACTS: list(value)}
    if isinstance(value, torch.dtype):
        return {_KIND: _DTYPE, _FACTS: str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        return plain(value.value, classes)
    if isinstance(value, Mapping) and any(type(key) not in (str, int) for key in value):
        return {_KIND: _PAIRS, _FACTS: [[plain(key, classes), plain(item, classes)] for key, item in value.items()]}
    if isinstance(value, Mapping):
        tree = {key: plain(item, classes) for key, item in value.items()}
        return OrderedDict(tree) if isinstance(value, OrderedDict) else tree
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(plain(item, classes) for item in value)
    for name, kind in classes.items():
        if type(value) is kind:
            return {_KIND: name, _FACTS: plain(vars(value), classes)}
    return value  # a plain value, or one that the save refuses by its place


def live(value: Any, classes: Classes) -> Any:
    """The reverse of `plain`. What names an unlisted class stays a dict."""
    if isinstance(value, dict):
        name, facts = value.get(_KIND), value.get(_FACTS)
        if name == _SIZE:
            return torch.Size(facts)  # type: ignore[arg-type]  # a list of numbers
        if name == _PAIRS and isinstance(facts, list):
            return {live(key, classes): live(item, classes) for key, item in facts}
        if name == _DTYPE:
            found = getattr(torch, str(facts), None)
            return found if isinstance(found, torch.dtype) else value
        if isinstance(name, str) and name in classes and isinstance(facts, dict):
            made: Any = object.__new__(classes[name])
            for key, item in facts.items():
                object.__setattr__(made, key, live(item, classes))
            return made
        return type(value)((key, live(item, classes)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value)(live(item, classes) for item in value)
    return value


def copied(value: Any) -> Any:
    """The tree with tensors that nobody else changes, in host memory; objects that are not containers stay."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, OrderedDict) or type(value) is dict:
        return type(value)((key, copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Native:
    """One directory of the framework, as far as this rank writes it.

    Attributes:
        files: path -> what torch.save writes.
        awaited: every file of all ranks that must stand before the tracker may name the directory; used by rank 0.
        tracker: (path, text) of the framework's own pointer to its newest directory; None on other ranks.
        since_s: files that were last written before this (time.time) are of an earlier save of the same name.
    """

    files: Mapping[Path, Any]
    awaited: Sequence[Path] = ()
    tracker: tuple[Path, str] | None = None
    since_s: float = 0.0


@dataclass(slots=True)
class NativeWriter:
    """Writes one directory after the other in a thread of its own.

    Attributes:
        timeout_s: how long rank 0 waits for the files of the others, and a save for those before it.
        failed: why the files of the last save that was tried are not complete; empty if they are.
        left_out: why those of the last save were not tried; empty if they were.
    """

    timeout_s: float
    failed: str = ""
    left_out: str = ""
    _waiting: queue.Queue[Native | None] = field(default_factory=lambda: queue.Queue(MAX_WAITING))
    _thread: threading.Thread | None = None

    def put(self, native: Native) -> None:
        """Queues a directory; waits while another one is queued already, and leaves this one out after `timeout_s`.

        Training goes on: holdfast's own version stands.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast native files", daemon=True)
            self._thread.start()
        self.left_out = ""
        try:
            self._waiting.put(native, timeout=self.timeout_s)
        except queue.Full:
            self.leave_out(f"those of earlier saves were not written within {self.timeout_s:g} s")

    def leave_out(self, reason: str) -> None:
        """The files of the last save are not tried; the next `flush` says so."""
        self.left_out = reason
        logger.warning("the framework's own files of a save are left out: %s", reason)

    def settle(self) -> bool:
        """Return whether everything that was put has been tried, after a wait of at most twice `timeout_s`."""
        tried = self._waiting.all_tasks_done
        with tried:
            return tried.wait_for(lambda: not self._waiting.unfinished_tasks, 2 * self.timeout_s)

    def flush(self) -> None:
        """Waits until everything that was put is written.

        Raises:
            LevelNotReached: the last one is not, with the reason.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=2 * self.timeout_s)
            thread.join(2 * self.timeout_s)
        if self.failed or self.left_out or (thread is not None and thread.is_alive()):
            reason = self.failed or self.left_out or "it takes too long"
            raise LevelNotReached(f"the framework's own files are not complete: {reason}")

    def _run(self) -> None:
        while (native := self._waiting.get()) is not None:
            try:
                self._write(native)
                self.failed = ""
            except Exception as error:  # top of the thread; training goes on, holdfast's own version stands
                logger.exception("the framework's own files were not written")
                self.failed = f"{type(error).__name__}: {error}"
            self._waiting.task_done()
        self._waiting.task_done()

    def _write(self, native: Native) -> None:
        for path, tree in native.files.items():
            durably(path, lambda file, tree=tree: torch.save(tree, file))  # type: ignore[misc]
        if native.tracker is not None:
            _await(native.awaited, native.since_s, self.timeout_s)
            path, text = native.tracker
            durably(path, lambda file: file.write(text.encode()))


def durably(path: Path, write: Callable[[Any], object]) -> None:
    """A file that is whole under its name, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    for directory in (path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _await(paths: Sequence[Path], since_s: float, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while missing := [path for path in paths if not _stands(path, since_s)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(missing)} files of other ranks are missing, the first is {missing[0]}")
        time.sleep(LOOK_EVERY_S)  # other hosts write them; no file system tells


def _stands(path: Path, since_s: float) -> bool:
    try:
        return path.stat().st_mtime >= since_s
    except FileNotFoundError:
        return False
