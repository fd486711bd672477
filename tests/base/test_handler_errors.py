"""What a signal's handler raised is told from what failed in our work."""

from __future__ import annotations

import signal
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from holdfast.base import handler_errors
from holdfast.base.events import Events
from holdfast.base.handler_errors import forgive, handlers_later, of_a_handler, pass_on
from kit.strikes import Strike, called


def test_errors_in_a_circle_are_looked_through_once() -> None:
    itself, one, two = OSError(), OSError(), OSError()
    itself.__cause__, one.__cause__, two.__cause__ = itself, two, one
    assert of_a_handler(itself) is None
    assert of_a_handler(one) is None


@pytest.mark.parametrize("deep", [False, True])
def test_an_error_of_a_handler_is_raised_again_and_another_is_not(*, deep: bool) -> None:
    def handle(*_: object) -> None:
        raise OSError("of the script")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except OSError as error:
        outer = RuntimeError("of ours")
        outer.__cause__ = error
        with pytest.raises(OSError, match="of the script"):
            pass_on(outer if deep else error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    pass_on(OSError("of ours"))


def test_what_is_forgiven_is_no_handlers_own() -> None:
    def fails() -> None:
        raise TimeoutError

    def works() -> None:
        raise FileNotFoundError

    with forgive(OSError):
        works()
    with pytest.raises(ValueError, match="other"), forgive(OSError):
        raise ValueError("other")
    strike = Strike(fails, called(works))
    with pytest.raises(TimeoutError), strike, forgive(OSError):
        works()
    assert strike.came


def test_what_a_handler_raises_in_an_observer_of_events_is_no_fault_of_the_observer() -> None:
    events, seen = Events(), list[str]()
    events.subscribe(lambda event: seen.append(event.name))

    def fails() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError), Strike(fails, lambda frame, _: frame.f_code.co_name == "<lambda>"):
        events.emit("first")
    events.emit("second")
    assert seen == ["second"]


def test_handlers_run_behind_what_may_not_be_broken_off_each_of_them() -> None:
    ran: list[str] = []

    def first(number: int, _: FrameType | None) -> None:
        ran.append("first")
        raise TimeoutError

    def second(number: int, _: FrameType | None) -> None:
        ran.append("second")

    def come() -> None:
        for number in (*before, *before):
            signal.raise_signal(number)
        ran.append("within")

    before = {
        number: signal.signal(number, each) for number, each in ((signal.SIGUSR1, first), (signal.SIGUSR2, second))
    }
    try:
        with pytest.raises(TimeoutError), handlers_later():
            come()
        assert ran == ["within", "first", "second"]
        assert [signal.getsignal(number) for number in before] == [first, second]
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@pytest.mark.parametrize("at_end", [False, True], ids=["at its begin", "at its end"])
def test_a_handler_that_sets_another_one_in_its_place_is_not_undone(
    monkeypatch: pytest.MonkeyPatch, *, at_end: bool
) -> None:
    """As the first Ctrl-C does in many scripts, for the second one to end them."""

    def once(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)

    set_handler, left = handler_errors._signal.signal, [signal.SIGUSR1]

    def sets(number: int, handler: Any) -> Any:
        if not at_end and number == signal.SIGUSR1 and left:
            signal.raise_signal(left.pop())
        found = set_handler(number, handler)
        if at_end and handler is once and left:
            signal.raise_signal(left.pop())
        return found

    before = signal.signal(signal.SIGUSR1, once)
    monkeypatch.setattr(handler_errors, "_signal", SimpleNamespace(signal=sets, getsignal=signal.getsignal))
    try:
        with handlers_later():
            pass
        assert not left
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
