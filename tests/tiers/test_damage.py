"""Ten thousand ways to be wrong: every flip, cut, swap and stale block in files and in slots is found, and nothing else is.

The damages are drawn from a seed, so that a failure is repeated by its number. By default a thousand of each; all ten
thousand with --slow.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.base.errors import CorruptError, HoldfastError, StorageError, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import slots
from holdfast.tiers.memory.slots import ImagePlace, Slot, SlotHeader
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.bundle_files import Trailer
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.samples import new_store, random_image, ref_of, sample_bundle, save, verify

OLD, NEW = Version(1, 10), Version(1, 20)
KINDS = ("flip", "flip", "flip", "cut", "grow", "swap", "zero", "stale")
BLOCK = 512

thousand_or_all = pytest.mark.parametrize("trials", [1000, pytest.param(10_000, marks=pytest.mark.slow)])


def damaged(good: bytes, stale: bytes, kind: str, source: random.Random) -> bytes:
    """Other bytes than `good`; `stale` is what stood at this place in an older version."""
    at = source.randrange(len(good))
    data = bytearray(good)
    if kind == "flip":
        data[at] ^= 1 << source.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "grow":
        data += source.randbytes(source.randrange(1, BLOCK))
    elif kind == "swap":
        other = source.randrange(len(good))
        first, second = (min(place, len(good) - BLOCK) for place in (at, other))
        data[first : first + BLOCK], data[second : second + BLOCK] = (
            good[second : second + BLOCK],
            good[first : first + BLOCK],
        )
        data = data[: len(good)]
    elif kind == "zero":
        data[at : at + BLOCK] = bytes(len(data[at : at + BLOCK]))
    else:
        piece = stale[at : at + BLOCK]
        data[at : at + len(piece)] = piece
    return bytes(data)


def changes(good: bytes, stale: bytes, source: random.Random, trials: int) -> Iterator[tuple[str, bytes]]:
    """So many damages that are none by chance."""
    done = 0
    while done < trials:
        kind = source.choice(KINDS)
        bad = damaged(good, stale, kind, source)
        if bad != good:
            done += 1
            yield kind, bad


@dataclass(frozen=True)
class Files:
    store: Storage
    names: list[str]

    def path(self, version: Version, name: str) -> Path:
        return Path(self.store.where) / str(version) / name


@pytest.fixture
def files(tmp_path: Path) -> Files:
    store = new_store(tmp_path / "root")
    save(store, OLD, seed=1)
    found = save(store, NEW, seed=7)
    return Files(store, [*(bundle.file for bundle in found.bundles), *found.parts, manifests.ROOT_NAME])


@thousand_or_all
def test_every_damage_to_a_version_is_found(files: Files, trials: int) -> None:
    source, missed, kinds = random.Random(20), [], Counter[str]()
    old = files.store.manifest(OLD)
    stale_names = [*(bundle.file for bundle in old.bundles), *old.parts, manifests.ROOT_NAME]
    for name, stale_name in zip(files.names, stale_names, strict=True):
        path, stale = files.path(NEW, name), files.path(OLD, stale_name).read_bytes()
        good = path.read_bytes()
        for number, (kind, bad) in enumerate(changes(good, stale, source, trials // len(files.names))):
            path.write_bytes(bad)
            kinds[kind] += 1
            try:
                verify(files.store, NEW)
                missed.append((name, number, kind))
            except CorruptError:
                pass
        path.write_bytes(good)
    assert not missed
    assert set(kinds) == set(KINDS)
    assert verify(files.store, NEW) > 0


@thousand_or_all
def test_clean_versions_raise_no_alarm(files: Files, trials: int) -> None:
    assert sum(verify(files.store, NEW) > 0 for _ in range(trials)) == trials


@thousand_or_all
def test_every_damage_to_a_slot_is_found(trials: int) -> None:
    """Its header or its images: what comes back is what was sealed, or nothing."""
    source = random.Random(21)
    b = sample_bundle()
    images = [random_image(b, seed, {"lr": 0.1}) for seed in (1, 2)]
    slot = Slot.create(64 << 10, slot_id=1)
    try:
        seals = [image_format.seal(b.bundle_id, image) for image in images]
        place = ImagePlace(ref_of(b), 0, seals[1])
        slot.view[: len(images[1])] = images[1]
        slots.write_header(slot, SlotHeader("job", 0, NEW, "layout", False, (place,), False))
        good = bytes(slot.view[: len(images[1])])
        header = slots.read_header(slot)
        assert header is not None
        found = 0
        for kind, bad in changes(good, bytes(images[0]), source, trials):
            if len(bad) != len(good):
                continue  # a slot has the length it has
            found += 1
            slot.view[: len(good)] = bad
            with pytest.raises(CorruptError):
                image_format.verify(slot.view[: len(good)], header.images[0].seal, kind)
        assert found > trials // 2
        slot.view[: len(good)] = good
        image_format.verify(slot.view[: len(good)], header.images[0].seal, "clean")
    finally:
        slot.close()


@pytest.mark.parametrize("trials", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_nothing_but_an_error_of_ours_comes_out_of_hostile_bytes(trials: int) -> None:
    """Headers, manifests and trailers of any bytes: refused, quickly, with our own error."""
    source = random.Random(22)
    b = sample_bundle()
    image = bytes(random_image(b, 1, {"lr": 0.1}))
    head = image[: image_format.header_length(image[:8], len(image), "image")]
    file = manifests.BundleFile.of(ref_of(b), image_format.seal(b.bundle_id, image))
    part = manifests.encode_part([file])
    root = manifests.encode_root(manifests.Manifest(NEW, "ab" * 8, 1, "l", None, {"manifest-0.json": (1, "0" * 32)}))
    trailer = Trailer("00" * 8, 100, (bytes(28),), bytes(16)).encode("name")
    older = Trailer("00" * 8, 100, (bytes(16),), bytes(16), older=True).encode("name")
    readers = (
        (head, lambda data: image_format.read_header(data, len(image), "fuzz")),
        (part, lambda data: manifests.decode_part(data, "fuzz")),
        (root, lambda data: manifests.decode_root(data, "fuzz")),
        (trailer, lambda data: Trailer.decode(data, "name")),
        (older, lambda data: Trailer.decode(data, "name")),
    )
    accepted = 0
    for good, read in readers:
        for _, bad in changes(good, good[::-1], source, trials // 4):
            try:
                read(bad)
                accepted += 1
            except HoldfastError:
                pass
        for _ in range(trials // 40):
            with pytest.raises(HoldfastError):
                read(source.randbytes(source.randrange(300)))
    # The header of an image has no checksum of its own: its bytes are proved by the digest of their chunk.
    assert accepted <= trials // 4


def test_removal_races_a_reader_and_the_reader_gets_all_or_an_error(tmp_path: Path) -> None:
    """A version that is retired while it is read is whole, or not there, or damaged by name; never silently mixed."""
    root = tmp_path / "root"
    writer, reader = new_store(root), open_storage(root, Events())
    answers: Counter[str] = Counter()
    for step in range(40):
        version = Version(1, step)
        expected = save(writer, version, seed=step).num_bytes
        started = threading.Event()

        def read(version: Version = version, started: threading.Event = started, expected: int = expected) -> None:
            for _ in range(1000):
                started.set()
                try:
                    assert verify(reader, version) == expected
                    answers["whole"] += 1
                except VersionNotFound:
                    answers["gone"] += 1
                    return
                except (CorruptError, StorageError):
                    answers["damaged"] += 1

        thread = threading.Thread(target=read)
        thread.start()
        started.wait(30)
        writer.retire(version)
        thread.join(30)
        assert not thread.is_alive()
        assert reader.versions() == []
    assert answers["gone"] == 40
