"""What a signal's handler raises where a library takes errors of that class for an answer."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.checkpoint.checkpointer.stop_signal import StopSignal
from holdfast.keeper.observe import degraded_notice
from holdfast.tiers.wire.frames import _PlainLink
from kit.checkpointers import Make, Trainee
from kit.strikes import strikes

OWN = "the script's own"


@contextmanager
def _struck(kind: type[OSError]) -> Iterator[Callable[..., Any]]:
    """Gives what a signal comes within, whose handler raises such an error."""

    def handle(*_: object) -> None:
        raise kind(errno.EIO, OWN)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield lambda *_: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda stream: stream.send(memoryview(b"1"), ()),
        lambda stream: stream.receive(1),
        lambda stream: stream.receive_into(memoryview(bytearray(1))),
    ],
    ids=["send", "receive", "receive into"],
)
def test_an_error_of_a_handler_that_says_blocked_is_not_the_lines(call: Callable[[_PlainLink], object]) -> None:
    stream = _PlainLink.__new__(_PlainLink)
    with _struck(BlockingIOError) as strikes_there:
        sock: Any = SimpleNamespace(sendmsg=strikes_there, recvmsg=strikes_there, recv_into=strikes_there)
        stream._sock, stream._waits = sock, False
        with pytest.raises(BlockingIOError, match=OWN):
            call(stream)


def test_an_error_of_a_handler_that_says_no_such_file_is_not_the_notes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer: Any = make(Trainee(), memory_budget="1KB")
    checkpointer.restore()
    place = checkpointer._run.saver._place
    with _struck(FileNotFoundError) as strikes_there, monkeypatch.context() as patch:
        patch.setattr(os, "unlink", strikes_there)
        with pytest.raises(FileNotFoundError, match=OWN):
            degraded_notice.withdraw(place)
    assert place.notice.exists()


def test_an_error_of_a_handler_leaves_the_one_that_is_set_for_sigterm() -> None:
    """The strikes tell of one that was passed over."""

    def handle() -> None:
        raise ValueError(OWN)

    before = signal.getsignal(signal.SIGTERM)
    for moment, strike in enumerate(strikes(handle)):  # noqa: B007
        stop = StopSignal("")
        with suppress(ValueError), strike:
            stop.install()
            stop.remove()
        stop.remove()
        signal.signal(signal.SIGTERM, before)
    assert moment > 5
