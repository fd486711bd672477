"""What is written is compared with the seal before it has a name: plain and encrypted, in a directory and in a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.base.errors import CorruptError
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.tiers.backends.interface import Chunks
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import Storage, open_storage
from sample_kit import sampled
from tiers.s3 import BUCKET, Server, s3_server
from tiers.samples import STAMP, bundle, page_memory, piece, random_image, ref_of

V1 = Version(1, 10)
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(params=["plain", "encrypted"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "plain":
        return ""
    path = tmp_path / "key"
    path.write_text(bytes(range(32)).hex() + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, server: Server, tmp_path: Path, key: str) -> Storage:
    place = tmp_path / "root" if request.param == "directory" else f"s3://{BUCKET}/proved-{next(_prefixes)}"
    made = open_storage(place, Events(), encryption=KeySource(key))
    made.claim()
    return made


class Image:
    """A bundle's image in memory that is aligned as a slot's, and its seal."""

    def __init__(self, num_bytes: int) -> None:
        one = bundle("big-0", piece("w", "U8", (num_bytes,)))
        made = random_image(one)
        self.view = page_memory(len(made))
        self.view[:] = made
        self.ref: BundleRef = ref_of(one)
        self.seal: Seal = image_format.seal(one.bundle_id, self.view)

    def write(self, store: Storage) -> BundleFile:
        return store.bundles.write(V1, self.ref, self.seal, self.view, stamp=STAMP)


def when_asked(
    monkeypatch: pytest.MonkeyPatch, store: Storage, index: int, act: Callable[[], None], *, handed: bool = False
) -> None:
    """Does `act` once, when the backend asks for chunk `index`; or when that is made and not yet in its hands."""
    real = type(store.bundles._files).chunks
    acted: list[int] = []

    class Watched(Chunks):
        def __init__(self, inner: Chunks) -> None:
            self._inner, self.num_bytes = inner, inner.num_bytes

        def __iter__(self) -> Iterator[memoryview]:
            source = iter(self._inner)
            for number in itertools.count():
                now = number == index and not acted
                if now and not handed:
                    acted.append(number)
                    act()
                try:
                    chunk = next(source)
                except StopIteration:
                    return
                if now and handed:
                    acted.append(number)
                    act()
                yield chunk

    monkeypatch.setattr(type(store.bundles._files), "chunks", lambda *args: Watched(real(*args)))


def names(store: Storage) -> list[str]:
    """Everything in the version's directory, and what is not whole."""
    return [name for directory in (str(V1), ".tmp") for name, _ in store._backend.listing(directory)]


NUM_BYTES = 4 * CHUNK_BYTES - 8192  # four chunks, header included: the last is not taken when the second is asked for


@pytest.mark.parametrize(
    ("asked", "at"), sampled([(1, 3), (0, 1), (0, 0)], (0, 1)), ids=["the last", "the next", "the first"]
)
def test_bytes_that_change_before_they_are_written_get_no_name(
    store: Storage, asked: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(NUM_BYTES)

    def spoil() -> None:
        image.view[at * CHUNK_BYTES + 5000] ^= 1

    when_asked(monkeypatch, store, asked, spoil)
    with pytest.raises(CorruptError, match=f"chunk {at} of image big-0") as caught:
        image.write(store)
    assert caught.value.where.startswith(f"memory, on its way to {store.where}/{V1}/big-0-")
    assert names(store) == []

    image.view[at * CHUNK_BYTES + 5000] ^= 1
    file = image.write(store)
    store.bundles.verify(V1, file)
    assert names(store) == [file.file]


@pytest.mark.parametrize("key", ["plain"], indirect=True)
@pytest.mark.parametrize("at", sampled([0, 1, 3], 1))
def test_bytes_that_change_on_their_way_to_the_disk_get_no_name(
    store: Storage, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hashed after they were written, not before: what is given to something else changes for good."""
    image = Image(NUM_BYTES)

    def spoil() -> None:
        image.view[at * CHUNK_BYTES + 5000] ^= 1

    when_asked(monkeypatch, store, at, spoil, handed=True)
    with pytest.raises(CorruptError, match=f"chunk {at} of image big-0"):
        image.write(store)
    assert names(store) == []


def test_a_small_image_that_changed_gets_no_name_either(store: Storage) -> None:
    image = Image(1000)
    image.view[4096] ^= 1
    with pytest.raises(CorruptError, match="chunk 0"):
        image.write(store)
    assert names(store) == []


def test_a_good_file_stays_when_its_replacement_is_refused(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor writes what a writer that was taken for dead has written already."""
    image = Image(NUM_BYTES)
    file = image.write(store)

    def spoil() -> None:
        image.view[-1] ^= 1

    when_asked(monkeypatch, store, 1, spoil)
    with pytest.raises(CorruptError):
        image.write(store)
    store.bundles.verify(V1, file)
    assert names(store) == [file.file]


def test_a_seal_without_chunk_digests_proves_the_whole(store: Storage) -> None:
    image = Image(NUM_BYTES)
    image.seal = Seal(image.seal.bundle_id, image.seal.length, image.seal.digest)
    image.view[CHUNK_BYTES + 1] ^= 1
    with pytest.raises(CorruptError, match="differs from its seal"):
        image.write(store)
    assert names(store) == []


def test_proving_costs_a_bucket_no_request(server: Server, store: Storage) -> None:
    """Small files go up in one put, also those that are made on the way."""
    image = Image(1000)
    if not store.where.startswith("s3://"):
        pytest.skip("a directory has no requests")
    with server.planned(lambda _: "") as seen:
        image.write(store)
    assert [request.method for request in seen] == ["PUT"]
