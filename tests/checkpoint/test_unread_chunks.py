"""Storage read straight into tensors: every byte proved before it arrives, each read once, and every fault told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.base.errors import ConfigError, CorruptError, StorageBusy, StorageError
from holdfast.checkpoint.restore import tensor_fill
from holdfast.checkpoint.restore.fetcher import fault_of
from holdfast.checkpoint.restore.storage_source import StorageSource
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage import read_limit
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.unread_chunks import UnreadChunks
from holdfast.tiers.storage.version_store import Storage
from holdfast.tiers.wire.latch import Latch
from kit.stored_bundle import V1, Stored, raw
from sample_kit import sampled

LIMIT_S = 60.0


def spoil(storage: Storage, monkeypatch: pytest.MonkeyPatch, what: Callable[[int, memoryview], None]) -> list[int]:
    """Does `what` to each chunk after it was read from the directory; returns the numbers of those that were read."""
    read, real, lock = list[int](), type(storage._backend).read_into, threading.Lock()

    def spoiled(self: object, name: str, view: memoryview, *, offset: int = 0) -> int:
        count = real(self, name, view, offset=offset)  # type: ignore[arg-type]
        with lock:
            read.append(offset // CHUNK_BYTES)
        what(offset // CHUNK_BYTES, view)
        return count

    monkeypatch.setattr(type(storage._backend), "read_into", spoiled)
    return read


@pytest.mark.parametrize("encrypted", sampled([False, True], True))
def test_tensors_are_filled_bit_for_bit_and_no_chunk_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    key = tmp_path / "key"
    key.write_text(random.Random(1).randbytes(32).hex())
    key.chmod(0o600)
    stored = Stored(tmp_path, str(key) if encrypted else "")
    read = spoil(stored.storage, monkeypatch, lambda _, __: None)
    source = stored.open()
    unread = source.located.unread
    assert unread is not None
    assert sorted(read) == sorted(unread.here)
    assert len(unread.here) <= 2 < stored.num_chunks, "the header and the values"
    versions = {name: tensor._version for name, tensor in stored.tensors.items()}
    assert stored.fill(source) == {}
    assert stored.is_filled()
    assert sorted(read) == list(range(stored.num_chunks))
    assert all(tensor._version > versions[name] for name, tensor in stored.tensors.items()), "autograd must notice"


def test_no_byte_of_a_bad_chunk_reaches_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    bad = next(i for i in range(stored.num_chunks) if i not in source.located.unread.here)  # type: ignore[union-attr]

    def flip(index: int, view: memoryview) -> None:
        if index == bad:
            view[len(view) // 2] ^= 1

    spoil(stored.storage, monkeypatch, flip)
    (fault,) = stored.fill(source).values()
    assert isinstance(fault, CorruptError)
    assert f"chunk {bad} of image" in fault.what
    touched = [
        name
        for name, tensor in stored.tensors.items()
        for entry in source.image.entries
        if entry.name == name
        and entry.start // CHUNK_BYTES <= bad <= (entry.end - 1) // CHUNK_BYTES
        and name != "wide"
        and bool(flat(tensor)[at_chunk(entry, bad)].any())
    ]
    assert not touched


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def at_chunk(entry: image_format.Entry, index: int) -> slice:
    first, last = max(entry.start, index * CHUNK_BYTES), min(entry.end, (index + 1) * CHUNK_BYTES)
    return slice(first - entry.start, last - entry.start)


def test_what_is_out_of_reach_is_told_as_that_and_condemns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()

    def refuse(index: int, _: memoryview) -> None:
        if index == stored.num_chunks - 2:
            raise StorageError("the path refuses: Input/output error", where="there")

    spoil(stored.storage, monkeypatch, refuse)
    ((name, error),) = stored.fill(source).items()
    fault = fault_of(name, None, error)
    assert fault.kind is StorageError
    assert "[there]" in fault.reason


def test_what_another_copy_would_not_mend_is_raised_and_ends_all_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()

    def refuse(_: int, __: memoryview) -> None:
        raise ConfigError("no key is given")

    spoil(stored.storage, monkeypatch, refuse)
    before = threading.active_count()
    with pytest.raises(ConfigError, match="no key"):
        stored.fill(source)
    assert threading.active_count() <= before


@pytest.mark.parametrize("change", sampled([-1, 1], 1))
def test_a_file_of_another_length_is_damage(tmp_path: Path, change: int) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    data = stored.path.read_bytes()
    stored.path.write_bytes(data[:change] if change < 0 else data + b"x")

    def found() -> None:  # a last chunk that was read when the file was opened is not read again
        for error in stored.fill(source).values():
            raise error
        stored.open()

    with pytest.raises(CorruptError, match="bytes"):
        found()


class Hanging:
    """A directory of which one chunk does not come until the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
        self.goes_on, self.hangs = threading.Event(), threading.Event()
        real = LocalBackend.read_into

        def read_into(directory: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
            if offset == chunk * CHUNK_BYTES:
                self.hangs.set()
                assert self.goes_on.wait(LIMIT_S)
            return real(directory, name, view, offset=offset)

        monkeypatch.setattr(LocalBackend, "read_into", read_into)
        monkeypatch.setattr(read_limit, "SLOWEST_BYTES_PER_S", 1 << 40)

    def end(self) -> None:
        """Lets it come, and waits until nobody reads any more."""
        self.goes_on.set()
        for thread in threading.enumerate():
            if thread.name in ("holdfast reading", "holdfast stream"):
                thread.join(LIMIT_S)
                assert not thread.is_alive()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Hanging]]:
    made: list[Hanging] = []

    def hang(chunk: int) -> Hanging:
        made.append(Hanging(monkeypatch, chunk))
        return made[-1]

    yield hang
    for each in made:
        each.end()


def test_a_disk_that_hangs_is_an_error_and_what_comes_later_reaches_no_tensor(
    tmp_path: Path, hanging: Callable[[int], Hanging]
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    disk = hanging(next(i for i in range(1, stored.num_chunks) if i not in source.located.unread.here))  # type: ignore[union-attr]
    (fault,) = stored.fill(source, patience_s=0.5).values()
    assert isinstance(fault, StorageBusy)
    assert "nothing was read for" in fault.what
    assert fault.where == str(stored.path)
    before = [raw(tensor) for tensor in stored.tensors.values()]
    disk.end()
    assert [raw(tensor) for tensor in stored.tensors.values()] == before
    assert not stored.is_filled()
    assert stored.fill(stored.open()) == {}, "the next attempt is as the first"
    assert stored.is_filled()


def test_a_disk_that_hangs_at_the_header_is_an_error(tmp_path: Path, hanging: Callable[[int], Hanging]) -> None:
    stored = Stored(tmp_path)
    hanging(0)
    ref, seal = stored.file.ref, stored.seal
    for chunks in (None, ((0, 2),)):
        fetch = Fetch(ref, seal, Source.STORAGE, None, chunks, file=stored.file.file)
        with pytest.raises(StorageBusy, match="nothing was read for"):
            StorageSource(stored.storage).obtain(V1, [fetch], timeout_s=0.2)


def test_who_is_interrupted_while_it_reads_leaves_no_stream_behind(
    tmp_path: Path, hanging: Callable[[int], Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    disk = hanging(next(i for i in range(1, stored.num_chunks) if i not in source.located.unread.here))  # type: ignore[union-attr]

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(Latch, "wait", wait)
        assert disk.hangs.wait(LIMIT_S)
        threading.Timer(0.05, disk.goes_on.set).start()
        raise KeyboardInterrupt

    wait = Latch.wait
    monkeypatch.setattr(Latch, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stored.fill(source)
    assert "holdfast stream" not in [thread.name for thread in threading.enumerate()]
    disk.end()


def _skips_a_chunk(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    real = tensor_fill._Work._read_and_copy

    def read(self: tensor_fill._Work, left: UnreadChunks, chunk: tensor_fill._Chunk, limit: ReadLimit) -> int:
        return len(chunk.view) if chunk.index == bad else real(self, left, chunk, limit)

    monkeypatch.setattr(tensor_fill._Work, "_read_and_copy", read)


def _takes_the_chunk_before(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    real = UnreadChunks.read

    def read(self: UnreadChunks, index: int, chunk: memoryview) -> str:
        return real(self, index - 1 if index == bad else index, chunk)

    monkeypatch.setattr(UnreadChunks, "read", read)


def _compares_no_chunk(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    monkeypatch.setattr(image_format, "check_chunk", lambda *_: None)
    real = LocalBackend.read_into

    def flipped(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        count = real(self, name, view, offset=offset)
        view[0] ^= offset == bad * CHUNK_BYTES
        return count

    monkeypatch.setattr(LocalBackend, "read_into", flipped)


@pytest.mark.parametrize(
    "plant", sampled([_skips_a_chunk, _takes_the_chunk_before, _compares_no_chunk], _compares_no_chunk)
)
def test_a_bug_planted_in_the_reading_is_found_by_the_digest_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch, int], None]
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    unread = [i for i in range(1, stored.num_chunks - 1) if i not in source.located.unread.here]  # type: ignore[union-attr]
    plant(monkeypatch, unread[-1])
    (fault,) = stored.fill(source).values()
    assert "differs from its seal" in fault.what
