"""Several streams to one place: what is at once, what is in order, and what an error of one of them ends."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, HoldfastError, StorageError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.backends import posix_io
from holdfast.tiers.backends.interface import Chunks
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.backends.parallel_streams import (
    FIRST_STREAMS,
    MOST_REQUESTS,
    MOST_STREAMS,
    TRIALS_BETWEEN,
    UNIT_BYTES,
    StreamCount,
    Streams,
    requests_at_once,
)
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.samples import STAMP, bundle, page_memory, piece, random_image, ref_of

V1 = Version(1, 10)
PATIENCE_S = 30.0


# How many.


def test_twice_as_many_as_long_as_that_is_faster() -> None:
    count = StreamCount()
    seen = []
    for _ in range(6):
        seen.append(count.now)
        count.learn(count.now, 100.0 * count.now)
    assert seen == [8, 16, 32, 32, 32, 32]
    assert count.now == MOST_STREAMS


def test_one_step_back_where_more_gain_nothing_and_another_look_later() -> None:
    count = StreamCount()
    count.learn(8, 100.0)
    count.learn(16, 109.0)
    assert count.now == FIRST_STREAMS
    for _ in range(TRIALS_BETWEEN):
        count.learn(8, 100.0)
    assert count.now == FIRST_STREAMS
    count.learn(8, 100.0)
    assert count.now == 2 * FIRST_STREAMS


def test_half_as_many_after_a_failure_and_for_a_while() -> None:
    count = StreamCount()
    count.learn(8, 100.0)
    count.failed(8)  # began before the last change
    assert count.now == 16
    for now in (16, 8, 4, 2, 1):
        count.failed(now)
    assert count.now == 1
    count.learn(1, 100.0)
    assert count.now == 1


def test_a_trial_of_another_number_says_nothing() -> None:
    count = StreamCount()
    count.learn(32, 1e9)
    assert count.now == FIRST_STREAMS


def test_what_requests_hold_in_memory_is_little_beside_the_object() -> None:
    assert requests_at_once(10 << 20) == FIRST_STREAMS
    assert requests_at_once(1 << 30) == 16
    assert requests_at_once(100 << 30) == MOST_REQUESTS
    assert requests_at_once(150 << 30, 16 << 20) == MOST_REQUESTS


# Order, bounds, ends.


class Meeting:
    """Works that wait until so many are under way."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self.under_way = self.most = 0

    def work(self, number: int, *, meet: bool) -> int:
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            if meet:
                self._barrier.wait(PATIENCE_S)
            return number
        finally:
            with self._lock:
                self.under_way -= 1


def test_so_many_are_under_way_and_are_told_in_order() -> None:
    meeting, told = Meeting(FIRST_STREAMS), list[int]()
    with Streams(StreamCount(most=FIRST_STREAMS), MOST_STREAMS, told.append) as streams:
        for number in range(1, 41):
            streams.put(partial(meeting.work, number, meet=True))
    assert told == list(range(1, 41))
    assert meeting.most == FIRST_STREAMS


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_never_more_than_may_be(at_once: int) -> None:
    meeting = Meeting(1)
    with Streams(StreamCount(), at_once, lambda _: None) as streams:
        for number in range(50):
            streams.put(partial(meeting.work, number, meet=False))
            assert len(streams._running) < at_once
    assert meeting.most <= at_once


def test_the_first_error_ends_all_and_nothing_runs_afterwards() -> None:
    begun, told, failed = list[int](), list[int](), threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        if number == 2:
            failed.set()
            raise OSError("the second failed")
        failed.wait(PATIENCE_S)
        return number

    def put_all() -> None:
        with Streams(StreamCount(), 8, told.append) as streams:
            for number in range(100):
                streams.put(partial(work, number))

    with pytest.raises(OSError, match="the second failed"):
        put_all()
    assert len(begun) <= FIRST_STREAMS + 1
    assert told in ([], [0], [0, 1])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast stream")]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_the_threads_that_the_system_allows_do_all(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told, started, real = list[int](), list[threading.Thread](), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Streams(StreamCount(), 8, told.append) as streams:
        for number in range(1, 31):
            streams.put(partial(int, number))
    assert told == list(range(1, 31))
    assert len(started) == allowed


def test_an_error_after_the_last_was_put_is_heard() -> None:
    def work() -> int:
        raise OSError("late")

    with pytest.raises(OSError, match="late"), Streams(StreamCount(), 8, lambda _: None) as streams:
        streams.put(work)


# A file by several streams.

NUM_TOGETHER = 4  # of the first streams
NUM_BYTES = NUM_TOGETHER * UNIT_BYTES + 12345


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Plain, unless the test asks for both."""
    path = tmp_path / "key"
    path.write_text(bytes(range(32)).hex() + "\n")
    path.chmod(0o600)
    key = str(path) if getattr(request, "param", "plain") == "encrypted" else ""
    made = open_storage(tmp_path / "root", Events(), encryption=KeySource(key))
    made.claim()
    return made


class Image:
    """A bundle's image in memory that is aligned as a slot's."""

    def __init__(self) -> None:
        one = bundle("big-0", piece("w", "U8", (NUM_BYTES,)))
        made = random_image(one)
        self.view = page_memory(len(made))
        self.view[:] = made
        self.ref = ref_of(one)
        self.seal = image_format.seal(one.bundle_id, self.view)

    def write(self, store: Storage, *, at: Callable[[int], None] = lambda _: None) -> BundleFile:
        return store.bundles.write(V1, self.ref, self.seal, self.view, stamp=STAMP, progress=at)


@pytest.fixture(scope="module")
def image() -> Image:
    return Image()


def read_back(store: Storage, file: BundleFile, image: Image) -> None:
    """All of the file, by both ways of reading, and the proof of what lies there."""
    view, told = page_memory(file.length), list[int]()
    store.bundles.read_into(V1, file, view, told.append)
    assert view == image.view
    assert sum(told) == file.length
    view[:] = bytes(file.length)
    store.bundles.read_chunks_into(V1, file, 0, view)
    assert view == image.view
    store.bundles.verify(V1, file)


def names(store: Storage) -> list[str]:
    return [name for directory in (str(V1), ".tmp") for name, _ in store._backend.listing(directory)]


def patched(
    monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[[Callable[..., int], int, Any, int], int]
) -> None:
    """`os.pwrite` or `os.preadv` of this test: large pieces only, for others use them too."""
    real = getattr(os, call)

    def changed(descriptor: int, data: Any, at: int, *flags: int) -> int:
        size = len(data) if call == "pwrite" else len(data[0])
        if size >= posix_io.PAGE and not any(flags):
            return act(real, descriptor, data, at)
        return int(real(descriptor, data, at, *flags))

    monkeypatch.setattr(os, call, changed)


@pytest.mark.parametrize("store", ["plain", "encrypted"], indirect=True)
def test_what_several_streams_write_several_streams_read(store: Storage, image: Image) -> None:
    told: list[int] = []
    file = image.write(store, at=told.append)
    assert sum(told) >= file.length
    assert names(store) == [file.file]
    read_back(store, file, image)


def test_calls_of_both_ways_are_under_way_together(
    store: Storage, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("pwrite", "preadv"):
        met, meeting = set[int](), threading.Barrier(NUM_TOGETHER)

        def act(
            real: Callable[..., int], descriptor: int, data: Any, at: int, met: Any = met, meeting: Any = meeting
        ) -> int:
            if at < NUM_TOGETHER * UNIT_BYTES and at % UNIT_BYTES == 0 and at not in met:
                met.add(at)
                meeting.wait(PATIENCE_S)
            return real(descriptor, data, at)

        with monkeypatch.context() as patch:
            patched(patch, call, act)
            if call == "pwrite":
                file = image.write(store)
            else:
                view = page_memory(file.length)
                store.bundles.read_into(V1, file, view)
        assert len(met) == NUM_TOGETHER
    assert view == image.view


@pytest.mark.parametrize("store", ["plain", "encrypted"], indirect=True)
def test_streams_that_end_in_any_order_and_write_little_at_a_time(
    store: Storage, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, lock = random.Random(5), threading.Lock()

    def act(real: Callable[..., int], descriptor: int, data: Any, at: int) -> int:
        with lock:
            pages = dice.randint(1, max(1, len(data) // posix_io.PAGE))
        return real(descriptor, data[: pages * posix_io.PAGE], at)

    with monkeypatch.context() as patch:
        patched(patch, "pwrite", act)
        file = image.write(store)
    read_back(store, file, image)


@pytest.mark.parametrize("failing", [0, 3, 4])
def test_an_error_of_one_stream_leaves_no_file_and_is_told(
    store: Storage, image: Image, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real_sync = os.fsync

    def act(real: Callable[..., int], descriptor: int, data: Any, at: int) -> int:
        if at == failing * UNIT_BYTES:
            raise OSError(5, "planted")
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patched(patch, "pwrite", act)
        patch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real_sync(descriptor)))
        with pytest.raises(StorageError, match="planted"):
            image.write(store)
    assert synced == []
    assert names(store) == []
    file = image.write(store)
    read_back(store, file, image)


def test_an_error_of_one_reading_stream_is_told(store: Storage, image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    file = image.write(store)

    def act(real: Callable[..., int], descriptor: int, data: Any, at: int) -> int:
        if at == 3 * UNIT_BYTES:
            raise OSError(5, "planted")
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patched(patch, "preadv", act)
        with pytest.raises(StorageError, match="planted"):
            store.bundles.read_into(V1, file, page_memory(file.length))


def test_what_was_written_is_durable_only_after_the_last_stream(
    store: Storage, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, lock, real_sync = list[str](), threading.Lock(), os.fsync

    def act(real: Callable[..., int], descriptor: int, data: Any, at: int) -> int:
        done = real(descriptor, data, at)
        with lock:
            calls.append("write")
        return done

    def sync(descriptor: int) -> None:
        with lock:
            calls.append("sync")
        real_sync(descriptor)

    with monkeypatch.context() as patch:
        patched(patch, "pwrite", act)
        patch.setattr(os, "fsync", sync)
        image.write(store)
    assert calls.count("write") >= 5
    assert "write" not in calls[calls.index("sync") :]


def test_a_file_that_was_cut_is_found_whichever_stream_meets_its_end(store: Storage, image: Image) -> None:
    file = image.write(store)
    path = Path(store.where) / str(V1) / file.file
    for length in (0, 2 * UNIT_BYTES, 2 * UNIT_BYTES + 5, file.length - 1):
        os.truncate(path, length)
        with pytest.raises(CorruptError):
            store.bundles.read_into(V1, file, page_memory(file.length))
        with pytest.raises(CorruptError):
            store.bundles.read_chunks_into(V1, file, 0, page_memory(file.length))


class Ring(Chunks):
    """Chunks in so many buffers: the rule of `at_once`, which whoever writes must keep to."""

    def __init__(self, data: bytes, at_once: int) -> None:
        self.num_bytes, self.at_once = len(data), at_once
        self._data = data

    def __iter__(self) -> Iterator[memoryview]:
        buffers = [page_memory(UNIT_BYTES) for _ in range(self.at_once)]
        for index, at in enumerate(range(0, len(self._data), UNIT_BYTES)):
            part = self._data[at : at + UNIT_BYTES]
            buffer = buffers[index % self.at_once]
            buffer[: len(part)] = part
            yield buffer[: len(part)]
        for buffer in buffers:
            buffer[:] = bytes(UNIT_BYTES)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_a_buffer_is_its_makers_again_when_that_was_said(tmp_path: Path, at_once: int) -> None:
    backend = LocalBackend(tmp_path / "root")
    backend.prepare()
    data = random.Random(at_once).randbytes(3 * UNIT_BYTES + 777)
    backend.put("v/file", Ring(data, at_once), stamp=STAMP)
    assert backend.read("v/file") == data


# Bugs of ours, planted: each must be found before anybody believes the file.


def _twice(real: Any, descriptor: int, unit: memoryview, at: int) -> int:
    return int(real(descriptor, unit, at - UNIT_BYTES if at == 2 * UNIT_BYTES else at))


def _not_at_all(real: Any, descriptor: int, unit: memoryview, at: int) -> int:
    return len(unit) if at == 2 * UNIT_BYTES else int(real(descriptor, unit, at))


def _swapped(real: Any, descriptor: int, unit: memoryview, at: int) -> int:
    other = {UNIT_BYTES: 3 * UNIT_BYTES, 3 * UNIT_BYTES: UNIT_BYTES}.get(at, at)
    return int(real(descriptor, unit, other))


def _short(real: Any, descriptor: int, unit: memoryview, at: int) -> int:
    return (
        int(real(descriptor, unit[: UNIT_BYTES // 2], at)) if at == 2 * UNIT_BYTES else int(real(descriptor, unit, at))
    )


def _error_not_seen(real: Any, descriptor: int, unit: memoryview, at: int) -> int:
    return 0 if at == 2 * UNIT_BYTES else int(real(descriptor, unit, at))


@pytest.mark.parametrize("bug", [_twice, _not_at_all, _swapped, _short, _error_not_seen], ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_a_writing_stream_is_found_by_whoever_reads(
    store: Storage, image: Image, bug: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(posix_io, "_write_all", partial(bug, posix_io._write_all))
        file = image.write(store)
    with pytest.raises(HoldfastError):
        store.bundles.verify(V1, file)
    with pytest.raises(HoldfastError):
        store.bundles.read_chunks_into(V1, file, 0, page_memory(file.length))


def test_a_planted_bug_of_a_reading_stream_is_found(
    store: Storage, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = image.write(store), posix_io.fill

    def fill(descriptor: int, view: memoryview, offset: int, flags: int = 0) -> int:
        swapped = {UNIT_BYTES: 3 * UNIT_BYTES, 3 * UNIT_BYTES: UNIT_BYTES}
        return real(descriptor, view, swapped.get(offset, offset), flags)

    monkeypatch.setattr(posix_io, "fill", fill)
    with pytest.raises(CorruptError):
        store.bundles.read_chunks_into(V1, file, 0, page_memory(file.length))
