"""Versions in storage under faults: damaged files, failing calls, power cuts."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.base.errors import (
    CorruptError,
    ForeignDirectory,
    HoldfastError,
    InUse,
    NewerFormat,
    StorageBusy,
    StorageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.backends import posix_io as files
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage import bundle_files
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.faults import damage, every_failure, ext4, mounted, power_cut
from tiers.samples import new_store, random_image, ref_of, sample_bundle, save, tree, verify

V1, V2 = Version(1, 10), Version(1, 20)


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return new_store(tmp_path / "root")


# Four different answers.


def test_not_found_damaged_newer_and_unreadable_are_four_answers(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1)
    directory = tmp_path / "root" / str(V1)
    answers: list[type[HoldfastError]] = []

    def ask(version: Version) -> None:
        with pytest.raises(HoldfastError) as caught:
            new_store(tmp_path / "root").manifest(version)
        answers.append(type(caught.value))

    ask(V2)
    good = (directory / "manifest.json").read_bytes()
    (directory / "manifest.json").write_bytes(good[:-5])
    ask(V1)
    body = good[: good.index(b',"checksum"')].replace(b'"format_version":1', b'"format_version":4')
    (directory / "manifest.json").write_bytes(body + checksum_of(body))
    ask(V1)
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").symlink_to(directory / manifest.bundles[0].file)
    ask(V1)
    assert answers == [VersionNotFound, CorruptError, NewerFormat, StorageError]


def checksum_of(body: bytes) -> bytes:
    return b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


@pytest.mark.parametrize("how", ["removed", "empty", "truncated", "extended", "zeroed", "swapped", "flipped"])
@pytest.mark.parametrize("which", ["bundle", "part", "job"])
def test_every_damage_to_a_file_is_found_and_names_it(store: Storage, tmp_path: Path, which: str, how: str) -> None:
    manifest = save(store, V1)
    save(store, V2)
    root = tmp_path / "root"
    path = {
        "bundle": root / str(V1) / manifest.bundles[0].file,
        "part": root / str(V1) / "manifest-1.json",
        "job": root / "holdfast.json",
    }[which]
    damage(path, how)
    again = open_storage(root, Events())
    started = time.perf_counter()
    with pytest.raises(HoldfastError) as caught:
        verify(again, V1)
    assert time.perf_counter() - started < 5  # within a second on a quiet machine
    if which == "job" and how == "removed":
        assert isinstance(caught.value, ForeignDirectory)
    else:
        assert isinstance(caught.value, CorruptError)
        assert path.name in caught.value.where
    if which != "job":
        assert verify(again, V2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), mask=st.integers(1, 255))
def test_a_flip_anywhere_in_a_version_is_found(tmp_path: Path, data: st.DataObject, mask: int) -> None:
    store = new_store(tmp_path / "root")
    if not store.versions():
        save(store, V1)
    files = tree(tmp_path / "root" / str(V1))
    name = data.draw(st.sampled_from(sorted(files)))
    at = data.draw(st.integers(0, len(files[name]) - 1))
    path = tmp_path / "root" / str(V1) / name
    damaged = bytearray(files[name])
    damaged[at] ^= mask
    path.write_bytes(damaged)
    try:
        with pytest.raises(CorruptError):
            verify(store, V1)
    finally:
        path.write_bytes(files[name])
    assert verify(store, V1)


def test_files_of_another_version_or_job_are_not_taken(store: Storage, tmp_path: Path) -> None:
    manifest = save(store, V1, seed=1)
    other = save(store, V2, seed=50)
    root = tmp_path / "root"
    # An image with the same name and length, but older content.
    shutil.copy(root / str(V2) / other.bundles[0].file, root / str(V1) / manifest.bundles[0].file)
    with pytest.raises(CorruptError, match="differs from its seal"):
        verify(store, V1)
    # A part of the same length, whole in itself, that another version was committed with.
    part = root / str(V1) / "manifest-0.json"
    before = part.read_bytes()
    shutil.copy(root / str(V2) / "manifest-0.json", part)
    assert len(part.read_bytes()) == len(before)
    with pytest.raises(CorruptError, match="not the part that was committed"):
        store.manifest(V1)
    part.write_bytes(before)
    shutil.copytree(root / str(V2), root / str(Version(1, 30)))
    with pytest.raises(CorruptError, match=f"of version {V2}"):
        store.manifest(Version(1, 30))
    stranger = new_store(tmp_path / "stranger")
    save(stranger, Version(1, 40))
    shutil.copytree(tmp_path / "stranger" / str(Version(1, 40)), root / str(Version(1, 40)))
    with pytest.raises(InUse, match="belongs to job"):
        store.manifest(Version(1, 40))


def test_a_view_of_another_length_is_refused(store: Storage) -> None:
    manifest = save(store, V1)
    with pytest.raises(CorruptError, match="were sealed"):
        store.bundles.read_into(V1, manifest.bundles[0], memoryview(bytearray(100)))
    b = sample_bundle()
    image = random_image(b)
    sealed = image_format.seal(b.bundle_id, image)
    with pytest.raises(CorruptError, match="were sealed"):
        store.bundles.write(V1, ref_of(b), sealed, memoryview(image)[:-1], stamp=make_stamp(1))


# Failures at every call.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_save_that_fails_at_any_call_shows_nothing_and_spoils_nothing(
    store: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    save(store, V1)
    steps = iter(range(100, 10_000))
    step = 0

    def attempt() -> None:
        nonlocal step
        step = next(steps)
        save(store, Version(1, step), num_bundles=1)

    failures = 0
    for call, noticed in every_failure(monkeypatch, attempt, code, ("pwrite", "fsync", "rename", "link", "mkdir")):
        failures += 1
        assert noticed or store.versions() == [V1, Version(1, step)]  # only the hint `latest` may fail silently
        assert store.versions() in ([V1], [V1, Version(1, step)]), call
        assert verify(store, V1)
        if Version(1, step) in store.versions():
            assert not noticed or call == "fsync"  # the commit stands, only its durability was not confirmed
            assert verify(store, Version(1, step))
            store.retire(Version(1, step))
        else:
            store.discard(Version(1, step))
        assert os.listdir(tmp_path / "root" / ".tmp") == []
        assert not (tmp_path / "root" / str(Version(1, step))).exists()
    assert failures >= 10


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_retirement_that_fails_at_any_call_can_be_finished(
    store: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    save(store, V2)

    save(store, V1)
    number = 0
    for call, noticed in every_failure(monkeypatch, lambda: store.retire(V1), code, ("unlink", "rmdir", "fsync")):
        number += 1
        assert noticed, call
        if V1 in store.versions():
            assert verify(store, V1), call
        else:
            store.discard(V1)
            assert not (tmp_path / "root" / str(V1)).exists()
        assert verify(store, V2)
        save(store, V1)
    assert number >= 7
    assert store.versions() == [V2]


@pytest.mark.root
def test_a_power_cut_after_the_commit_loses_nothing(tmp_path: Path) -> None:
    with ext4(tmp_path) as place:
        store = new_store(place)
        save(store, V1)
        power_cut(place)
    with remounted(tmp_path) as place:
        assert new_store(place).versions() == [V1]
        assert verify(new_store(place), V1)


@pytest.mark.root
def test_without_the_syncs_a_power_cut_does_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: shows that the test above can fail."""
    with ext4(tmp_path) as place:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda _: None)
            save(new_store(place), V1)
        power_cut(place)
    with remounted(tmp_path) as place:
        store = open_storage(place, Events())
        assert store.versions() != [V1] or not is_intact(store, V1)


def killed_behind_its_commit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that commits V1 dies when the manifest has its name and the directory is not synchronised."""
    link = files.link

    def linked(there: int, temporary: str, target: int, leaf: str, **more: Any) -> bool:
        made = link(there, temporary, target, leaf, **more)
        if leaf == "manifest.json":
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patched:
        patched.setattr(files, "link", linked)
        with pytest.raises(KeyboardInterrupt):
            save(new_store(place), V1)


def test_what_is_found_committed_is_made_durable_before_it_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "root"
    killed_behind_its_commit(place, monkeypatch)
    store, synced = open_storage(place, Events()), list[str]()
    monkeypatch.setattr(files, "sync", lambda *fds: synced.extend(os.readlink(f"/proc/self/fd/{fd}") for fd in fds))
    assert store.is_committed(V1)
    assert synced == []
    assert store.is_durable(V1)
    assert synced == [str(place / str(V1)), str(place)]
    assert not store.is_durable(V2)


def test_what_cannot_be_made_durable_is_not_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_behind_its_commit(tmp_path / "root", monkeypatch)
    store = open_storage(tmp_path / "root", Events())
    for call, noticed in every_failure(monkeypatch, lambda: store.is_durable(V1), errno.EIO, ("fsync",)):
        assert noticed, call


def test_the_record_of_an_incarnation_that_is_found_is_made_durable_before_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the versions of the incarnation would be of no line that a restart knows."""
    place = tmp_path / "root"
    with monkeypatch.context() as patched:
        link = files.link

        def linked(there: int, temporary: str, target: int, leaf: str, **more: Any) -> bool:
            made = link(there, temporary, target, leaf, **more)
            if leaf == "000001.resumed.json":
                raise KeyboardInterrupt
            return made

        patched.setattr(files, "link", linked)
        with pytest.raises(KeyboardInterrupt):
            new_store(place).incarnations.enlist(1, None)
    store, synced = open_storage(place, Events()), list[str]()
    monkeypatch.setattr(files, "sync", lambda *fds: synced.extend(os.readlink(f"/proc/self/fd/{fd}") for fd in fds))
    for _ in range(2):
        assert store.incarnations.enlist(1, None) == 1
        assert synced == [str(place / "incarnations"), str(place)], "once"


@pytest.mark.root
def test_a_power_cut_does_not_take_what_was_found_committed_and_called_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ext4(tmp_path) as place:
        killed_behind_its_commit(place, monkeypatch)
        assert open_storage(place, Events()).is_durable(V1)
        power_cut(place)
    with remounted(tmp_path) as place:
        assert new_store(place).versions() == [V1]
        assert verify(new_store(place), V1)


def is_intact(store: Storage, version: Version) -> bool:
    try:
        return verify(store, version) > 0
    except HoldfastError:
        return False


def remounted(tmp_path: Path) -> Any:
    return mounted(tmp_path / "again", "-o", "loop", str(tmp_path / "disk"))


# Directories that other machines write to.


def test_a_file_that_shows_late_is_waited_for_where_names_lag(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: the manifest is seen and a file that it lists not yet. Elsewhere a missing file is damage at once."""
    manifest = save(store, V1)
    path = tmp_path / "root" / str(V1) / manifest.bundles[0].file
    hidden = path.rename(tmp_path / "hidden")
    with pytest.raises(CorruptError, match="missing"):
        verify(new_store(tmp_path / "root"), V1)

    monkeypatch.setattr(files, "is_remote", lambda _: True)
    lagging = new_store(tmp_path / "root")
    monkeypatch.setattr(bundle_files, "LAG_PAUSES_S", (0.0, 0.0))
    with pytest.raises(CorruptError, match="missing"):
        verify(lagging, V1)
    monkeypatch.setattr(bundle_files, "LAG_PAUSES_S", (0.1,) * 100)
    appears = threading.Timer(0.3, hidden.rename, (path,))
    appears.start()
    verify(lagging, V1)
    appears.join()


@pytest.mark.parametrize("name", ["manifest-0.json", "safetensors"])
def test_file_that_is_listed_and_not_found_is_no_damage(
    store: Storage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A gateway in front of a bucket, or a cache of names, may answer so for a while. Whoever takes it for damage goes back."""
    save(store, V1)
    met: list[str] = []

    def hidden(self: LocalBackend, asked: str) -> Any:
        if asked.endswith(name):
            met.append(asked)
            raise VersionNotFound(f"there is no {asked}", where=self._where(asked))
        return open_old(self, asked)

    open_old = LocalBackend._open_old
    monkeypatch.setattr(LocalBackend, "_open_old", hidden)
    with pytest.raises(StorageBusy, match="lists a file"):
        verify(store, V1)
    assert met
    monkeypatch.undo()
    verify(store, V1)


def test_a_remote_file_system_is_known_by_the_table_of_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path}/far rw shared:1 - nfs4 b rw\n"
    original = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **more: table if self.name == "mountinfo" else original(self, **more)
    )
    assert files.is_remote(tmp_path / "far" / "job")
    assert not files.is_remote(tmp_path / "farther")
