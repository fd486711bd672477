"""Bundle files as they lie in storage: plain, or encrypted chunk by chunk with a trailer of nonces and tags behind.

What is written is proved on the way: each chunk of the image is hashed after it was taken and compared with the seal
before the file has a name. Memory that is given to something else changes once and for good, so a chunk that is right
afterwards was right before.

Offsets are those of the image in both cases: ciphertext has the length of its plain text, and chunk i lies where chunk i
of the image would. Encrypting runs two chunks ahead of the disk, in ten buffers, whatever the size of the bundle: each
chunk is copied there first, so what is proved, what the nonce follows from and what is encrypted are the same bytes. What
a reader gets is either authenticated or an error. The digests of what is read are checked above, by `storage`.

Specification of the trailer: docs/spec/format.md, section 6.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import xxhash

from holdfast.base.errors import ConfigError, CorruptError, StorageBusy, VersionNotFound
from holdfast.core.model import Version
from holdfast.tiers.backends.interface import Backend, Chunks, PageCached
from holdfast.tiers.backends.parallel_streams import MOST_STREAMS
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.encryption import LOCK_BYTES, TAG_BYTES, FileKey, Key, Name, OlderFileKey
from holdfast.tiers.storage.manifest import ROOT_NAME, BundleFile, is_older

T = TypeVar("T")

MAGIC = b"holdfast-aesgcm2"
OLDER_MAGIC = b"holdfast-aesgcm1"
_HEAD = struct.Struct(f"<{len(MAGIC)}s8sQQ")  # magic, key id, length of the image, number of chunks
_DIGEST_BYTES = 16
# A file that is listed has fewer chunks: a record cannot name so many digests. What is longer is a sparse file of others.
MAX_TRAILER_BYTES = 16 << 20
# Chunks that are encrypted ahead of those that are written, and chunks that are written at once: a buffer for each.
AHEAD = 2
ENCRYPTED_AT_ONCE = 8
# Threads that hash what was written.
PROVERS = 2
# Attribute caches of NFS hold for three seconds at least; whoever waits longer had better read another version.
LAG_PAUSES_S = (0.1, 0.3, 0.6, 1.0, 1.5)


@dataclass(frozen=True, slots=True)
class Trailer:
    """Holds what stands behind the ciphertext.

    Attributes:
        locks: of each chunk, see `tiers.storage.encryption`: nonce and tag, in an older file the tag alone.
        digest: XXH3-128 of the ciphertext chunks' digests: damage is found without the key.
        older: of format 2.
    """

    key_id: str
    length: int
    locks: tuple[bytes, ...]
    digest: bytes
    older: bool = False

    def encode(self, name: str) -> bytes:
        """Return its bytes; they end in a checksum that covers the file's name too."""
        magic = OLDER_MAGIC if self.older else MAGIC
        head = _HEAD.pack(magic, bytes.fromhex(self.key_id), self.length, len(self.locks))
        body = head + b"".join(self.locks) + self.digest
        return body + xxhash.xxh3_128_digest(name.encode() + body)

    @classmethod
    def decode(cls, data: bytes, name: str, where: str = "") -> Trailer:
        """Return the trailer in `data`.

        Raises:
            CorruptError: it is none, or not of this file.
        """
        body, check = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(body) < _HEAD.size + _DIGEST_BYTES or xxhash.xxh3_128_digest(name.encode() + body) != check:
            raise CorruptError("the trailer of the encrypted file is damaged, or of another file", where=where or name)
        magic, key_id, length, count = _HEAD.unpack_from(body)
        older = magic == OLDER_MAGIC
        size, locks = _lock_bytes(older=older), body[_HEAD.size : -_DIGEST_BYTES]
        if magic not in (MAGIC, OLDER_MAGIC) or count != _num_chunks(length) or len(locks) != count * size:
            raise CorruptError("the trailer of the encrypted file is not valid", where=where or name)
        cut = tuple(locks[at : at + size] for at in range(0, len(locks), size))
        return cls(key_id.hex(), length, cut, body[-_DIGEST_BYTES:], older)


def stored_length(file: BundleFile) -> int:
    """Return the bytes of the file in storage."""
    return file.length + (_trailer_bytes(file) if file.key_id else 0)


def _trailer_bytes(file: BundleFile) -> int:
    return _HEAD.size + _num_chunks(file.length) * _lock_bytes(older=file.is_older) + 2 * _DIGEST_BYTES


def _lock_bytes(*, older: bool) -> int:
    return TAG_BYTES if older else LOCK_BYTES


def _num_chunks(length: int) -> int:
    return -(-length // CHUNK_BYTES)


class BundleFiles:
    """Reads and writes the files of one job's bundles.

    Args:
        key: what new ones are encrypted with, and old ones opened; None writes plain files.
        job_id: asks for the job, when a key is needed.
    """

    def __init__(self, backend: Backend, key: Key | None, job_id: Callable[[], str]) -> None:
        self._backend = backend
        self._key = key
        self._job_id = job_id
        self._last: tuple[str, Trailer] | None = None

    @property
    def key_id(self) -> str:
        """Return the id of the key; empty if there is none."""
        return self._key.id if self._key else ""

    def chunks(self, version: Version, file: BundleFile, view: memoryview) -> Chunks:
        """Returns what is to be put in storage for an image; it raises CorruptError if that is not what was sealed."""
        where = f"memory, on its way to {self._where(f'{version}/{file.file}')}"
        if not file.key_id:
            return _Plain(view, file, where)
        return _Encrypted(view, file, where, self._key_of(version, file).of_file(self._name(version, file)))

    def read_into(
        self, version: Version, file: BundleFile, view: memoryview, *, offset: int = 0, cached: bool = False
    ) -> int:
        """Fills `view` from `offset` of the image on; fewer bytes only at the end of the file. `cached`: from the page
        cache of this machine alone; the backend is PageCached.

        Raises:
            CorruptError: the file is missing, or an encrypted chunk does not open. ConfigError: the key is another.
            VersionNotFound: the version was retired meanwhile. NotCachedError: the page cache has not all of it.
        """
        name = f"{version}/{file.file}"
        read = (
            self._backend.read_cached if cached and isinstance(self._backend, PageCached) else self._backend.read_into
        )
        if not file.key_id:
            return listed(self._backend, version, lambda: read(name, view, offset=offset))
        trailer, key = self._trailer(version, file), self._opener(version, file)
        view = view[: max(0, file.length - offset)]
        for index in range(offset // CHUNK_BYTES, -(-(offset + len(view)) // CHUNK_BYTES)):
            begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, file.length)
            at, stop = max(offset, begin), min(offset + len(view), end)
            wanted = view[at - offset : stop - offset]
            # A chunk is opened where it will lie; one of which only a part is wanted, beside it.
            stored = wanted if len(wanted) == end - begin else memoryview(bytearray(end - begin))
            count = listed(self._backend, version, partial(read, name, stored, offset=begin))
            if count < len(stored):
                image_format.check_length(begin + count, file.seal, name)
            key.decrypt(index, stored, trailer.locks[index], stored)
            if stored is not wanted:
                wanted[:] = stored[at - begin : stop - begin]
        return len(view)

    def read(self, version: Version, file: BundleFile, *, offset: int = 0, length: int) -> bytes:
        """At most `length` bytes of the image from `offset` on; raises as `read_into`."""
        if not file.key_id:
            read = partial(self._backend.read, f"{version}/{file.file}", offset=offset, length=length)
            return listed(self._backend, version, read)
        buffer = bytearray(max(0, min(length, file.length - offset)))
        self.read_into(version, file, memoryview(buffer), offset=offset)
        return bytes(buffer)

    def check_end(self, version: Version, file: BundleFile, count: int) -> None:
        """Proves that the file ends where it should, after `count` bytes of the image were read.

        Raises:
            CorruptError: it is longer or shorter.
        """
        name, end = f"{version}/{file.file}", stored_length(file)
        extra = listed(self._backend, version, lambda: self._backend.read(name, offset=end, length=1))
        image_format.check_length(count + len(extra), file.seal, self._where(name))

    def verify_stored(self, version: Version, file: BundleFile) -> None:
        """Proves an encrypted file without its key: what lies there is what was written.

        Raises:
            CorruptError: damaged.
        """
        name, trailer = f"{version}/{file.file}", self._trailer(version, file)
        buffer, digests = memoryview(bytearray(min(file.length, CHUNK_BYTES))), []
        for at in range(0, file.length, CHUNK_BYTES):
            chunk = buffer[: file.length - at]
            count = listed(self._backend, version, partial(self._backend.read_into, name, chunk, offset=at))
            digests.append(xxhash.xxh3_128_digest(chunk[:count]))
        if xxhash.xxh3_128_digest(b"".join(digests)) != trailer.digest:
            raise CorruptError("the encrypted file is damaged", where=self._where(name))
        self.check_end(version, file, file.length)

    def looks_ours(self, version: Version, name: str, size: int) -> bool:
        """Return whether an encrypted file has a trailer of its own; its content may be anything."""
        # The number of chunks follows from the size, and with it where the trailer begins.
        lock_bytes = _lock_bytes(older=is_older(name))
        count = -(-(size - _HEAD.size - 2 * _DIGEST_BYTES) // (CHUNK_BYTES + lock_bytes))
        length = size - _HEAD.size - 2 * _DIGEST_BYTES - count * lock_bytes
        if length < 0 or _num_chunks(length) != count or size - length > MAX_TRAILER_BYTES:
            return False
        try:
            read = partial(self._backend.read, f"{version}/{name}", offset=length, length=size - length)
            data = listed(self._backend, version, read)
            trailer = Trailer.decode(data, name, self._where(f"{version}/{name}"))
            return (trailer.length, trailer.older) == (length, is_older(name))
        except (CorruptError, VersionNotFound):
            return False

    def _where(self, name: str) -> str:
        """A file as the operator finds it."""
        return f"{self._backend.properties.where}/{name}"

    def _trailer(self, version: Version, file: BundleFile) -> Trailer:
        name = f"{version}/{file.file}"
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        size = _trailer_bytes(file)
        data = listed(self._backend, version, lambda: self._backend.read(name, offset=file.length, length=size + 1))
        trailer = Trailer.decode(data, file.file, self._where(name))
        if (trailer.length, trailer.key_id, trailer.older) != (file.length, file.key_id, file.is_older):
            raise CorruptError("the trailer is of another file", where=self._where(name))
        self._last = (name, trailer)
        return trailer

    def _opener(self, version: Version, file: BundleFile) -> OlderFileKey:
        key, name = self._key_of(version, file), self._name(version, file)
        return key.of_older_file(name) if file.is_older else key.of_file(name)

    def _name(self, version: Version, file: BundleFile) -> Name:
        return Name(self._job_id(), str(version), file.ref.bundle_id, file.length, file.digest)

    def _key_of(self, version: Version, file: BundleFile) -> Key:
        if self._key is None or self._key.id != file.key_id:
            has = f"the key given is {self._key.id}" if self._key else "no key is given"
            raise ConfigError(
                f"the version is encrypted with key {file.key_id}; {has}",
                where=self._where(f"{version}/{file.file}"),
                remedy="name the key's file as `encryption_key` in the settings (HOLDFAST_CONFIG, or the Checkpointer)",
            )
        return self._key


class _Proof:
    """Compares the chunks of an image with its seal, in order.

    Raises:
        CorruptError: they differ; from either method.
    """

    def __init__(self, file: BundleFile, where: str) -> None:
        self._seal = file.seal
        self._where = where
        self._digests: list[str] = []

    def take(self, digest: str) -> None:
        """Takes what the next chunk was hashed to."""
        self._digests.append(digest)
        image_format.check_chunk(len(self._digests) - 1, self._digests[-1], self._seal, self._where)

    def end(self) -> None:
        """Takes the chunks that were taken as all of the image."""
        image_format.check_digest(tuple(self._digests), self._seal, self._where)


class _Plain(Chunks):
    """An image as it lies in memory. A chunk is hashed when it was taken, while the next one is written."""

    def __init__(self, view: memoryview, file: BundleFile, where: str) -> None:
        self.num_bytes = len(view)
        self.at_once = MOST_STREAMS
        self._view = view
        self._file = file
        self._where = where

    def __iter__(self) -> Iterator[memoryview]:
        proof = _Proof(self._file, self._where)
        parts = list(image_format.chunks(self._view))
        with ThreadPoolExecutor(PROVERS, "holdfast proving") as pool:  # no thread for what is one chunk
            behind: deque[Future[str]] = deque()
            for index, part in enumerate(parts):
                yield part  # asked for the next: all but those that may be under way are written
                if index >= self.at_once:
                    behind.append(pool.submit(image_format.chunk_digest, parts[index - self.at_once]))
                while len(behind) > PROVERS:
                    proof.take(behind.popleft().result())
            left = parts[-self.at_once :]
            if len(parts) > 1:
                behind.extend(pool.submit(image_format.chunk_digest, part) for part in left)
            for hashed in behind:
                proof.take(hashed.result())
            if len(parts) == 1:
                proof.take(image_format.chunk_digest(left[0]))
        proof.end()


@dataclass(frozen=True, slots=True)
class _Closed:
    """A chunk that is encrypted.

    Attributes:
        stored: its ciphertext, in a buffer that a later chunk is given.
        plain: digest of what it was.
        digest: XXH3-128 of the ciphertext.
    """

    stored: memoryview
    plain: str
    lock: bytes
    digest: bytes


class _Encrypted(Chunks):
    """The stored form of an image, made while it is written."""

    def __init__(self, view: memoryview, file: BundleFile, where: str, key: FileKey) -> None:
        self.num_bytes = stored_length(file)
        self.at_once = ENCRYPTED_AT_ONCE
        self._view = view
        self._file = file
        self._where = where
        self._key = key

    def __iter__(self) -> Iterator[memoryview]:
        made: list[_Closed] = []
        proof = _Proof(self._file, self._where)
        parts = list(image_format.chunks(self._view))
        # Page-aligned, for direct writes. Some are written, the others are filled.
        buffers = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(min(AHEAD + self.at_once, len(parts)))]

        def encrypt(index: int) -> _Closed:
            chunk = buffers[index % len(buffers)][: len(parts[index])]
            chunk[:] = parts[index]
            plain = image_format.chunk_digest(chunk)
            lock = self._key.encrypt(index, chunk)
            return _Closed(chunk, plain, lock, xxhash.xxh3_128_digest(chunk))

        with ThreadPoolExecutor(AHEAD, "holdfast encrypting") as pool:
            ahead = [pool.submit(encrypt, index) for index in range(min(AHEAD, len(parts)))]
            for index in range(len(parts)):
                made.append(ahead.pop(0).result())
                proof.take(made[-1].plain)
                if index + AHEAD < len(parts):
                    ahead.append(pool.submit(encrypt, index + AHEAD))
                if not ahead:  # the trailer follows the last chunk, in one piece with it: only the end may be odd
                    proof.end()
                    yield from self._end(made)
                else:
                    yield made[-1].stored

    def _end(self, made: list[_Closed]) -> Iterator[memoryview]:
        digest = xxhash.xxh3_128_digest(b"".join(chunk.digest for chunk in made))
        locks, last = tuple(chunk.lock for chunk in made), made[-1].stored
        trailer = Trailer(self._file.key_id, self._file.length, locks, digest).encode(self._file.file)
        whole = memoryview(mmap.mmap(-1, len(last) + len(trailer)))
        whole[: len(last)] = last
        whole[len(last) :] = trailer
        yield whole


def listed(
    backend: Backend, version: Version, read: Callable[[], T], *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Reads a file that a version's commit record lists.

    Where names show up late (NFS), it is looked for a few times more, for LAG_PAUSES_S altogether.

    Raises:
        CorruptError: it is missing, and the commit stands: the version is damaged.
        VersionNotFound: the commit is gone too: retention removed the version meanwhile, or it was never committed.
        StorageBusy: storage shows its name, and still says that it is not there. That proves nothing.
    """
    for pause_s in (*(LAG_PAUSES_S if backend.properties.lags else ()), None):
        try:
            return read()
        except VersionNotFound as error:
            if pause_s is None:
                _require_commit(backend, version)
                _require_unlisted(backend, version, error.where)
                raise CorruptError("a file of a committed version is missing", where=error.where) from error
            sleep(pause_s)
    raise AssertionError("unreachable")


def _require_unlisted(backend: Backend, version: Version, where: str) -> None:
    leaf = where.rpartition("/")[2]
    if any(name == leaf for name, _ in backend.listing(str(version))):
        raise StorageBusy("storage lists a file and says that it is not there", where=where)


def _require_commit(backend: Backend, version: Version) -> None:
    try:
        backend.read(f"{version}/{ROOT_NAME}", length=1)
    except VersionNotFound as error:
        raise VersionNotFound(
            f"{version} is not there (any more)",
            where=f"{backend.properties.where}/{version}",
            remedy="it was retired while it was read: take a newer one, or pin what has to stay",
        ) from error
