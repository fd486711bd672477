"""Versions in storage: the commit, what counts as there, what is removed and what never is."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import (
    CorruptError,
    Fenced,
    HoldfastError,
    StorageError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.faults import damage
from tiers.samples import new_store, random_image, sample_bundle, save, tree, verify

V1, V2 = Version(1, 10), Version(1, 20)


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return new_store(tmp_path / "root")


# A version's life.


def test_a_saved_version_is_found_verified_and_read(store: Storage) -> None:
    manifest = save(store, V1)
    assert store.versions() == [V1]
    assert verify(store, V1) == manifest.num_bytes
    for number, file in enumerate(manifest.bundles):
        view = memoryview(bytearray(file.length))
        store.bundles.read_into(V1, file, view)
        image_format.verify(view, file.seal, file.file)
        assert view == random_image(sample_bundle(file.ref.bundle_id), number, {"lr": 0.1, "seed": 0})
        assert store.bundles.image(V1, file) == image_format.read_image(view, "here")


def test_a_version_directory_holds_exactly_the_files_of_its_manifest(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1)
    found = {path.name for path in (tmp_path / "root" / str(V1)).iterdir()}
    assert found == {"manifest.json", *manifest.parts, *(file.file for file in manifest.bundles)}
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


def test_the_same_state_makes_the_same_bytes_whoever_writes_it(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        new_store(root)
    shutil.copy(roots[0] / "holdfast.json", roots[1])  # one job
    for root in roots:
        save(new_store(root), V1)
    assert tree(roots[0] / str(V1)) == tree(roots[1] / str(V1))
    before = tree(roots[0])
    save(new_store(roots[0]), V1)  # a second writer, or a repeated request
    assert tree(roots[0]) == before


def test_bytes_are_counted_where_they_move(tmp_path: Path) -> None:
    events = Events()
    store = open_storage(tmp_path / "root", events)
    store.claim()
    manifest = save(store, V1)
    assert events.counters()["storage_written_bytes"] == manifest.num_bytes
    assert "storage_read_bytes" not in events.counters()  # looking at records is not reading state
    verify(store, V1)
    assert events.counters()["storage_read_bytes"] == manifest.num_bytes


def test_versions_are_listed_in_order_and_only_if_committed(store: Storage, tmp_path: Path) -> None:
    for version in (V2, V1, Version(2, 5)):
        save(store, version)
    (tmp_path / "root" / "i000001-s0000000099").mkdir()
    (tmp_path / "root" / "notes").mkdir()
    (tmp_path / "root" / "notes" / "manifest.json").write_text("{}")
    assert store.versions() == [V1, V2, Version(2, 5)]
    assert store.unfinished() == [Version(1, 99)]
    assert (tmp_path / "root" / "latest").read_text() == f"{Version(2, 5)}\n"


def test_a_commit_without_its_files_is_refused(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1)
    copy = tmp_path / "root" / str(V2)
    shutil.copytree(tmp_path / "root" / str(V1), copy)
    (copy / "manifest.json").unlink()
    file = copy / manifest.bundles[1].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match=f"1 of 2 files.*{manifest.bundles[1].file}"):
        store.commit(dataclasses.replace(manifest, version=V2), stamp=make_stamp(1))
    assert store.versions() == [V1]


def test_a_commit_with_other_content_is_fenced_and_an_equal_one_succeeds(store: Storage) -> None:
    manifest = save(store, V1)
    store.commit(manifest, stamp=make_stamp(1, 2))
    with pytest.raises(Fenced, match="other content"):
        store.commit(dataclasses.replace(manifest, layout="another"), stamp=make_stamp(1, 3))
    assert store.manifest(V1) == manifest


def test_a_commit_of_a_lower_incarnation_is_fenced(store: Storage) -> None:
    manifest = save(store, V1)
    assert store.incarnations.register() == 2
    with pytest.raises(Fenced, match="newer incarnation"):
        store.commit(dataclasses.replace(manifest, version=V2), stamp=make_stamp(1))
    assert store.versions() == [V1]


def test_of_many_committers_all_succeed_with_one_content(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1)
    (tmp_path / "root" / str(V1) / "manifest.json").unlink()
    faults: list[HoldfastError] = []

    def commit() -> None:
        try:
            store.commit(manifest, stamp=make_stamp(1))
        except HoldfastError as error:
            faults.append(error)

    threads = [threading.Thread(target=commit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert store.manifest(V1) == manifest


def test_a_hint_that_cannot_be_written_does_not_spoil_the_commit(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "root" / "latest").mkdir()
    save(store, V1)
    assert store.versions() == [V1]


# Removing.


def test_retiring_removes_the_commit_first_and_everything_that_it_lists(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, V1)
    save(store, V2)
    seen: list[str] = []
    for name in ("unlink", "fsync", "rmdir"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, real=real, **k: seen.append(f"{name} {a[0]}") or real(*a, **k)
        )
    store.retire(V1)
    kinds = [line.split()[0] for line in seen]
    assert seen[0] == "unlink manifest.json"
    files = parts = ["unlink", "unlink", "fsync"]
    assert kinds == ["unlink", "fsync", *files, "unlink", "fsync", *parts, "rmdir", "fsync"]
    assert [line.endswith(".safetensors") for line in seen[2:4]] == [True, True]
    assert not any(line.endswith(".safetensors") for line in seen[4:])
    assert not (tmp_path / "root" / str(V1)).exists()
    assert store.versions() == [V2]
    assert verify(store, V2)


def test_nothing_unknown_is_ever_deleted(store: Storage, tmp_path: Path) -> None:
    save(store, V1)
    directory = tmp_path / "root" / str(V1)
    unknown = {
        "notes.txt": b"mine",
        "model.safetensors": b"someone's weights",
        "manifest-9.json": b"{}",
        f"g9-{'0' * 32}.safetensors": b"named like ours, and is not",
    }
    for name, data in unknown.items():
        (directory / name).write_bytes(data)
    store.retire(V1)
    assert tree(directory) == unknown
    assert store.versions() == []
    store.discard(V1)
    assert tree(directory) == unknown


def test_a_version_that_was_never_committed_is_discarded_and_a_committed_one_is_not(
    store: Storage, tmp_path: Path
) -> None:
    save(store, V1)
    save(store, V2)
    (tmp_path / "root" / str(V2) / "manifest.json").unlink()
    (tmp_path / "root" / str(V2) / "manifest-0.json").unlink()
    store.discard(V2)
    assert not (tmp_path / "root" / str(V2)).exists()
    with pytest.raises(UsageError, match="retire it instead"):
        store.discard(V1)
    assert verify(store, V1)


@pytest.mark.parametrize("meanwhile", ["pinned", "committed"])
def test_what_is_pinned_or_committed_again_while_it_is_looked_at_is_not_discarded(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Who retires it may find a pin, and brings its commit back; the look at thousands of files takes long."""
    save(store, V1)
    commit, is_ours = tmp_path / "root" / str(V1) / "manifest.json", store.bundles.is_ours
    data = commit.read_bytes()
    commit.unlink()

    def looks(*asked: Any) -> bool:
        if meanwhile == "pinned":
            store.marks.pin(V1)
        else:
            commit.write_bytes(data)
        return is_ours(*asked)

    monkeypatch.setattr(store.bundles, "is_ours", looks)
    with pytest.raises(UsageError, match=meanwhile):
        store.discard(V1)
    commit.write_bytes(data)
    assert verify(store, V1)


def test_a_damaged_manifest_is_not_retired(store: Storage, tmp_path: Path) -> None:
    save(store, V1)
    damage(tmp_path / "root" / str(V1) / "manifest-1.json", "flipped")
    before = tree(tmp_path / "root")
    with pytest.raises(CorruptError):
        store.retire(V1)
    assert tree(tmp_path / "root") == before


def test_pinned_versions_are_not_retired(store: Storage) -> None:
    save(store, V1)
    store.marks.pin(V1)
    assert store.marks.pins() == {V1}
    with pytest.raises(UsageError, match="pinned"):
        store.retire(V1)
    store.marks.unpin(V1)
    assert store.marks.pins() == set()
    store.retire(V1)
    assert store.versions() == []


def test_nothing_is_put_back_into_what_took_the_place_of_the_root(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, V1)
    delete = LocalBackend.delete

    def late(self: LocalBackend, *names: str) -> None:
        monkeypatch.setattr(LocalBackend, "delete", delete)
        delete(self, *names)
        (tmp_path / "root").rename(tmp_path / "away")
        (tmp_path / "root").mkdir()
        monkeypatch.setattr(type(store.marks), "pins", unanswered)

    def unanswered(_: object) -> set[Version]:
        raise StorageError("no answer")

    monkeypatch.setattr(LocalBackend, "delete", late)
    with pytest.raises(StorageError, match="vanished"):
        store.retire(V1)
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("how", ["pin", "hold", "unreadable"])
def test_version_that_is_marked_in_the_moment_of_its_removal_stays(
    store: Storage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Somebody asks for it between our question and the removal. Who gets no answer then does not go on either."""
    manifest, delete = save(store, V1), LocalBackend.delete
    other = open_storage(store.where, Events())

    def late(self: LocalBackend, *names: str) -> None:
        monkeypatch.setattr(LocalBackend, "delete", delete)
        if how == "pin":
            other.marks.pin(V1)
        elif how == "hold":
            other.marks.hold(V1, make_stamp(1))
        delete(self, *names)
        if how == "unreadable":
            monkeypatch.setattr(LocalBackend, "listing", refused)

    def refused(self: LocalBackend, directory: str) -> list[tuple[str, int]]:
        if directory == "pinned":
            raise StorageError("the file server does not answer")
        return listing(self, directory)

    listing = LocalBackend.listing
    monkeypatch.setattr(LocalBackend, "delete", late)
    with pytest.raises(HoldfastError, match=r"is pinned|is held|does not answer"):
        store.retire(V1)
    monkeypatch.undo()
    assert store.versions() == [V1]
    assert verify(store, V1)
    assert store.manifest(V1).bundles == manifest.bundles


def test_pin_of_a_version_that_is_gone_says_so(store: Storage, caplog: pytest.LogCaptureFixture) -> None:
    save(store, V1)
    store.pin(V1)
    store.pin(V2)  # it may become durable later
    assert "pinned" not in caplog.text
    store.marks.unpin(V1)
    save(store, V2)
    store.retire(V1)
    store.pin(V1)
    assert f"{V1} is pinned, and nothing of it is in" in caplog.text


def test_looking_imports_nothing_heavy() -> None:
    code = "import sys, holdfast.tiers.storage.version_store; sys.exit(bool({'numpy', 'torch', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_paused_committer_takes_its_manifest_of_a_retired_version_back(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, other = save(store, V1), open_storage(tmp_path / "root", Events())
    (tmp_path / "root" / str(V1) / "manifest.json").unlink()
    create = LocalBackend.create

    def late(self: LocalBackend, name: str, data: bytes, *, stamp: str) -> bool:
        with monkeypatch.context() as patched:  # while we were paused, before this very call
            patched.setattr(LocalBackend, "create", create)
            other.commit(manifest, stamp=make_stamp(1))
            other.retire(V1)
        return create(self, name, data, stamp=stamp)

    monkeypatch.setattr(LocalBackend, "create", late)
    with pytest.raises(Fenced, match="retired"):
        store.commit(manifest, stamp=make_stamp(1))
    assert store.versions() == []


def test_a_path_that_cannot_be_read_takes_no_commit_back(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit it is looked whether the files still stand. No answer is not "they are gone"."""
    manifest = save(store, V1)
    store._backend.delete(f"{V1}/manifest.json")
    listing, create = LocalBackend.listing, LocalBackend.create

    def unreadable(self: LocalBackend, directory: str) -> list[tuple[str, int]]:
        if directory == str(V1):
            raise StorageError("the file server does not answer")
        return listing(self, directory)

    def then_unreadable(self: LocalBackend, name: str, data: bytes, *, stamp: str) -> bool:
        created = create(self, name, data, stamp=stamp)
        monkeypatch.setattr(LocalBackend, "listing", unreadable)
        return created

    monkeypatch.setattr(LocalBackend, "create", then_unreadable)
    with pytest.raises(StorageError, match="does not answer"):
        store.commit(manifest, stamp=make_stamp(1))
    monkeypatch.undo()
    assert store.versions() == [V1]
    store.commit(manifest, stamp=make_stamp(1))  # as it is tried again
    assert verify(store, V1)


def test_a_commit_in_the_middle_of_a_removal_leaves_nothing(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committer that was paused finds all files still there, for only the manifest is gone when it looks."""
    manifest, other = save(store, V1), open_storage(tmp_path / "root", Events())
    delete = LocalBackend.delete

    def late(self: LocalBackend, *names: str) -> None:
        if any(name.endswith(".safetensors") for name in names):
            monkeypatch.setattr(LocalBackend, "delete", delete)
            other.commit(manifest, stamp=make_stamp(1))
        delete(self, *names)

    monkeypatch.setattr(LocalBackend, "delete", late)
    store.retire(V1)
    assert store.versions() == []
    assert not (tmp_path / "root" / str(V1)).exists()


def test_a_commit_whose_parts_are_gone_is_to_be_written_again(store: Storage, tmp_path: Path) -> None:
    """Not damage of a version, for there is none yet; and not "retired": it is tried again."""
    manifest = save(store, V1)
    (tmp_path / "root" / str(V1) / "manifest.json").unlink()
    (tmp_path / "root" / str(V1) / "manifest-1.json").unlink()
    with pytest.raises(StorageError, match="part of the manifest is missing") as caught:
        store.commit(manifest, stamp=make_stamp(1))
    assert caught.value.retryable


def test_a_newer_incarnation_that_registers_during_a_commit_fences_it(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the parts may take long; whether anybody newer runs is asked after it too."""
    manifest = save(store, V1)
    (tmp_path / "root" / str(V1) / "manifest.json").unlink()
    read = Storage._parts

    def slow(self: Storage, root: Manifest) -> dict[str, bytes]:
        found = read(self, root)
        open_storage(tmp_path / "root", Events()).incarnations.register()
        return found

    monkeypatch.setattr(Storage, "_parts", slow)
    with pytest.raises(Fenced, match="newer incarnation"):
        store.commit(manifest, stamp=make_stamp(1))
    assert store.versions() == []


def test_where_another_file_system_stands_for_a_moment_nothing_is_discarded(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty mount point at the first look, the job's own directory at the next: the version is committed."""
    save(store, V1)
    listing, looked = LocalBackend.listing, []

    def empty_first(self: LocalBackend, directory: str) -> list[tuple[str, int]]:
        if directory != str(V1) or looked:
            return listing(self, directory)
        looked.append(directory)
        return []

    before = tree(tmp_path / "root")
    monkeypatch.setattr(LocalBackend, "listing", empty_first)
    store.discard(V1)
    assert looked
    assert tree(tmp_path / "root") == before


def test_a_version_that_is_retired_while_it_is_read_is_not_damaged(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1)
    (file, _) = manifest.bundles
    store.retire(V1)
    with pytest.raises(VersionNotFound, match="not there"):
        store.bundles.verify(V1, file)
    save(store, V2)
    bundles = store.manifest(V2).bundles
    (tmp_path / "root" / str(V2) / bundles[0].file).unlink()
    with pytest.raises(CorruptError, match="missing"):
        store.bundles.verify(V2, bundles[0])


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_job_whose_directory_vanished_is_not_one_without_versions(store: Storage, tmp_path: Path, how: str) -> None:
    """Who asks for the versions may begin at step 0 if there are none: an unmounted path must not say so."""
    save(store, V1)
    (tmp_path / "root").rename(tmp_path / "away")
    if how == "empty":
        (tmp_path / "root").mkdir()
    for look in (store.versions, store.unfinished):
        with pytest.raises(StorageError, match="has vanished"):
            look()
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "root")
    assert store.versions() == [V1]
