"""Decides where and when a process of the drill dies: phases, points inside them, and the strike.

Applied in forked children only. `Probe.watch` wraps the functions that make up a phase (save, seal, persist, ...) and
the calls that change a file or a slot. It measures phases in trials without a kill, and carries out the strike of the
others, in one of two styles:

- timed: at the n-th entry of the phase a kernel timer of the victim is armed that delivers SIGKILL after a random
  part of the phase's usual length, so that death comes in the middle of whatever runs then, copies included;
- stepped: the victim dies exactly before or after the n-th file operation or header write inside the phase.

If the victim is another process than the one whose phase it is, it is killed from here, or by the lane that listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.testing.checks.power_cut_disk import cut_power

MEASURE, RECORD = "measure", "record"
# What a record may need at most to be written in one piece (POSIX).
PIPE_BUF = 4096
# Calls of `os` that change what a crash leaves behind.
FILE_CALLS = ("open", "pwrite", "ftruncate", "fsync", "rename", "link", "unlink", "rmdir", "mkdir")
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True, slots=True)
class Strike:
    """The planned death.

    Attributes:
        phase: in which phase of `actor` it comes.
        actor: whose phase it is: `t0` (trainer of rank 0), `k1` (keeper of node 1), ...
        victims: who dies.
        occurrence: in the n-th pass through the phase, counted from 1.
        stepped: at an exact point, else timed.
        fraction: where in the phase, 0 to 1.
        seconds, points: the phase's usual length, measured before.
        cut: how the power of the checkpoints' file system goes at that instant (power_cut_disk.py); 0 if it stays.
    """

    phase: str
    actor: str
    victims: tuple[str, ...]
    occurrence: int
    stepped: bool
    fraction: float
    seconds: float
    points: int
    cut: int = 0


class Journal:
    """The write end of a lane's pipe: one JSON line per fact, each in one piece, also when the writer is killed.

    Attributes:
        life: the life in which the writer began.
    """

    def __init__(self, fd: int, who: str, life: int) -> None:
        self._fd, self._who, self.life = fd, who, life

    def write(self, event: str, **facts: Any) -> None:
        """Appends a fact; blocks when the lane does not read."""
        line = json.dumps({"e": event, "who": self._who, "life": self.life, **facts}, default=str).encode() + b"\n"
        if len(line) > PIPE_BUF:
            line = (
                json.dumps({"e": "fault", "who": self._who, "life": self.life, "what": str(facts)[:2000]}).encode()
                + b"\n"
            )
        os.write(self._fd, line)


class Field(Protocol):
    """Says what a probe must know of the others."""

    def pid_of(self, name: str) -> int:
        """The process id behind a name."""

    def orders(self) -> tuple[int, Strike | None]:
        """Return which life runs, and the strike that is planned for it; a keeper outlives several."""


class Probe:
    """The watcher of one forked process.

    Args:
        who: its name in the trial.
        journal: where facts go.
        field: who else there is, and which life runs.
        mode: MEASURE journals how long phases last, RECORD every file operation (for testing/checks/write_order.py).
    """

    def __init__(self, who: str, journal: Journal, field: Field, *, root: str, mode: str) -> None:
        self._who = who
        self._journal = journal
        self._field = field
        self._root = root
        self._measures = mode == MEASURE
        self._record_files = mode == RECORD
        self._passes: Counter[tuple[int, str]] = Counter()
        self._inside = threading.local()
        self._lock = threading.Lock()

    def watch(self, phases: Mapping[str, Sequence[tuple[Any, str]]], points: Sequence[tuple[Any, str]]) -> None:
        """Wraps what makes up the phases and the points of this process, file operations included."""
        for phase, owners in phases.items():
            for owner, name in owners:
                setattr(owner, name, self._phase(phase, getattr(owner, name)))
        for owner, name in points:
            setattr(owner, name, self._point(getattr(owner, name)))
        for name in FILE_CALLS:
            setattr(os, name, self._file_call(name, getattr(os, name)))

    def _phase(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def passage(*args: Any, **kwargs: Any) -> Any:
            inside = self._inside
            outer = getattr(inside, "phase", None)
            if outer == phase:
                return function(*args, **kwargs)
            former = (outer, getattr(inside, "points", 0), getattr(inside, "strike", None))
            inside.phase, inside.points = phase, 0
            (life, number), began = self._enter(phase), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds, points = time.perf_counter() - began, inside.points
                inside.phase, inside.points, inside.strike = former
                if self._measures:
                    fact = {"life": life, "phase": phase, "pass": number, "seconds": seconds, "points": points}
                    self._journal.write("phase", **fact)

        return passage

    def _enter(self, phase: str) -> tuple[int, int]:
        """Return which life runs, and which pass through the phase in it this is; what is planned for that is begun."""
        life, strike = self._field.orders()
        with self._lock:
            self._passes[life, phase] += 1
            number = self._passes[life, phase]
        fits = strike is not None and (strike.actor, strike.phase, strike.occurrence) == (self._who, phase, number)
        self._inside.strike = (life, strike) if fits and strike is not None and strike.stepped else None
        if fits and strike is not None and not strike.stepped:
            delay_s = strike.fraction * strike.seconds
            self._journal.write("strike", phase=phase, delay_s=delay_s)
            if self._who in strike.victims:
                kill_after(delay_s)
        return life, number

    def _point(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def passing(*args: Any, **kwargs: Any) -> Any:
            self._pass(function.__name__)
            try:
                return function(*args, **kwargs)
            finally:
                self._pass(function.__name__)

        return passing

    def _pass(self, name: str) -> None:
        if getattr(self._inside, "phase", None) is None:
            return
        number = self._inside.points
        self._inside.points = number + 1
        life, strike = getattr(self._inside, "strike", None) or (-1, None)
        if strike is None or number != int(strike.fraction * max(1, strike.points)):
            return
        victims = sorted(strike.victims, key=lambda victim: victim == self._who)  # itself last
        pids = [self._field.pid_of(victim) for victim in victims]
        # Asked after the ids were read: who is stopped right here and goes on in the next life hits nobody.
        if self._field.orders() != (life, strike):
            return
        self._journal.write("strike", phase=strike.phase, point=number, call=name)
        if strike.cut:
            cut_power(self._root, strike.cut)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it is dead already, or not yet born
                os.kill(pid, signal.SIGKILL)

    def _file_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (args[1] & _CHANGES):
                return function(*args, **kwargs)
            subject = _subject(name, args, kwargs) if self._record_files else None
            self._pass(name)
            error: BaseException | None = None
            try:
                return function(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                if subject is not None:
                    absent = isinstance(error, FileNotFoundError)
                    self._journal.write("file", call=name, failed=error is not None, absent=absent, **subject)
                self._pass(name)

        return call


def _subject(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return which files a call is about, as absolute paths."""
    if name in {"pwrite", "ftruncate", "fsync"}:
        return {"path": _path_of(args[0])}
    if name in {"rename", "link"}:
        source = _beneath(args[0], kwargs.get("src_dir_fd"))
        target = _beneath(args[1], kwargs.get("dst_dir_fd"))
        return {"path": target, "source": source, "replaces": name == "rename" and os.path.exists(target)}
    return {"path": _beneath(args[0], kwargs.get("dir_fd"))}


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def _beneath(name: Any, directory: int | None) -> str:
    text = os.fsdecode(name)
    return os.path.abspath(text) if directory is None else os.path.join(_path_of(directory), text)


# --- a timer of the kernel that kills, so that no scheduling of ours shifts the instant -------------------------------

_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _Spec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "value_s", "value_ns"))


_libc = ctypes.CDLL(None, use_errno=True)


def kill_after(delay_s: float) -> None:
    """This process gets SIGKILL from the kernel after `delay_s`, whatever it does then."""
    timer = ctypes.c_void_p()
    event = _Event(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
    if _libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    nanoseconds = max(1, int(delay_s * 1e9))  # zero would disarm it
    spec = _Spec(0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    if _libc.timer_settime(timer, 0, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timer_settime")
