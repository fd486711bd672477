"""Says what a place that keeps bytes must be able to do: write, create once, read, list, delete.

`storage` is the consumer and owns this interface; `local` is the directory behind it, `object_store` the bucket. Names
are relative and have one or two segments (`holdfast.json`, `<version>/<file>`). A backend knows nothing of versions, and
every verb may be repeated: doing it twice is doing it once. A retry or a limit is a `Wrapper` with these same verbs; `open_url` stacks them. What the
verbs promise is checked by `testing.contracts.backend`, for any backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from holdfast.base.errors import UsageError
from holdfast.core.model import NAME_PATTERN
from holdfast.tiers.backends.parallel_streams import MOST_STREAMS

T = TypeVar("T")

# Where files lie until they are whole. May be listed and deleted from, never read.
TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class Properties:
    """Says what a backend is.

    Attributes:
        kind: `"local"` or `"object store"`.
        where: the root as the operator names it.
        has_temporaries: unfinished writes leave files under TEMPORARY that someone must sweep.
        lags: what another machine made may show a moment later, in any order (attribute caches of NFS).
    """

    kind: str
    where: str
    has_temporaries: bool
    lags: bool = False


class Chunks(ABC):
    """Chunks that are made, or proved, on the way. Each stays as it is until the next is asked for.

    Whoever writes them asks for one after the other, and once more after the last: only then were all of them right. An
    error that comes out of them ends the write as any other.

    Attributes:
        num_bytes: of all chunks together.
        at_once: so many chunks stay as they are, the newest included: whoever writes asks for another when fewer are not
            written yet, and once more after the last when all are.
    """

    num_bytes: int
    at_once: int = 1

    @abstractmethod
    def __iter__(self) -> Iterator[memoryview]:
        """Begins anew; the bytes are the same."""


def held_at_once(chunks: Iterable[memoryview]) -> int:
    """Returns how many chunks may be under way together, see Chunks; those of a list stay."""
    if isinstance(chunks, list | tuple):
        return MOST_STREAMS
    return chunks.at_once if isinstance(chunks, Chunks) else 1


def total_bytes(chunks: Iterable[memoryview]) -> int | None:
    """Returns the bytes of all chunks together; None if only their end tells."""
    if isinstance(chunks, list | tuple):
        return sum(map(len, chunks))
    return chunks.num_bytes if isinstance(chunks, Chunks) else None


class Backend(Protocol):
    """Five verbs (reading has two forms), and a start.

    Every verb raises StorageError (StorageFull, StorageUnfit) when the place refuses or cannot be reached; reading a name
    that is not there raises VersionNotFound. Beneath a root that has vanished nothing is known: only of the root itself it
    is said that there is nothing in it. A `stamp` names the writer and marks what it leaves behind if it dies.
    """

    @property
    def properties(self) -> Properties:
        """Return what this backend is."""

    def prepare(self) -> None:
        """Makes the root, durably. The only verb that does: a root that vanishes later is an error."""

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes a file, whole or not at all. When this returns it survives a power cut. Replaces an older one.

        `chunks` may be asked for again, after an error. One of an iterable that is no list or tuple stays as it is only
        until the next is asked for, or as long as Chunks says. What they raise is raised, and nothing is there under the name then that was not
        before.

        `progress` is called with the bytes of each part that was written, some perhaps twice.
        """

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        """Writes a file if none is there. Durable in either case.

        Returns:
            False if the same bytes were there before.

        Raises:
            Fenced: other bytes are there.
        """

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `offset` on."""

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        """Fills `view` from `offset` on; returns the bytes read, fewer only at the end of the file."""

    def listing(self, directory: str) -> list[tuple[str, int]]:
        """(name, bytes) of what stands directly in `directory` (`""` is the root), sorted; nothing if it is not there.

        Directories have a name that ends in `/`, and no bytes.
        """

    def delete(self, *names: str) -> None:
        """Removes files durably, in any order. `x/` behind them removes a directory that is empty. What is not there is fine."""


class Wrapper(ABC):
    """A backend around another one: every verb goes through `_call`."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @abstractmethod
    def _call(self, verb: Callable[[], T]) -> T:
        """Returns what the verb of the inner backend returns."""

    @property
    def properties(self) -> Properties:
        return self._inner.properties

    def prepare(self) -> None:
        self._call(self._inner.prepare)

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """See Backend."""
        self._call(lambda: self._inner.put(name, chunks, stamp=stamp, progress=progress))

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        return self._call(lambda: self._inner.create(name, data, stamp=stamp))

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return self._call(lambda: self._inner.read(name, offset=offset, length=length))

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        return self._call(lambda: self._inner.read_into(name, view, offset=offset))

    def listing(self, directory: str) -> list[tuple[str, int]]:
        return self._call(lambda: self._inner.listing(directory))

    def delete(self, *names: str) -> None:
        self._call(lambda: self._inner.delete(*names))


@runtime_checkable
class PageCached(Protocol):
    """A backend whose files may lie in the page cache of this machine, and which can read them from there alone."""

    def has_page_cache(self, name: str) -> bool:
        """Return whether the file system of this file can tell what is cached. Raises nothing."""

    def read_cached(self, name: str, view: memoryview, *, offset: int) -> int:
        """Fills `view` as `Backend.read_into` does, without asking the device or the server for anything.

        Raises:
            NotCachedError: not all of it is in the page cache.
        """


@runtime_checkable
class Linking(Protocol):
    """A backend that can give a file which it wrote itself a second name, instead of writing the same bytes again."""

    def link(self, name: str, source: str, *, stamp: str) -> bool:
        """Gives the file `source` the name `name` as well, durably, in the place of what has it. Either name may go without the other.

        Only a file that this very object put there, without an error, and that nobody replaced or wrote to since: as far as its
        device, number, length and time of its last write tell. What is in it is not read.

        Returns:
            False if it is not such a file, or no name can be added here: it must be put. Nothing has changed then.
        """


@runtime_checkable
class Settling(Protocol):
    """A backend that shows a name before it is durable: whoever gave it may have been killed between the two."""

    def settle(self, directory: str) -> None:
        """Makes the names that stand in `directory` now durable, and its own. Nothing where there is no such directory.

        Raises:
            StorageError: that failed, and they may be lost with the machine.
        """


class NotCachedError(Exception):
    """The page cache of this machine has not all of what was to be read from it. Nothing is wrong."""


def split_name(name: str) -> tuple[str, str]:
    """(directory or "", leaf) of a name that is safe to open.

    Raises:
        UsageError: it is no name that holdfast gives to a file.
    """
    directory, _, leaf = name.rpartition("/")
    if directory:
        check_segment(directory)
    check_segment(leaf)
    return directory, leaf


def check_segment(segment: str) -> None:
    """Refuses what is not one plain segment of a name."""
    if not NAME_PATTERN.match(segment):
        raise UsageError(f"{segment[:100]!r} is not a name that holdfast gives to a file")
