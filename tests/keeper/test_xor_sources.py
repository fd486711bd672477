"""Parts of several sources are XORed into one buffer at once, and an error leaves nobody behind who writes to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from holdfast.base.errors import KeeperLost
from holdfast.keeper.replication.xor_sources import Parts, xor_sources

SIZE = 64


def source(salt: int, between: Callable[[], object] = lambda: None) -> Parts:
    """Two parts, of which the second is shorter than what it is XORed into."""
    for at, length in ((0, SIZE), (SIZE, SIZE // 2)):
        between()
        yield at, memoryview(bytes((salt * (at + number)) % 256 for number in range(length)))


def expected(salts: range) -> bytes:
    found = bytearray(2 * SIZE)
    for salt in salts:
        for at, part in source(salt):
            for number, byte in enumerate(part):
                found[at + number] ^= byte
    return bytes(found)


@pytest.mark.parametrize("at_once", [1, 2, 5, 9])
def test_every_part_is_in_however_many_are_read_at_once(at_once: int) -> None:
    found, told = bytearray(2 * SIZE), []
    xor_sources(memoryview(found), map(source, range(1, 6)), at_once, told.append)
    assert found == expected(range(1, 6))
    assert sorted(told) == [0] * 5 + [SIZE] * 5


def test_sources_are_read_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=60)
    found = bytearray(2 * SIZE)
    xor_sources(memoryview(found), [source(salt, meet.wait) for salt in (1, 2, 3)], 3)
    assert found == expected(range(1, 4))


def test_one_after_the_other_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = bytearray(2 * SIZE)
    xor_sources(memoryview(found), map(source, range(1, 6)), 5)
    assert found == expected(range(1, 6))


def test_the_first_error_ends_all_and_closes_all() -> None:
    meet, failed, closed = threading.Barrier(2, timeout=60), threading.Event(), threading.Event()

    def breaks() -> Parts:
        meet.wait()
        try:
            raise KeeperLost("gone")
            yield 0, memoryview(b"")
        finally:
            failed.set()

    def goes_on() -> Parts:
        try:
            meet.wait()
            while True:  # for ever, unless the error ends it
                assert failed.wait(60)
                yield 0, memoryview(b"\1")
        finally:
            closed.set()

    def never() -> Parts:
        raise AssertionError("nothing is begun behind an error")
        yield 0, memoryview(b"")

    with pytest.raises(KeeperLost, match="gone"):
        xor_sources(memoryview(bytearray(SIZE)), (make() for make in (breaks, goes_on, never)), 2)
    assert closed.is_set()
