"""Ranks of one node that want the same bundle read storage once between them: every byte proved by each, whoever dies."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.base.errors import CorruptError, HoldfastError, StorageBusy, StorageError
from holdfast.checkpoint.restore import tensor_fill
from holdfast.core.recovery.shared_reading import plan_reading
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.backends.interface import NotCachedError
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage import shared_reads
from holdfast.tiers.storage.shared_reads import SharedReads
from holdfast.tiers.storage.unread_chunks import UnreadChunks, open_bundle
from kit.live_tensors import live
from kit.stored_bundle import V1, Stored, raw
from sample_kit import sampled

TIMEOUT_S = 60.0


class Rank:
    """One of several that load the same bundle, with tensors of its own. Each has the file of turns open for itself."""

    def __init__(self, stored: Stored, number: int, world: int, *, timeout_s: float = TIMEOUT_S) -> None:
        plan = plan_reading(number, (0,) * world, {stored.file.ref.bundle_id: stored.num_chunks})
        self.shared = SharedReads(stored.path.parent.parent / "turns", plan, timeout_s=timeout_s)
        self.stored = stored
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in stored.tensors.items()}
        self.unread: UnreadChunks | None = None
        self.faults: dict[str, HoldfastError] = {}

    def load(self) -> None:
        file = self.stored.file
        try:
            view, self.unread = open_bundle(self.stored.storage.bundles, V1, file, self.shared)
        except HoldfastError as error:
            self.faults = {file.ref.bundle_id: error}
            return
        located = Located(file.ref, file.seal, view, Source.STORAGE, 0.0, None, self.unread)
        (source,) = tensor_fill.read_sources([located])
        self.faults = tensor_fill.fill([source], {name: live(name, tensor) for name, tensor in self.tensors.items()})

    def is_filled(self) -> bool:
        return all(raw(self.tensors[name]) == raw(found) for name, found in self.stored.expected().items())


@pytest.fixture(params=sampled(["plain", "encrypted"], "encrypted"))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    key = tmp_path / "key"
    key.write_text(random.Random(1).randbytes(32).hex())
    key.chmod(0o600)
    found = Stored(tmp_path, str(key) if request.param == "encrypted" else "")
    if not found.storage.bundles.has_page_cache(V1, found.file.file):
        pytest.skip("the file system of the temporary directory cannot tell what is cached")
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each chunk was read from storage."""
    found: Counter[int] = Counter()
    real, lock = LocalBackend.read_into, threading.Lock()

    def read_into(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        with lock:
            found[offset // CHUNK_BYTES] += 1
        return real(self, name, view, offset=offset)

    monkeypatch.setattr(LocalBackend, "read_into", read_into)
    return found


@pytest.fixture
def ranks(stored: Stored) -> Iterator[list[Rank]]:
    made = [Rank(stored, number, 3) for number in range(3)]
    yield made
    for rank in made:
        rank.shared.close()


def all_load(ranks: list[Rank]) -> None:
    threads = [threading.Thread(target=rank.load, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_three_ranks_load_bit_for_bit_and_no_chunk_is_read_twice(
    stored: Stored, ranks: list[Rank], reads: Counter[int]
) -> None:
    all_load(ranks)
    assert [rank.faults for rank in ranks] == [{}, {}, {}]
    assert all(rank.is_filled() for rank in ranks)
    assert reads == Counter(range(stored.num_chunks)), "the rest came from the page cache"
    opened = [rank.unread for rank in ranks if rank.unread is not None]
    assert sum(unread.stored_bytes for unread in opened) == stored.file.length
    assert sum(unread.cached_bytes for unread in opened) == 2 * stored.file.length


def test_what_the_cache_has_lost_is_read_again_and_by_one_rank(
    stored: Stored, ranks: list[Rank], reads: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalBackend.read_cached

    def lost(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        if offset == CHUNK_BYTES and reads[1] < 2:
            raise NotCachedError
        return real(self, name, view, offset=offset)

    monkeypatch.setattr(LocalBackend, "read_cached", lost)
    all_load(ranks)
    assert all(rank.is_filled() and not rank.faults for rank in ranks)
    assert reads == Counter([*range(stored.num_chunks), 1])


def test_bytes_of_the_page_cache_are_proved_by_each_rank(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalBackend.read_cached

    def flipped(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        count = real(self, name, view, offset=offset)
        view[0] ^= offset == CHUNK_BYTES
        return count

    ranks[0].load()
    monkeypatch.setattr(LocalBackend, "read_cached", flipped)
    ranks[1].load()
    assert not ranks[0].faults
    assert ranks[0].is_filled()
    (fault,) = ranks[1].faults.values()
    assert isinstance(fault, CorruptError)
    assert "chunk 1" in fault.what


def test_a_damaged_file_is_refused_by_name_on_every_rank(stored: Stored, ranks: list[Rank]) -> None:
    data = bytearray(stored.path.read_bytes())
    data[CHUNK_BYTES + 5] ^= 1
    stored.path.write_bytes(data)
    all_load(ranks)
    for rank in ranks:
        (fault,) = rank.faults.values()
        assert isinstance(fault, CorruptError)
        assert fault.where is not None
        assert stored.file.ref.bundle_id in fault.where


def test_who_fails_to_read_leaves_the_chunk_to_the_others(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, real = [CHUNK_BYTES], LocalBackend.read_into

    def refuse(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        if offset in refusals:
            refusals.remove(offset)
            raise StorageError("the path refuses: Input/output error", where="there")
        return real(self, name, view, offset=offset)

    monkeypatch.setattr(LocalBackend, "read_into", refuse)
    all_load(ranks)
    failed = [rank for rank in ranks if rank.faults]
    assert len(failed) == 1
    assert all(rank.is_filled() for rank in ranks if rank not in failed)


_HOLDER = """
import sys
from pathlib import Path
from holdfast.core.recovery.shared_reading import ReadingPlan
from holdfast.tiers.storage import shared_reads
from holdfast.tiers.storage.shared_reads import SharedReads

def reads():
    print("reading", flush=True)
    sys.stdin.read()

shared = SharedReads(Path(sys.argv[1]), ReadingPlan({sys.argv[2]: 0}, 1, 2), timeout_s=60.0)
shared.read(sys.argv[2], int(sys.argv[3]), lambda: None, reads, "")
"""


@pytest.fixture
def reader(stored: Stored) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to read chunk 1 and does not end."""
    command = [sys.executable, "-c", _HOLDER, str(stored.path.parent.parent / "turns"), stored.file.ref.bundle_id, "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_killed_reader_leaves_its_chunk_to_the_others(
    stored: Stored, reader: subprocess.Popen[str], reads: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, real = threading.Event(), shared_reads.time.sleep

    def sleep(seconds: float) -> None:
        waits.set()
        real(seconds)

    monkeypatch.setattr(shared_reads.time, "sleep", sleep)
    rank = Rank(stored, 0, 2)
    thread = threading.Thread(target=rank.load, daemon=True)
    thread.start()
    assert waits.wait(TIMEOUT_S), "it waits for the chunk that another process reads"
    assert reads[1] == 0
    reader.kill()
    thread.join(TIMEOUT_S)
    rank.shared.close()
    assert rank.is_filled()
    assert not rank.faults
    assert reads == Counter(range(stored.num_chunks))


def test_a_reader_that_hangs_is_an_error_that_names_the_file(stored: Stored, reader: subprocess.Popen[str]) -> None:
    assert reader.poll() is None
    rank = Rank(stored, 0, 2, timeout_s=0.05)
    rank.load()
    rank.shared.close()
    (fault,) = rank.faults.values()
    assert isinstance(fault, StorageBusy)
    assert "chunk 1 " in fault.what
    assert stored.file.file in fault.where


_FORKER = _HOLDER.replace(
    'print("reading", flush=True)',
    """import os, signal
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)""",
)


def test_a_child_of_a_killed_reader_does_not_keep_its_chunk(stored: Stored) -> None:
    command = [sys.executable, "-c", _FORKER, str(stored.path.parent.parent / "turns"), stored.file.ref.bundle_id, "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        child = int(reader.stdout.readline())
        reader.kill()
        rank = Rank(stored, 0, 2, timeout_s=20.0)
        try:
            rank.load()
        finally:
            os.kill(child, signal.SIGKILL)
            rank.shared.close()
    assert rank.is_filled()
    assert not rank.faults


@pytest.mark.parametrize("call", sampled(["pwrite", "pread", "lock"], "pread"))
def test_a_file_of_turns_that_refuses_costs_a_second_read_and_no_more(
    stored: Stored, ranks: list[Rank], call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "lock":
        monkeypatch.setattr(SharedReads, "_set", refuse)
    else:
        monkeypatch.setattr(shared_reads, "os", SimpleNamespace(**{**vars(os), call: refuse}))
    all_load(ranks)
    assert all(rank.is_filled() and not rank.faults for rank in ranks)
    told = [record.getMessage() for record in caplog.records if "several times" in record.getMessage()]
    assert 1 <= len(told) <= len(ranks), "once each"
    assert all(str(ranks[0].shared._path) in text and "No space left" in text for text in told)


def test_something_else_in_place_of_the_file_of_turns_is_refused_at_once(stored: Stored) -> None:
    path = stored.path.parent.parent / "turns"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        Rank(stored, 0, 2)
    assert path.is_fifo(), "nothing unknown is removed"


def test_without_a_record_of_what_was_read_chunks_are_read_twice(
    stored: Stored, ranks: list[Rank], reads: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test here would notice."""
    monkeypatch.setattr(SharedReads, "_was_read", lambda *_: False)
    all_load(ranks)
    assert reads != Counter(range(stored.num_chunks))


def test_the_file_of_turns_is_gone_when_it_is_removed_and_its_name_is_of_this_restore(ranks: list[Rank]) -> None:
    path = ranks[0].shared._path
    assert path.stat().st_mode & 0o777 == 0o600
    ranks[0].shared.remove()
    assert not path.exists()
    all_load(ranks)
    assert all(rank.is_filled() for rank in ranks), "who has it open keeps it"
