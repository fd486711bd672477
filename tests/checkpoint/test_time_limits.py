"""A wait that is given a time takes that time: neither a keeper that is frozen nor a copy that is slow makes it longer."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from holdfast.base.errors import KeeperLost, LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.save.save_handle import SaveHandle
from holdfast.core.model import Level, Topology, Version
from holdfast.keeper.rpc.announcements import Announced
from keeper.rig import eventually
from kit.checkpointers import Make, Trainee

LIMIT_S = 0.3


class _Frozen:
    """The connection to a keeper that answers nothing."""

    alive = True

    def __init__(self) -> None:
        self.announced = Announced(0, lambda: True)

    def status(self, *, timeout_s: float) -> None:
        time.sleep(timeout_s)
        raise KeeperLost("the keeper did not answer")

    def wake(self) -> bool:
        return False


@pytest.mark.parametrize("level", ["captured", "durable"])
def test_a_wait_asks_a_keeper_that_is_frozen_no_longer_than_it_has_time(level: str) -> None:
    link: Any = SimpleNamespace(client=(client := _Frozen()), last_client=client)
    facts: dict[str, Any] = {"settle": lambda _: None, "topology": Topology(("",), (0,)), "timeout_s": LIMIT_S}
    save = SaveHandle(Version(1, 3), Level.DURABLE, link=link, in_storage=lambda _: False, **facts)
    began = time.monotonic()
    with pytest.raises(LevelNotReached, match="the keeper of this node does not answer"):
        save.wait(level)
    assert time.monotonic() - began < 3 * LIMIT_S  # it was 2 s more


def test_a_flush_asks_a_keeper_that_is_frozen_no_longer_than_it_has_time(make: Make) -> None:
    checkpointer = make(Trainee())
    checkpointer.restore()
    pid = checkpointer.keeper_status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        began = time.monotonic()
        checkpointer.flush(LIMIT_S)
        assert time.monotonic() - began < 3 * LIMIT_S  # it was 2 s, whatever the limit
    finally:
        os.kill(pid, signal.SIGCONT)


def test_who_waits_less_than_a_step_would_ends_no_copy_and_waits_no_longer() -> None:
    fence, goes_on = Fence(timeout_s=30.0, events=Events(), behind_s=60.0), threading.Event()

    def opening() -> Any:
        assert goes_on.wait(60.0)
        return [], lambda _: None

    job = LateCopyJob([], None, lambda _: None, opening=opening)
    fence.start(job)
    began = time.monotonic()
    fence.settle(LIMIT_S)
    assert time.monotonic() - began < 3 * LIMIT_S
    goes_on.set()
    fence.settle()
    assert not job.stop_reason
    fence.close()
