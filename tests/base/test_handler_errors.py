"""What a signal's handler raised is told from what failed in our work."""

from __future__ import annotations

import signal

import pytest

from holdfast.base.events import Events
from holdfast.base.handler_errors import forgive, of_a_handler, pass_on
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
