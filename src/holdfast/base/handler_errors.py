"""Tells what a signal's handler of the user's has raised in the middle of our work from what failed in it.

Whoever turns an error into another one, or goes on without it, asks this first: the handler's own leaves as it is.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` passes over a ValueError, which may be a handler's
import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, TracebackType
from typing import Any


def of_a_handler(error: BaseException | None) -> BaseException | None:
    """Returns what a signal's handler of the user's raised while we were at work: the error, or what it was made of; else None."""
    handlers, each = handler_codes(), error
    seen = set[int]()  # `raise error from error` makes a circle
    while each is not None and id(each) not in seen:
        if any(is_of_a_handler(frame, handlers) for frame, _ in traceback.walk_tb(each.__traceback__)):
            return each
        seen.add(id(each))
        each = each.__cause__
    return None


def pass_on(error: BaseException) -> None:
    """Raises what a signal's handler of the user's raised while we were at work; returns where none has."""
    if (theirs := of_a_handler(error)) is not None:
        raise theirs


class forgive(suppress):  # noqa: N801 - a word within `with`, as its base
    """Goes on behind an error of these classes, as `contextlib.suppress` does, but not behind what a signal's handler raised."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        if error is None or not super().__exit__(kind, error, where):
            return False
        pass_on(error)
        return True


@contextmanager
def handlers_later() -> Iterator[None]:
    """Has signals wait whose handlers are the script's: each handler runs behind this. In other threads none runs anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if number not in came:
            came.append(number)

    try:
        for number in range(1, signal.NSIG):
            if callable(handler := _signal.getsignal(number)) and not _is_ours(handler):
                before[number] = handler
                before[number] = _signal.signal(number, note)  # a handler may have set another one in between
        yield
    finally:
        _put_back(before, note, came)


def _put_back(before: dict[int, Any], note: Any, came: list[int]) -> None:
    """Sets handlers where `note` is, then runs those whose signals came; all of them, whatever one raises."""
    try:
        for number, handler in before.items():
            if _signal.getsignal(number) is note:
                _signal.signal(number, handler)
        while came:
            number = came.pop(0)
            if callable(now := _signal.getsignal(number)):
                now(number, sys._getframe())  # a signal of our own would be told to event loops twice
    finally:
        if came or any(_signal.getsignal(number) is note for number in before):
            _put_back(before, note, came)


def _is_ours(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "holdfast"


def is_of_a_handler(frame: FrameType, handlers: set[CodeType | None]) -> bool:
    """Return whether a frame is that of a signal's handler: it is one now, or was given the frame that it interrupts.

    Many a handler sets another one in its place before it does anything else.
    """
    code, caller = frame.f_code, frame.f_back
    if code in handlers:
        return True
    num_named = code.co_argcount + code.co_kwonlyargcount
    num_names = num_named + bool(code.co_flags & inspect.CO_VARARGS)
    if caller is None or num_names < 1:
        return False
    values = [frame.f_locals.get(name) for name in code.co_varnames[:num_names]]
    given = (*values[:num_named], *(values[num_named] or () if num_names > num_named else ()))
    return any(value is caller for value in given)


def handler_codes() -> set[CodeType | None]:
    """Returns the code of each signal's handler."""
    # Of `range`, for `valid_signals()` takes longer.
    return {_code(_signal.getsignal(number)) for number in range(1, signal.NSIG)} - {None}


def _code(handler: Any) -> CodeType | None:
    """The code that a handler runs, if it is written in Python: of a function, a method, a partial, an object's call."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
