"""Signals that come at a chosen call or return of what a test calls, and what their handlers raise there."""

from __future__ import annotations

import inspect
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

Here = Callable[[FrameType, str], bool]
"""Whether a signal comes at this event of `sys.setprofile` (`call`, `return`, `c_call`, ...) of this frame."""


class Strike:
    """One signal, at the first event within its `with` that `here` says yes to.

    What its handler raises must be raised by what is called there. Python itself prints, and goes on, where a weak reference
    or `__del__` called the handler: then `lost` is true.
    """

    def __init__(self, handler: Callable[[], Any], here: Here) -> None:
        self._handler, self._here = handler, here
        self._own = {Strike.__enter__.__code__, Strike.__exit__.__code__}
        self._raises, self._where = False, ""
        self.came = self.lost = False

    def __enter__(self) -> None:
        self._signal, self._hook = signal.signal(signal.SIGUSR1, self._handle), sys.unraisablehook
        sys.unraisablehook = self._lose
        sys.setprofile(self._look)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self._hook
        signal.signal(signal.SIGUSR1, self._signal)
        assert error or self.lost or not self._raises, f"somebody swallowed what the handler raised:\n{self._where}"

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code in self._own or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # what a profile function raises there breaks the interpreter's stack; no handler runs where one yields
        if self._here(frame, event):
            sys.setprofile(None)
            self._where = "".join(traceback.format_stack(frame))
            signal.raise_signal(signal.SIGUSR1)

    def _handle(self, *_: object) -> None:
        self.came = self._raises = True
        self._handler()
        self._raises = False

    def _lose(self, unraisable: Any) -> None:
        self.lost = self.lost or self.came
        if not self.came:
            self._hook(unraisable)


def called(function: Any) -> Here:
    """Where this function begins."""
    return lambda frame, event: event == "call" and frame.f_code is function.__code__


def nth(moment: int, counts: Here = lambda *_: True) -> Here:
    """So many events of those that count, and where it is yes behind that."""
    left = moment

    def here(frame: FrameType, event: str) -> bool:
        nonlocal left
        counted = counts(frame, event)
        left -= counted
        return counted and left <= 0

    return here


def strikes(handler: Callable[[], Any], *, counts: Here = lambda *_: True, every: int = 1) -> Iterator[Strike]:
    """One strike after the other, each `every` events later, until one does not come; what does not count is passed over."""
    moment = 1
    while True:
        yield (strike := Strike(handler, nth(moment, counts)))
        if not strike.came:
            return
        moment += every


def exits() -> None:
    """What a handler does that ends its script."""
    raise SystemExit
