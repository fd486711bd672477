"""Whether this thread holds a lock, asked at any moment, also by a signal's handler."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import holdfast
from holdfast.tiers.wire.lock_owner import is_mine


def test_it_is_mine_from_the_step_that_takes_it_to_the_one_that_lets_go() -> None:
    """At each moment that a handler may come: nobody else can take what is mine, and can what is not."""
    lock, seen = threading.RLock(), list[bool]()
    asked = threading.Condition(lock)

    def handle(*_: object) -> None:
        taken = list[bool]()

        def take() -> None:
            if lock.acquire(timeout=0.0):
                lock.release()
                taken.append(True)

        other = threading.Thread(target=take)
        other.start()
        other.join()
        seen.append(is_mine(asked))
        assert seen[-1] is not bool(taken)

    def look(_: FrameType, __: str, ___: object) -> None:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGUSR1)
        sys.setprofile(look)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        sys.setprofile(look)
        with lock, asked:
            asked.wait(0.01)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    assert not is_mine(asked)
    assert [seen[0], seen[-1]] == [True, False]
    assert True in seen[seen.index(False) :], "a wait took it again"


def test_no_condition_of_the_threads_of_the_script_is_taken_by_its_own_with() -> None:
    """That is written in Python: an error of a signal's handler in it would keep the lock for ever. `with` takes its RLock in one step."""
    for path in (Path(holdfast.__file__).parent / "checkpoint").rglob("*.py"):
        text = path.read_text()
        made = re.findall(r"self\.(\w+) = threading\.Condition\((.*)\)", text)
        assert all(lock and f"with self.{name}:" not in text for name, lock in made), path


def test_nobody_asks_the_standard_library_for_what_it_keeps_to_itself() -> None:
    for path in Path(holdfast.__file__).parent.rglob("*.py"):
        assert "._is_owned" not in path.read_text(), path
