"""Storage read straight into tensors: every byte proved before it arrives, each read once, and every fault told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.base.errors import ConfigError, CorruptError, HoldfastError, StorageError
from holdfast.base.events import Events
from holdfast.checkpoint.restore import tensor_fill
from holdfast.checkpoint.restore.fetcher import fault_of
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Source
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.unread_chunks import UnreadChunks, open_bundle
from holdfast.tiers.storage.version_store import Storage, open_storage
from kit.live_tensors import live
from tiers.samples import STAMP, bundle, piece, random_image, ref_of

V1 = Version(1, 10)
ROWS = {"a": (1 << 20, 3), "b": (700, 1000), "wide": (2000, 600), "c": (5 << 20,), "tiny": (3,)}


class Stored:
    """A bundle of some chunks in a directory, and tensors to load it into, one of them strided."""

    def __init__(self, path: Path, key: str = "") -> None:
        self.storage = open_storage(path / "job", Events(), encryption=KeySource(key))
        self.storage.claim()
        whole = bundle("g-1", *(piece(name, "F32", shape) for name, shape in ROWS.items()), has_values=True)
        self.bytes = random_image(whole, seed=3, stored_values={"lr": 0.5})
        self.seal = image_format.seal("g-1", self.bytes)
        ref = ref_of(whole)
        self.file: BundleFile = self.storage.write_bundle(V1, ref, self.seal, memoryview(self.bytes), stamp=STAMP)
        self.path = path / "job" / str(V1) / self.file.file
        self.tensors = {name: torch.zeros(shape) for name, shape in ROWS.items()}
        self.tensors["wide"] = torch.zeros(600, 2000).t()

    @property
    def num_chunks(self) -> int:
        return len(self.seal.chunk_digests)

    def open(self) -> tensor_fill.Source:
        view, unread = open_bundle(self.storage, V1, self.file)
        assert unread is not None
        located = Located(self.file.ref, self.file.seal, view, Source.STORAGE, 0.0, None, unread)
        return tensor_fill.read_sources([located])[0]

    def fill(self, source: tensor_fill.Source) -> dict[str, HoldfastError]:
        return tensor_fill.fill([source], {name: live(name, tensor) for name, tensor in self.tensors.items()})

    def expected(self) -> dict[str, torch.Tensor]:
        entries = image_format.read_image(memoryview(self.bytes), "here").entries
        return {
            entry.name: torch.frombuffer(self.bytes, dtype=torch.float32, count=(entry.end - entry.start) // 4,
                                         offset=entry.start).view(entry.shape)
            for entry in entries
        }  # fmt: skip

    def is_filled(self) -> bool:
        return all(raw(self.tensors[name]) == raw(found) for name, found in self.expected().items())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


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


@pytest.mark.parametrize("encrypted", [False, True])
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
    assert threading.active_count() == before


@pytest.mark.parametrize("change", [-1, 1])
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


def _skips_a_chunk(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    real = tensor_fill._Work._read_and_copy

    def read(self: tensor_fill._Work, left: UnreadChunks, chunk: tensor_fill._Chunk) -> int:
        return len(chunk.view) if chunk.index == bad else real(self, left, chunk)

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


@pytest.mark.parametrize("plant", [_skips_a_chunk, _takes_the_chunk_before, _compares_no_chunk])
def test_a_bug_planted_in_the_reading_is_found_by_the_digest_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch, int], None]
) -> None:
    stored = Stored(tmp_path)
    source = stored.open()
    unread = [i for i in range(1, stored.num_chunks - 1) if i not in source.located.unread.here]  # type: ignore[union-attr]
    plant(monkeypatch, unread[-1])
    (fault,) = stored.fill(source).values()
    assert "differs from its seal" in fault.what
