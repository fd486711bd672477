"""Lists what every backend must do, as checks that any backend can be put through.

`violations(make)` runs all of them, each on a fresh and empty root, and returns what was found, by the name of the
check. No test framework is needed; with pytest, parametrize over CHECKS. Nothing here knows what is behind the verbs,
and nothing is measured in seconds. That the suite finds faults is itself tested, with a planted one for each check.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from holdfast.base.errors import Fenced, HoldfastError, StorageError, UsageError, VersionNotFound
from holdfast.tiers.backends.interface import TEMPORARY, Backend, Chunks

STAMP = "i000001-t000000-h000000000000-p1"
# More than what any backend moves in one piece.
LARGE_BYTES = (33 << 20) + 12_345
NUM_RACERS = 6
BAD_NAMES = (
    "", ".", "..", "../x", "v/../x", "/etc/passwd", "a/b/c", "v/", ".hidden", "v/.hidden", "v//x", "v\\x", "v/x\n", "x\0y",
    "v/" + "x" * 200, "v/\u202ex", "ｖ/x", "v/x y", "%2e%2e/x", "-/../x", "C:x", "~", "~root/x", "v/x;y", "v/x*",
)  # fmt: skip

Check = Callable[[Backend], None]


class Violation(AssertionError):
    """A backend did not do what it must."""


def violations(make: Callable[[], Backend]) -> dict[str, str]:
    """Name of the check -> what went wrong, for every check that failed.

    Args:
        make: a backend with a root of its own in which nothing is; `prepare` is called here.
    """
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            backend = make()
            backend.prepare()
            check(backend)
        except (Violation, HoldfastError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def what_is_put_is_read(backend: Backend) -> None:
    """Check that what is put is read: of any size, in any number of chunks, and as often as one likes."""
    for size in (0, 1, 4095, 4096, 4097, 70_001, (1 << 20) + 1):
        data = _bytes(size)
        for chunks in ([data], [data[: size // 2], data[size // 2 :]], [data[:1], data[1:]]):
            _put(backend, "v/file", *chunks)
            _same(backend.read("v/file"), data, f"read after put of {size} bytes in {len(chunks)} chunks")


def a_large_file_is_what_was_put(backend: Backend) -> None:
    """Also where the store takes it in parts and gives it in ranges."""
    data = _bytes(LARGE_BYTES)
    told: list[int] = []
    backend.put("v/large", [memoryview(data)], stamp=STAMP, progress=told.append)
    _require(sum(told) >= LARGE_BYTES, "progress told fewer bytes than were written")
    found = bytearray(LARGE_BYTES)
    _require(backend.read_into("v/large", memoryview(found)) == LARGE_BYTES, "read_into did not fill the view")
    _same(found, data, "read_into of a large file")
    _require(backend.listing("v") == [("large", LARGE_BYTES)], "the listing shows another size")


def chunks_made_on_the_way_are_copied(backend: Backend) -> None:
    """One buffer may serve all chunks of an iterable that is no list."""
    data = _bytes((17 << 20) + 5)
    backend.put("v/lazy", _Reusing(data, 3 << 20), stamp=STAMP)
    _same(backend.read("v/lazy"), data, "a file whose chunks shared one buffer")


def a_put_replaces(backend: Backend) -> None:
    """The older file is gone whole, also the part of it that was longer."""
    _put(backend, "latest", _bytes(10_000))
    _put(backend, "latest", b"new")
    _same(backend.read("latest"), b"new", "a file that was replaced")


def a_put_that_fails_leaves_what_was_there(backend: Backend) -> None:
    """Whole or not at all."""
    _put(backend, "v/old", b"old")
    for name in ("v/old", "v/new"):
        try:
            backend.put(name, _Failing(), stamp=STAMP)
        except (StorageError, PlannedError):
            continue
        raise Violation("a put whose chunks failed returned as if it had succeeded")
    _same(backend.read("v/old"), b"old", "a file whose replacement failed")
    _not_found(lambda: backend.read("v/new"), "a file whose first put failed")


def doubts_after_the_last_chunk_are_heard(backend: Backend) -> None:
    """Chunks are asked for until they end, whatever their size: only then were all of them right."""
    for size in (10, 70_001, (17 << 20) + 5):
        _put(backend, "v/old", b"old")
        for name in ("v/old", "v/new"):
            try:
                backend.put(name, _Doubted(_bytes(size)), stamp=STAMP)
            except (StorageError, PlannedError):
                continue
            raise Violation(f"a put of {size} bytes did not wait for the word after its last chunk")
        _same(backend.read("v/old"), b"old", "a file whose replacement was doubted")
        _not_found(lambda: backend.read("v/new"), "a file that was doubted at its end")


def creating_once_means_once(backend: Backend) -> None:
    """True, then False for the same bytes, Fenced for others, and the first ones stay."""
    _require(backend.create("v/once", b"first", stamp=STAMP) is True, "the first creation did not return True")
    _require(backend.create("v/once", b"first", stamp=STAMP) is False, "a repeated creation did not return False")
    for other in (b"other", b"firs", b"first and more", b""):
        _fenced(partial(backend.create, "v/once", other, stamp=STAMP), f"a second creation with {other!r}")
    _same(backend.read("v/once"), b"first", "a file created once")
    _require(backend.create("v/empty", b"", stamp=STAMP) is True, "an empty file was not created")
    _require(backend.create("v/empty", b"", stamp=STAMP) is False, "an empty file was created twice")


def of_racing_creators_one_wins(backend: Backend) -> None:
    """Check that of racing creators one wins: one True, all others Fenced, and the winner's bytes are there."""
    for turn in range(3):
        name = f"v/race-{turn}"
        answers = _race(partial(_create_numbered, backend, name))
        winners = [index for index, answer in enumerate(answers) if answer is True]
        losers = [answer for answer in answers if isinstance(answer, Fenced)]
        _require(len(winners) == 1, f"{len(winners)} of {NUM_RACERS} racing creators won: {answers}")
        _require(len(losers) == NUM_RACERS - 1, f"a loser was not fenced: {answers}")
        _same(backend.read(name), b"%d" % winners[0], "the file after the race")


def racing_creators_of_the_same_all_succeed(backend: Backend) -> None:
    """Check that racing creators of the same bytes all succeed, and that at most one is told to be the first."""
    answers = _race(lambda _: backend.create("v/same", b"the commit", stamp=STAMP))
    _require(all(isinstance(answer, bool) for answer in answers), f"a creator of the same bytes failed: {answers}")
    _require(answers.count(True) == 1, f"{answers.count(True)} creators were the first")


def parts_are_read(backend: Backend) -> None:
    """Any range; short only at the end; nothing beyond it."""
    data = _bytes(10_000)
    _put(backend, "v/file", data)
    source = random.Random(1)
    for _ in range(12):
        offset, length = source.randrange(12_000), source.randrange(1, 5000)
        wanted = data[offset : offset + length]
        _same(backend.read("v/file", offset=offset, length=length), wanted, f"{length} bytes from {offset} on")
        buffer = bytearray(length)
        count = backend.read_into("v/file", memoryview(buffer), offset=offset)
        _require(count == len(wanted), f"read_into of {length} bytes from {offset} on returned {count}")
        _same(buffer[:count], wanted, "what read_into filled")
    _same(backend.read("v/file", offset=10_000, length=1), b"", "a byte beyond the end")
    _same(backend.read("v/file", offset=9_990), data[9_990:], "the rest of a file")
    _put(backend, "v/empty", b"")
    _same(backend.read("v/empty", length=100), b"", "a part of an empty file")


def what_is_not_there_is_not_found(backend: Backend) -> None:
    """Check that what is not there raises VersionNotFound, which is another answer than StorageError."""
    for name in ("nothing", "v/nothing"):
        _not_found(partial(backend.read, name), name)
        _not_found(partial(backend.read, name, offset=5, length=1), name)
        _not_found(partial(backend.read_into, name, memoryview(bytearray(4))), name)
    _require(backend.listing("nothing") == [], "a directory that is not there was listed")


def listings_are_true(backend: Backend) -> None:
    """Sorted, with sizes, one level deep, and at once."""
    for name, size in (("b", 3), ("a", 1), ("v1/x", 5), ("v1/y", 0), ("v10/z", 7)):
        _put(backend, name, _bytes(size))
    root = [entry for entry in backend.listing("") if entry[0] != f"{TEMPORARY}/"]
    _require(root == [("a", 1), ("b", 3), ("v1/", 0), ("v10/", 0)], f"the root is listed as {root}")
    _require(backend.listing("v1") == [("x", 5), ("y", 0)], f"v1 is listed as {backend.listing('v1')}")
    _put(backend, "v1/x", _bytes(6))
    backend.delete("v1/y")
    _require(backend.listing("v1") == [("x", 6)], "a listing lags behind a put or a removal")


def deleting_removes_and_may_be_repeated(backend: Backend) -> None:
    """Only what was named; a directory only when it is empty; what is not there is fine."""
    for name in ("v/a", "v/b", "v2/a", "top"):
        _put(backend, name, b"x")
    backend.delete("v/a", "v/")
    _not_found(lambda: backend.read("v/a"), "a deleted file")
    _same(backend.read("v/b"), b"x", "the file beside a deleted one")
    backend.delete("v/a", "nothing", "nothing/at-all", "nothing/")
    backend.delete("v/b", "v/")
    _require(backend.listing("v") == [], "a directory whose files were deleted is listed")
    _same(backend.read("v2/a") + backend.read("top"), b"xx", "files that nobody deleted")
    names = [name for name, _ in backend.listing("")]
    _require("v/" not in names, "an empty directory that was deleted is still there")


def a_deleted_name_can_be_created_again(backend: Backend) -> None:
    """A retired version leaves nothing that would fence its name."""
    backend.create("v/file", b"one", stamp=STAMP)
    backend.delete("v/file")
    _require(backend.create("v/file", b"two", stamp=STAMP) is True, "the name of a deleted file cannot be created")
    _same(backend.read("v/file"), b"two", "a file that was created again")


def names_that_are_never_given_are_refused(backend: Backend) -> None:
    """Before anything is touched: two plain segments at most, nothing that leads elsewhere."""
    for name in BAD_NAMES:
        verbs: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("put", partial(_put, backend, name, b"x")),
            ("create", partial(backend.create, name, b"x", stamp=STAMP)),
            ("read", partial(backend.read, name)),
            ("read_into", partial(backend.read_into, name, memoryview(bytearray(1)))),
        )
        for verb, call in verbs:
            try:
                call()
            except UsageError:
                continue
            except HoldfastError as error:
                raise Violation(f"{verb} of {name!r} went as far as the store: {error}") from error
            raise Violation(f"{verb} of {name!r} was not refused")
    found = [entry for entry in backend.listing("") if entry[0] != f"{TEMPORARY}/"]
    _require(not found, f"a refused name left {found}")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        what_is_put_is_read,
        a_large_file_is_what_was_put,
        chunks_made_on_the_way_are_copied,
        a_put_replaces,
        a_put_that_fails_leaves_what_was_there,
        doubts_after_the_last_chunk_are_heard,
        creating_once_means_once,
        of_racing_creators_one_wins,
        racing_creators_of_the_same_all_succeed,
        parts_are_read,
        what_is_not_there_is_not_found,
        listings_are_true,
        deleting_removes_and_may_be_repeated,
        a_deleted_name_can_be_created_again,
        names_that_are_never_given_are_refused,
    )
}


class PlannedError(Exception):
    """Goes wrong in the middle of a put that must leave nothing."""


class _Failing:
    """Two good chunks, then an error."""

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(_bytes(20_000))
        yield memoryview(_bytes(20_000))
        raise PlannedError


class _Doubted(Chunks):
    """One good chunk, of which it turns out afterwards that it was not."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self._data = data

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._data)
        raise PlannedError


class _Reusing:
    """The chunks of `data`, all in one buffer."""

    def __init__(self, data: bytes, step: int) -> None:
        self._data = data
        self._buffer = bytearray(step)

    def __iter__(self) -> Iterator[memoryview]:
        step = len(self._buffer)
        for at in range(0, len(self._data), step):
            part = self._data[at : at + step]
            self._buffer[: len(part)] = part
            yield memoryview(self._buffer)[: len(part)]


def _bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _put(backend: Backend, name: str, *chunks: bytes) -> None:
    backend.put(name, [memoryview(chunk) for chunk in chunks], stamp=STAMP)


def _create_numbered(backend: Backend, name: str, index: int) -> bool:
    return backend.create(name, b"%d" % index, stamp=STAMP)


def _race(call: Callable[[int], object]) -> list[object]:
    """Return what each of several threads got that started together: an answer or an error of ours."""
    answers: list[object] = [None] * NUM_RACERS
    start = threading.Barrier(NUM_RACERS)

    def run(index: int) -> None:
        start.wait(30.0)
        try:
            answers[index] = call(index)
        except HoldfastError as error:
            answers[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(NUM_RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return answers


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


def _same(found: bytes | bytearray, wanted: bytes, what: str) -> None:
    if found != wanted:
        where = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), "their ends")
        raise Violation(f"{what}: {len(found)} bytes, {len(wanted)} were expected, they differ from {where} on")


def _fails_with(kind: type[HoldfastError], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    except HoldfastError as error:
        raise Violation(f"{what}: {type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise Violation(f"{what}: no error, {kind.__name__} was expected")


def _fenced(call: Callable[[], object], what: str) -> None:
    _fails_with(Fenced, call, what)


def _not_found(call: Callable[[], object], what: str) -> None:
    _fails_with(VersionNotFound, call, what)
