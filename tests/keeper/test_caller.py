"""Calls that end before their answer was taken: nothing that comes with it stays open."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.base.errors import KeeperLost
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.caller import TELL_TIMEOUT_S, Caller, _Waiting
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.latch import Latch
from keeper.rig import eventually

TOLD: dict[str, Any] = {"on_push": lambda _: None, "on_lost": lambda _: None}
ASKED = messages.Prepare(num_bytes=1, num_slots=1)


@pytest.fixture
def ends() -> Iterator[tuple[Caller, frames.Channel]]:
    """A caller, and the other end of its connection."""
    one, two = (frames.Channel(each, where="here") for each in socket.socketpair())
    caller: Any = Caller(one, messages.Welcome(node="n0", pid=1, incarnation=1), **TOLD)
    yield caller, two
    caller.close()
    two.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def answer(channel: frames.Channel) -> None:
    """Answers the next request with a descriptor."""
    number = messages.decode(channel.receive(timeout_s=5)[0]).id
    with open(os.devnull, "rb") as null:
        slots = messages.Slots(id=number, slot_ids=(1,), sent=(1,))
        channel.send(messages.encode(slots), fds=[null.fileno()], timeout_s=5)


def test_a_handler_that_raises_once_the_answer_is_there_leaves_no_descriptor(
    ends: tuple[Caller, frames.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, other = ends
    wait = Latch.wait

    def struck(latch: Latch, timeout_s: float) -> bool:
        assert wait(latch, timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(Latch, "wait", struck)
    before = num_open()
    thread = threading.Thread(target=answer, args=(other,))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        caller.call(ASKED, timeout_s=5)
    thread.join()
    eventually(lambda: num_open() == before)


def test_a_keeper_that_reads_nothing_holds_nobody_up_for_longer_than_a_save_may_wait(
    ends: tuple[Caller, frames.Channel],
) -> None:
    began = 0.0

    def tell() -> None:
        nonlocal began
        while True:
            began = time.monotonic()
            ends[0].tell(messages.Cadence(reason="x" * 10_000))

    with pytest.raises(KeeperLost, match="does not read"):
        tell()
    assert time.monotonic() - began < 2 * TELL_TIMEOUT_S


def test_a_call_whose_request_left_late_waits_no_longer_for_the_answer(
    ends: tuple[Caller, frames.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, _ = ends
    send = frames.Channel.send

    def late(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        send(*args, **kwargs)

    monkeypatch.setattr(frames.Channel, "send", late)
    began = time.monotonic()
    with pytest.raises(KeeperLost, match=r"did not answer within 0\.6 s"):
        caller.call(ASKED, timeout_s=0.6)
    assert time.monotonic() - began < 1.0


def test_an_answer_that_comes_as_its_call_gives_up_leaves_no_descriptor(
    ends: tuple[Caller, frames.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has found who waits, and they leave before it has told them."""
    caller, other = ends
    given, left = _Waiting.answer, threading.Event()

    def late(waiting: _Waiting, message: messages.AnyMessage, fds: list[int]) -> None:
        left.wait(10)
        given(waiting, message, fds)

    monkeypatch.setattr(_Waiting, "answer", late)
    before = num_open()
    thread = threading.Thread(target=answer, args=(other,))
    thread.start()
    with pytest.raises(KeeperLost, match="did not answer"):
        caller.call(ASKED, timeout_s=0.2)
    thread.join()
    eventually(lambda: num_open() > before)
    left.set()
    eventually(lambda: num_open() == before)
