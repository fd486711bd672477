"""A bucket as a backend: S3, Google Cloud Storage, Azure Blob, and whatever speaks their protocols, through obstore.

Objects appear whole or not at all, so there is nothing temporary and nothing to rename. Bundles and parts have names
that their content determines: writing one again, also after a lost reply, changes nothing. The commit and every other
create-once file is a conditional put (`If-None-Match: *`); "it exists" means read and compare. Not every store that
speaks S3 honours the condition, so each process proves it, with two puts of a probe, before its first creation; a store
that fails is refused.

No request is tried twice here: `retrying` does that, and obstore's own retries are off. Every request has a time limit.
Credentials, region and endpoint come from where the stores' own tools look for them (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from holdfast.base.errors import ConfigError, Fenced, StorageBusy, StorageError, StorageUnfit, VersionNotFound
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.backends.interface import TEMPORARY, Properties, check_segment, split_name, total_bytes
from holdfast.tiers.backends.parallel_streams import MOST_REQUESTS, StreamCount, Streams, requests_at_once

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        GenericError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import ObjectStore, from_url
except ImportError:  # the extra `cloud` is not installed
    INSTALLED = False
else:
    INSTALLED = True

# Larger objects go up in parts of at least this size, several at once; a request reads a range of at most this size.
PART_BYTES = 8 << 20
# What the stores allow.
MAX_PARTS = 10_000
# A version of a large job has thousands of objects, and to remove one takes as long as a reply.
DELETES_AT_ONCE = 32
# For one request, its body included: a part that takes longer comes over a link of less than half a MiB/s.
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")

_MAX_MESSAGE = 300
# A signed address carries its signature in the query: it must not reach a log.
_QUERY = re.compile(r"\?\S*")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_OUT_OF_RANGE = re.compile(r"\b416\b|[Rr]ange")


def open_bucket(url: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> ObjectStoreBackend:
    """The backend behind `s3://bucket/prefix` and its like. Touches nothing yet.

    Raises:
        ConfigError: obstore is not installed, or does not understand the URL or its settings.
    """
    if not INSTALLED:
        remedy = "pip install obstore"
        raise ConfigError("checkpoints in an object store need the package obstore", where=url, remedy=remedy)
    # Plain http only happens to an endpoint that the operator spelt with http://.
    options: Any = {"timeout": f"{timeout_s}s", "connect_timeout": f"{CONNECT_TIMEOUT_S}s", "allow_http": True}
    try:
        store = from_url(url, client_options=options, retry_config={"max_retries": 0})
    except (BaseError, ValueError, OSError) as error:
        pass_on(error)
        raise ConfigError(
            f"the object store cannot be opened: {_words(error)}", where=url, remedy="correct the URL or its settings"
        ) from error
    return ObjectStoreBackend(store, url.rstrip("/"))


class ObjectStoreBackend:
    """A prefix in a bucket. Any thread may call it.

    Args:
        store: obstore's client, rooted at the prefix.
        where: the root as the operator names it.
    """

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store = store
        self._where = where
        self._guard = threading.Lock()
        self._proved = False
        self._writers = StreamCount(most=MOST_REQUESTS)

    @property
    def properties(self) -> Properties:
        return Properties(kind="object store", where=self._where, has_temporaries=False)

    def prepare(self) -> None:
        """Proves that the bucket is there and fit; a prefix needs no making."""
        self._prove()

    def put(
        self,
        name: str,
        chunks: Iterable[memoryview],
        *,
        stamp: str,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes an object, whole or not at all; see Backend."""
        split_name(name)
        check_segment(stamp)
        total = total_bytes(chunks)
        with self._translated(name):
            if total is not None and total <= PART_BYTES:
                obstore.put(self._store, name, b"".join(_copies(chunks)), use_multipart=False)
                progress(total)
                return
            part = max(PART_BYTES, -(-(total or 0) // MAX_PARTS))
            source: Any = _copies(chunks, progress)
            count, began_s = self._writers.now, time.monotonic()
            at_once = min(count, requests_at_once(total or 0, part))
            try:
                obstore.put(self._store, name, source, use_multipart=True, chunk_size=part, max_concurrency=at_once)
            except BaseError:
                # Parts that share a narrow line may each take longer than a request may.
                self._writers.failed(at_once)
                raise
            if total and at_once == count:
                self._writers.learn(count, total / max(time.monotonic() - began_s, 1e-6))

    def create(self, name: str, data: bytes, *, stamp: str) -> bool:
        """Writes an object if none is there; see Backend."""
        split_name(name)
        check_segment(stamp)
        self._prove()
        if self._put_new(name, data):
            return True
        try:
            found = self.read(name, length=len(data) + 1)
        except VersionNotFound as error:
            # "Conflict": somebody else's request for the same name is under way, or has just failed.
            raise StorageBusy("another writer is at it", where=self._at(name)) from error
        if found != data:
            raise Fenced(f"{name} exists with other content", where=self._at(name))
        return False

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `offset` on; see Backend."""
        split_name(name)
        if length is None:
            length = max(0, self._size(name) - offset)
        return bytes(self._range(name, offset, length))

    def read_into(self, name: str, view: memoryview, *, offset: int = 0) -> int:
        """Fills `view` from `offset` on; see Backend. Who wants several ranges at once calls from several threads."""
        split_name(name)
        done = 0
        while True:
            data = self._range(name, offset + done, min(PART_BYTES, len(view) - done))
            view[done : done + len(data)] = data
            done += len(data)
            if len(data) < PART_BYTES or done == len(view):
                return done

    def listing(self, directory: str) -> list[tuple[str, int]]:
        """(name, bytes) of what stands directly in `directory`; see Backend."""
        if directory and directory != TEMPORARY:
            check_segment(directory)
        try:
            with self._translated(directory):
                found = obstore.list_with_delimiter(self._store, directory or None)
        except VersionNotFound as error:  # no store says so of a prefix that is empty: a gateway, or no bucket
            raise StorageBusy("the store does not answer what it holds", where=self._at(directory)) from error
        names = [(entry["path"].rpartition("/")[2], entry["size"]) for entry in found["objects"]]
        return sorted(names + [(f"{path.rpartition('/')[2]}/", 0) for path in found["common_prefixes"]])

    def delete(self, *names: str) -> None:
        """Removes objects; see Backend. There are no directories to remove.

        Many go in one request where the store has such a one. If it fails for any of them, or is not known, each has a request of
        its own, and that one says what is wrong.
        """
        objects: list[str] = []
        for name in names:
            if name.endswith("/"):
                check_segment(name[:-1])
                continue
            directory, _, leaf = name.rpartition("/")
            split_name(leaf if directory == TEMPORARY else name)
            objects.append(name)
        if len(objects) > 1 and self._delete_together(objects):
            return
        with Streams(StreamCount(first=DELETES_AT_ONCE), min(DELETES_AT_ONCE, len(objects)), lambda _: None) as streams:
            for name in objects:
                streams.put(partial(self._delete, name))

    # Inside.

    def _at(self, name: str) -> str:
        return f"{self._where}/{name}" if name else self._where

    def _delete_together(self, names: list[str]) -> bool:
        try:
            obstore.delete(self._store, names)
        except (BaseError, NotImplementedError, OSError, ValueError) as error:
            pass_on(error)
            return False
        return True

    def _delete(self, name: str) -> int:
        with contextlib.suppress(VersionNotFound), self._translated(name):
            obstore.delete(self._store, name)
        return 1

    def _put_new(self, name: str, data: bytes) -> bool:
        """A conditional put; False if the name is taken, or another writer is at it."""
        with self._translated(name):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            except (NotSupportedError, NotImplementedError) as error:
                raise _unfit(self._where) from error
        return True

    def _prove(self) -> None:
        """Once per process: that of two creations of one name the second is refused.

        Raises:
            StorageUnfit: it is not. StorageError: the bucket cannot be written.
        """
        with self._guard:
            if self._proved:
                return
            name = f"{TEMPORARY}/probe-{secrets.token_hex(8)}"
            try:
                if not self._put_new(name, b"first"):
                    raise StorageBusy("a probe with a random name exists already", where=self._at(name))
                if self._put_new(name, b"second") or bytes(self._range(name, 0, 6)) != b"first":
                    raise _unfit(self._where)
            except VersionNotFound as error:  # it was just put: a gateway that lags, or somebody who clears away
                raise StorageBusy("the store does not show what was just put", where=self._at(name)) from error
            finally:
                with contextlib.suppress(StorageError):
                    self.delete(name)
            self._proved = True

    def _size(self, name: str) -> int:

        with self._translated(name):
            return int(obstore.head(self._store, name)["size"])

    def _range(self, name: str, offset: int, length: int) -> memoryview:
        """`length` bytes from `offset` on, fewer only at the end of the object."""
        if length == 0:
            self._size(name)  # says so if it is not there
            return memoryview(b"")
        with self._translated(name):
            try:
                answer = obstore.get(self._store, name, options={"range": (offset, offset + length)})
                data = answer.bytes()
            except (GenericError, ValueError) as error:
                # "Not satisfiable" is how a store says that nothing is left there.
                if _OUT_OF_RANGE.search(str(error)[: 4 * _MAX_MESSAGE]) and self._size(name) <= offset:
                    return memoryview(b"")
                raise
            size = answer.meta["size"]
        if len(data) != max(0, min(offset + length, size) - offset):
            raise StorageBusy("the answer was cut short", where=self._at(name))
        return memoryview(data)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """The one border where obstore's errors become ours."""
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            remedy = "check the credentials and what they may do in this bucket"
            raise StorageError(f"the store refuses: {_words(error)}", where=self._at(name), remedy=remedy) from error
        except (BaseError, OSError, ValueError) as error:
            pass_on(error)
            if _NO_BUCKET.search(str(error)):
                remedy = "create the bucket, or correct the URL"
                raise StorageError("the bucket is not there", where=self._where, remedy=remedy) from error
            if isinstance(error, FileNotFoundError):
                raise VersionNotFound(f"there is no {name}", where=self._at(name)) from error
            raise StorageBusy(f"the store failed: {_words(error)}", where=self._at(name)) from error


def _copies(chunks: Iterable[memoryview], progress: Callable[[int], None] = lambda _: None) -> Iterator[bytes]:
    """Yields copies of the chunks, of at most PART_BYTES each: a chunk is the caller's again when the next is asked for."""
    for chunk in chunks:
        for at in range(0, len(chunk), PART_BYTES):
            piece = bytes(chunk[at : at + PART_BYTES])
            yield piece
            progress(len(piece))


def _unfit(where: str) -> StorageUnfit:
    remedy = "use a store that honours `If-None-Match: *` on put, or a newer release of this one"
    return StorageUnfit("an object cannot be created exactly once here", where=where, remedy=remedy)


def _words(error: BaseException) -> str:
    """The first line of what was said, without anything that could be a signature."""
    return _QUERY.sub("?...", str(error).partition("\n")[0])[:_MAX_MESSAGE]
