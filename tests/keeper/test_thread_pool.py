"""Threads on loan: few, none held up by those that wait, none left."""

from __future__ import annotations

import threading

import pytest

from holdfast.keeper.rpc.thread_pool import ThreadPool

TIMEOUT_S = 30.0


def test_work_waits_for_a_thread_and_all_of_it_is_done() -> None:
    thread_pool, at_work, most, done = ThreadPool("test pool", 3), [0], [0], threading.Semaphore(0)
    lock, together = threading.Lock(), threading.Barrier(3)

    def work() -> None:
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        together.wait(TIMEOUT_S)
        with lock:
            at_work[0] -= 1
        done.release()

    for _ in range(30):
        thread_pool.lend(work)

    for _ in range(30):
        assert done.acquire(timeout=TIMEOUT_S)
    assert most[0] == 3
    thread_pool.stop(TIMEOUT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "test pool"]


def test_who_steps_aside_makes_room() -> None:
    """Every piece of work waits for the next one, so one thread at work at once would never end."""
    thread_pool, events = ThreadPool("test pool", 1), [threading.Event() for _ in range(20)]

    def wait_for(number: int) -> None:
        with thread_pool.aside():
            assert events[number + 1].wait(TIMEOUT_S)
        events[number].set()

    for number in range(19):
        thread_pool.lend(lambda number=number: wait_for(number))
    thread_pool.lend(events[19].set)

    assert events[0].wait(TIMEOUT_S)
    thread_pool.stop(TIMEOUT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "test pool"]


def test_work_that_fails_costs_no_thread() -> None:
    thread_pool, done = ThreadPool("test pool", 1), threading.Event()

    def fail() -> None:
        raise ValueError("on purpose")

    thread_pool.lend(fail)
    thread_pool.lend(done.set)

    assert done.wait(TIMEOUT_S)
    thread_pool.stop(TIMEOUT_S)


def test_what_was_lent_before_the_end_is_still_done() -> None:
    thread_pool, done, go = ThreadPool("test pool", 1), [], threading.Event()
    thread_pool.lend(lambda: go.wait(TIMEOUT_S) or None)
    for number in range(5):
        thread_pool.lend(lambda number=number: done.append(number))
    go.set()

    thread_pool.stop(TIMEOUT_S)

    assert done == list(range(5))


def test_work_waits_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit of processes: who lends the work serves everybody, and must not end by that."""
    pool, done = ThreadPool("test", 2), threading.Event()

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        pool.lend(done.set)
    assert not done.is_set()
    pool.lend(lambda: None)
    assert done.wait(20)
    pool.stop(5.0)
