"""The contract suite finds what it is for: a fake backend passes it, and each planted bug is found by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from holdfast.base.errors import Fenced, HoldfastError, StorageError, VersionNotFound
from holdfast.testing.contracts.backend import CHECKS, PlannedError, Violation, violations
from holdfast.tiers.backends.interface import TEMPORARY, Chunks, Properties, check_segment, split_name


class Fake:
    """A backend in a dictionary."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.guard = threading.Lock()
        self.properties = Properties("fake", "fake", has_temporaries=False)

    def prepare(self) -> None:
        pass

    def put(
        self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        split_name(name)
        data = b"".join([bytes(chunk) for chunk in chunks])
        self.files[name] = data
        progress(len(data))

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        split_name(name)
        with self.guard:
            if name not in self.files:
                self.files[name] = data
                return True
        if self.files[name] != data:
            raise Fenced("other content")
        return False

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        split_name(name)
        if name not in self.files:
            raise VersionNotFound("not there")
        return self.files[name][offset : None if length is None else offset + length]

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        data = self.read(name, offset=offset, length=len(view))
        view[: len(data)] = data
        return len(data)

    def listing(self, directory: str) -> list[tuple[str, int]]:
        if directory and directory != TEMPORARY:
            check_segment(directory)
        start = f"{directory}/" if directory else ""
        found: dict[str, int] = {}
        for name, data in self.files.items():
            if name.startswith(start):
                head, slash, _ = name[len(start) :].partition("/")
                found[head + slash] = 0 if slash else len(data)
        return sorted(found.items())

    def delete(self, *names: str) -> None:
        for name in names:
            self.files.pop(name, None)


class ReplacesInPlace(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        data = b"".join([bytes(chunk) for chunk in chunks])
        self.files[name] = data + self.files.get(name, b"")[len(data) :]
        progress(len(data))


class WritesAsItGoes(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        split_name(name)
        self.files[name] = b""
        for chunk in chunks:
            self.files[name] += bytes(chunk)
            progress(len(chunk))


class KeepsLazyChunks(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        super().put(name, list(chunks), stamp=stamp, progress=progress)


class SwallowsErrors(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        split_name(name)
        try:
            super().put(name, chunks, stamp=stamp, progress=progress)
        except PlannedError:
            return


class StopsAtTheLastByte(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        if isinstance(chunks, Chunks):
            source, data = iter(chunks), b""
            while len(data) < chunks.num_bytes:
                data += bytes(next(source))
            chunks = [memoryview(data)]
        super().put(name, chunks, stamp=stamp, progress=progress)


class DropsTheLastByte(Fake):
    def put(self, name: str, chunks: Iterable[memoryview], *, stamp: str, progress: Any = lambda _: None) -> None:
        super().put(name, [memoryview(b"".join(map(bytes, chunks))[: 33 << 20])], stamp=stamp, progress=progress)


class OverwritesOnCreate(Fake):
    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        split_name(name)
        fresh = name not in self.files
        self.files[name] = data
        return fresh


class AlwaysFirst(Fake):
    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        super().create(name, data, stamp=stamp)
        return True


class FencesTheSame(Fake):
    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        if not super().create(name, data, stamp=stamp):
            raise Fenced("exists")
        return True


class LooksBeforeItLeaps(Fake):
    """Asks whether the name is free, then writes: the race that conditional puts are for."""

    def __init__(self) -> None:
        super().__init__()
        self.crowd = threading.Barrier(2)

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        split_name(name)
        free = name not in self.files
        try:
            self.crowd.wait(0.2)
        except threading.BrokenBarrierError:
            self.crowd.reset()
        if free:
            self.files[name] = data
            return True
        return super().create(name, data, stamp=stamp)


class ComparesLengthOnly(Fake):
    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        if len(self.files.get(name, b"")) == len(data) and name in self.files:
            return False
        return super().create(name, data, stamp=stamp)


class GarblesOddSizes(Fake):
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(name, offset=offset, length=length)
        return data[:-1] + b"?" if len(data) == 4097 else data


class ReadsFromTheStart(Fake):
    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        return super().read_into(name, view, offset=0)


class ClaimsFullReads(Fake):
    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        super().read_into(name, view, offset=offset)
        return len(view)


class FailsBeyondTheEnd(Fake):
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(name, offset=offset, length=length)
        if not data and length:
            raise StorageError("416")
        return data


class MissingIsAnError(Fake):
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        try:
            return super().read(name, offset=offset, length=length)
        except VersionNotFound:
            raise StorageError("404") from None


class MissingIsEmpty(Fake):
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        split_name(name)
        return super().read(name, offset=offset, length=length) if name in self.files else b""


class ListsByPrefix(Fake):
    """Forgets the slash: `v1` lists what is in `v10`."""

    def listing(self, directory: str) -> list[tuple[str, int]]:
        found = super().listing(directory)
        if directory:
            found += [("0", len(v)) for k, v in self.files.items() if k.startswith(f"{directory}0/")]
        return found


class ListsLate(Fake):
    def listing(self, directory: str) -> list[tuple[str, int]]:
        seen = self.__dict__.setdefault("seen", {})
        return seen.setdefault(directory, super().listing(directory))


class ListsUnsorted(Fake):
    def listing(self, directory: str) -> list[tuple[str, int]]:
        return super().listing(directory)[::-1]


class DeletesByPrefix(Fake):
    def delete(self, *names: str) -> None:
        for name in names:
            for found in [f for f in self.files if f.startswith(name)]:
                del self.files[found]


class DeletesOnlyOnce(Fake):
    def delete(self, *names: str) -> None:
        for name in names:
            if not name.endswith("/") and self.files.pop(name, None) is None:
                raise VersionNotFound("not there")


class KeepsATombstone(Fake):
    def delete(self, *names: str) -> None:
        self.__dict__.setdefault("dead", set()).update(names)
        super().delete(*names)

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        if name in self.__dict__.get("dead", ()):
            raise Fenced("was there once")
        return super().create(name, data, stamp=stamp)


class TakesAnyName(Fake):
    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if name not in self.files:
            raise VersionNotFound("not there")
        return self.files[name][offset : None if length is None else offset + length]


# The planted bug -> a check that must find it.
PLANTED: dict[type[Fake], str] = {
    ReplacesInPlace: "a_put_replaces",
    WritesAsItGoes: "a_put_that_fails_leaves_what_was_there",
    KeepsLazyChunks: "chunks_made_on_the_way_are_copied",
    SwallowsErrors: "a_put_that_fails_leaves_what_was_there",
    StopsAtTheLastByte: "doubts_after_the_last_chunk_are_heard",
    DropsTheLastByte: "a_large_file_is_what_was_put",
    OverwritesOnCreate: "creating_once_means_once",
    AlwaysFirst: "racing_creators_of_the_same_all_succeed",
    FencesTheSame: "racing_creators_of_the_same_all_succeed",
    LooksBeforeItLeaps: "of_racing_creators_one_wins",
    ComparesLengthOnly: "creating_once_means_once",
    GarblesOddSizes: "what_is_put_is_read",
    ReadsFromTheStart: "parts_are_read",
    ClaimsFullReads: "parts_are_read",
    FailsBeyondTheEnd: "parts_are_read",
    MissingIsAnError: "what_is_not_there_is_not_found",
    MissingIsEmpty: "what_is_not_there_is_not_found",
    ListsByPrefix: "listings_are_true",
    ListsLate: "listings_are_true",
    ListsUnsorted: "listings_are_true",
    DeletesByPrefix: "deleting_removes_and_may_be_repeated",
    DeletesOnlyOnce: "deleting_removes_and_may_be_repeated",
    KeepsATombstone: "a_deleted_name_can_be_created_again",
    TakesAnyName: "names_that_are_never_given_are_refused",
}


def test_a_backend_that_keeps_the_contract_has_no_violations() -> None:
    assert violations(Fake) == {}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda kind: kind.__name__)
def test_every_planted_bug_is_found_by_the_suite(planted: type[Fake]) -> None:
    with pytest.raises((Violation, HoldfastError, PlannedError)):
        CHECKS[PLANTED[planted]](planted())


def test_every_check_finds_some_planted_bug() -> None:
    assert set(CHECKS) == set(PLANTED.values())
