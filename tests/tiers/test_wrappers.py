"""The wrappers of a backend: attempts and time are bounded, so many verbs run at once and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from holdfast.base.errors import StorageBusy, StorageError
from holdfast.tiers.backends.concurrency_limit import Limited
from holdfast.tiers.backends.interface import Backend, Properties
from holdfast.tiers.backends.retry import Policy, Retrying


class Store:
    """A backend whose every read does `verb`."""

    properties = Properties("fake", "somewhere", has_temporaries=False)

    def __init__(self, verb: Callable[[], bytes]) -> None:
        self.verb, self.calls = verb, 0

    def read(self, name: str, **_: object) -> bytes:
        self.calls += 1
        return self.verb()


def busy() -> bytes:
    raise StorageBusy("the store failed: 503")


def retrying(store: Store, policy: Policy) -> tuple[Backend, list[float]]:
    pauses: list[float] = []
    return Retrying(store, policy, sleep=pauses.append), pauses  # type: ignore[arg-type]


def test_pauses_double_up_to_a_bound_and_scatter() -> None:
    store = Store(busy)
    backend, pauses = retrying(store, Policy(attempts=8, first_pause_s=1.0, max_pause_s=5.0))
    with pytest.raises(StorageBusy, match="given up after 8 attempts"):
        backend.read("x")
    assert store.calls == 8
    for pause, most in zip(pauses, (1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0), strict=True):
        assert most / 2 <= pause <= most
    assert len({round(pause / most, 3) for pause, most in zip(pauses, (1.0, 2.0, 4.0, 5.0), strict=False)}) > 1


def test_after_so_much_time_no_attempt_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("holdfast.tiers.backends.retry.time.monotonic", lambda: now[0])

    def slow() -> bytes:
        now[0] += 25.0
        return busy()

    store = Store(slow)
    with pytest.raises(StorageBusy, match=r"after 3 attempts in 75\.0 s"):
        retrying(store, Policy(attempts=100, total_s=60.0))[0].read("x")


def test_only_what_may_pass_by_itself_is_tried_again() -> None:
    def refuse() -> bytes:
        raise StorageError("the path refuses: Input/output error")

    store = Store(refuse)
    backend, pauses = retrying(store, Policy())
    with pytest.raises(StorageError, match="Input/output"):
        backend.read("x")
    assert (store.calls, pauses) == (1, [])


def test_no_more_verbs_run_than_are_allowed_and_nobody_waits_for_ever() -> None:
    here, gate = threading.Semaphore(0), threading.Event()

    def held() -> bytes:
        here.release()
        assert gate.wait(30)
        return b""

    store = Store(held)
    backend = Limited(store, 2, turn_timeout_s=0.05)  # type: ignore[arg-type]
    readers = [threading.Thread(target=backend.read, args=("x",)) for _ in range(2)]
    for reader in readers:
        reader.start()
    assert here.acquire(timeout=30)
    assert here.acquire(timeout=30)
    try:
        third = threading.Thread(target=_refused, args=(backend, refusals := []))
        third.start()
        third.join(30)
        assert not third.is_alive()
        assert refusals == ["too many requests are under way and none of them ends"]
        assert store.calls == 2
    finally:
        gate.set()
        for reader in readers:
            reader.join(30)
    assert backend.read("x") == b"", "a turn that ended is given to the next"


def _refused(backend: Backend, refusals: list[str]) -> None:
    try:
        backend.read("x")
    except StorageBusy as error:
        refusals.append(error.what)
