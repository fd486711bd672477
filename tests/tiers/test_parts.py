"""Manifests of very many parts: read many at once, and once per keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.base.errors import StorageBusy, StorageError
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage import version_store as storage_module
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

V = Version(1, 3)
NUM_PARTS = 64
TIMEOUT_S = 10.0


@pytest.fixture
def stored(tmp_path: Path) -> Storage:
    """A version of 64 bundles, each in a part of its own."""
    storage = open_storage(tmp_path / "root", Events())
    job, stamp = storage.claim(), make_stamp(1)
    storage.incarnations.register()
    parts = {}
    for number in range(NUM_PARTS):
        image = memoryview(bytes([number]) * 100)
        seal: Seal = image_format.seal(f"g{number}", image)
        file = storage.bundles.write(V, BundleRef(f"g{number}", (number,), 0, 1, 100, "f"), seal, image, stamp=stamp)
        name, *entry = storage.write_part(V, number, [file], stamp=stamp)
        parts[name] = tuple(entry)
    storage.commit(Manifest(V, job, NUM_PARTS, "L", None, parts), stamp=stamp)
    return storage


def reads(monkeypatch: pytest.MonkeyPatch, around: Callable[[str], None]) -> list[str]:
    """The names that are read from now on; `around` is called before each."""
    seen: list[str] = []
    read = LocalBackend.read

    def noted(self: LocalBackend, name: str, **more: int) -> bytes:
        seen.append(name)
        around(name)
        return read(self, name, **more)

    monkeypatch.setattr(LocalBackend, "read", noted)
    return seen


def test_parts_are_read_many_at_once(stored: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(storage_module.READS_AT_ONCE)
    reads(monkeypatch, lambda name: together.wait(TIMEOUT_S) and None if "manifest-" in name else None)

    whole = stored.manifest(V)  # a barrier that one reader alone would never pass

    assert len(whole.bundles) == NUM_PARTS


def test_many_versions_are_looked_into_at_once(
    stored: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes as long as a reply of the store."""
    others = [Version(2, step) for step in range(2 * storage_module.READS_AT_ONCE - 1)]
    for one in others:
        (tmp_path / "root" / str(one)).mkdir()
        if one.step % 9:
            (tmp_path / "root" / str(one) / manifests.ROOT_NAME).write_text("{}")
    together = threading.Barrier(storage_module.READS_AT_ONCE)
    seen = reads(monkeypatch, lambda _: together.wait(TIMEOUT_S) and None)

    committed = [V, *(one for one in others if one.step % 9)]
    assert stored.versions() == committed
    assert stored.look() == (committed, [one for one in others if one.step % 9 == 0])
    assert len(seen) == 2 * (len(others) + 1)


def test_the_first_part_that_cannot_be_read_ends_it(stored: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    is_given_up = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_given_up.set()
            super().shutdown(wait)

    def refuse(name: str) -> None:
        if "manifest-" in name:
            assert name.endswith("manifest-0.json") or is_given_up.wait(TIMEOUT_S)
            raise StorageError("the store is away", where=name)

    monkeypatch.setattr(storage_module, "ThreadPoolExecutor", Pool)
    seen = reads(monkeypatch, refuse)
    with pytest.raises(StorageError, match="the store is away"):
        stored.manifest(V)
    assert len([name for name in seen if "manifest-" in name]) <= storage_module.READS_AT_ONCE + 1


def test_a_keeper_reads_the_parts_once_for_all_its_ranks(stored: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy_storage = LazyStorage(stored.where, Events())
    seen = reads(monkeypatch, lambda _: None)
    found: list[dict[str, BundleFile]] = []
    ranks = [threading.Thread(target=lambda: found.append(lazy_storage.files(V))) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)

    assert len(found) == 8
    assert all(set(files) == {f"g{number}" for number in range(NUM_PARTS)} for files in found)
    assert len([name for name in seen if "manifest-" in name]) == NUM_PARTS


def test_what_is_kept_is_not_believed_when_the_root_says_something_else(stored: Storage, tmp_path: Path) -> None:
    lazy_storage = LazyStorage(stored.where, Events())
    assert len(lazy_storage.files(V)) == NUM_PARTS
    root = replace(stored.root(V), parts=dict(list(stored.root(V).parts.items())[:1]))
    (tmp_path / "root" / str(V) / manifests.ROOT_NAME).write_bytes(manifests.encode_root(root))

    assert len(lazy_storage.files(V)) == 1


def test_whether_a_version_is_committed_is_no_question_to_all_its_files(
    stored: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of a version of thousands of files is many requests, and every rank may ask."""
    seen, listed, listing = reads(monkeypatch, lambda _: None), list[str](), LocalBackend.listing

    def noted(self: LocalBackend, directory: str) -> list[tuple[str, int]]:
        listed.append(directory)
        return listing(self, directory)

    monkeypatch.setattr(LocalBackend, "listing", noted)
    root, other = f"{V}/{manifests.ROOT_NAME}", Version(1, 4)
    assert stored.is_committed(V)
    assert stored.is_durable(V)
    assert stored.look() == ([V], [])
    assert seen == [root] * 3
    assert listed == [""], "only the versions"
    assert not stored.is_committed(other, by_name=True)
    assert not stored.is_durable(other, by_name=True)
    assert listed == [""]
    assert not stored.is_committed(other)
    assert listed == ["", str(other)], "a list may show what its name does not find yet"
    standing = tmp_path / "root" / root
    standing.rename(tmp_path / "moved")
    standing.symlink_to(tmp_path / "moved")
    assert stored.is_committed(V, by_name=True), "who cannot read it must be told so, and not take an older one"


def test_a_store_that_does_not_answer_is_asked_nothing_more(stored: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> bytes:
        raise StorageBusy("it does not answer")

    monkeypatch.setattr(LocalBackend, "read", busy)
    monkeypatch.setattr(LocalBackend, "listing", lambda *_: pytest.fail("asked again"))
    with pytest.raises(StorageBusy):
        stored.is_committed(V)
