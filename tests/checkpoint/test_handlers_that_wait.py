"""Signals' handlers that strike while their thread begins to wait, and wait themselves."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.keeper.rpc.caller import _Waiting

DEADLINE_S = 60.0
MOST = 1000


def _job() -> LateCopyJob:
    return LateCopyJob([], None, lambda _: None)


@pytest.mark.parametrize("make", [_Waiting, _job])
def test_a_handler_keeps_nothing_from_the_thread_that_it_waits_for(make: Callable[[], Any]) -> None:
    """At each moment of a wait: another thread tells that it is over, and the handler waits for that thread."""
    left = 0

    def look(_: FrameType, event: str, __: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    def handle(*_: object) -> None:
        other = threading.Thread(target=done.set, daemon=True)
        other.start()
        other.join(1.0)
        struck.append(not other.is_alive())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for moment in range(1, MOST):
            done, struck, left = make().done, list[bool](), moment
            sys.setprofile(look)
            done.wait(0.01)
            sys.setprofile(None)
            if left > 0:
                break
            assert struck == [True], f"moment {moment}"
            assert done.wait(0.0)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    assert 5 < moment < MOST


def test_who_closes_while_its_thread_holds_the_fence_waits_for_nothing() -> None:
    """As a handler does that strikes within a wait for the copying thread."""
    fence = Fence(timeout_s=1.0, events=Events())
    job = _job()
    fence.start(job)
    assert job.done.wait(DEADLINE_S)
    began = time.monotonic()
    with fence._wake:
        fence.close()
    assert time.monotonic() - began < 10.0
