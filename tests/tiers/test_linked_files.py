"""What is the same as in the versions before gets a second name instead of being written: which file, when, and when not."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, UsageError
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from sample_kit import sampled
from tiers.faults import every_failure
from tiers.samples import JOB_LAYOUT, STAMP, bundle, local_backend, new_store, piece, put, random_image, ref_of

V1, V2, V3, V4, V5, V6 = (Version(1, step) for step in (10, 20, 30, 40, 50, 60))
SIZE = 2 << 20


class Frozen:
    """The image of a bundle that stays as it is, until it is changed."""

    def __init__(self, size: int = SIZE, bundle_id: str = "g0x1-aaaa-s123456-0") -> None:
        one = bundle(bundle_id, piece("base", "U8", (size,)))
        self.image = random_image(one)
        self.ref: BundleRef = ref_of(one)

    @property
    def seal(self) -> Seal:
        return image_format.seal(self.ref.bundle_id, self.image)

    def write(self, store: Storage, version: Version) -> BundleFile:
        return store.bundles.write(version, self.ref, self.seal, memoryview(self.image), stamp=STAMP)

    def save(self, store: Storage, version: Version) -> BundleFile:
        file = self.write(store, version)
        name, length, digest = store.write_part(version, 0, [file], stamp=STAMP)
        store.commit(Manifest(version, store.job_id(), 1, JOB_LAYOUT, None, {name: (length, digest)}), stamp=STAMP)
        return file


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return new_store(tmp_path / "root")


def path_of(store: Storage, version: Version, file: BundleFile) -> Path:
    return Path(store.bundles.where(version, file))


def counted(store: Storage) -> tuple[int, int]:
    """Bytes that were written, and that were linked."""
    counters = store.bundles._events.counters()
    return int(counters.get("storage_written_bytes", 0)), int(counters.get("storage_linked_bytes", 0))


def test_the_same_is_written_twice_and_each_version_stands_alone(store: Storage) -> None:
    frozen, versions = Frozen(), (V1, V2, V3, V4)
    files = [frozen.save(store, version) for version in versions]
    length = len(frozen.image)
    assert counted(store) == (2 * length, 2 * length)
    places = [path_of(store, version, file) for version, file in zip(versions, files, strict=True)]
    first, second, third, fourth = (place.stat().st_ino for place in places)
    assert (third, fourth) == (first, second)
    assert first != second
    for version in versions[:-1]:
        shutil.rmtree(places[0].parent.parent / str(version))
    store.bundles.verify(V4, files[3])
    assert places[3].stat().st_nlink == 1
    assert list((places[3].parent.parent / ".tmp").iterdir()) == []


def test_damage_of_a_file_leaves_the_version_before(store: Storage) -> None:
    """A version that retention keeps for the case that the newest is bad must not be bad with it."""
    frozen, versions = Frozen(), (V1, V2, V3, V4, V5, V6)
    files = {version: frozen.save(store, version) for version in versions}
    with path_of(store, V6, files[V6]).open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([frozen.image[-1] ^ 1]))
    with pytest.raises(CorruptError):
        store.bundles.verify(V6, files[V6])
    for version in (V1, V3, V5):
        store.bundles.verify(version, files[version])


def test_one_bit_more_is_written_and_linked_from_then_on(store: Storage) -> None:
    frozen = Frozen()
    frozen.save(store, V1)
    frozen.save(store, V2)
    frozen.image[-1] ^= 1
    files = {version: frozen.save(store, version) for version in (V3, V4, V5)}
    length = len(frozen.image)
    assert counted(store) == (4 * length, length)
    for version, file in files.items():
        store.bundles.verify(version, file)
        assert path_of(store, version, file).read_bytes() == bytes(frozen.image)


def test_retention_frees_the_bytes_with_the_last_name(store: Storage) -> None:
    frozen = Frozen()
    files = {version: frozen.save(store, version) for version in (V1, V2, V3)}
    place = path_of(store, V3, files[V3])
    assert place.stat().st_nlink == 2
    store.retire(V1)
    assert store.versions() == [V2, V3]
    assert place.stat().st_nlink == 1
    store.bundles.verify(V3, files[V3])
    length = len(frozen.image)
    assert counted(store) == (2 * length, length)
    frozen.save(store, V4)
    assert counted(store) == (2 * length, 2 * length)


def shared(store: Storage, file: BundleFile, first: Version, second: Version) -> bool:
    """Return whether two versions have one file."""
    return path_of(store, first, file).stat().st_ino == path_of(store, second, file).stat().st_ino


def test_a_version_that_never_stands_leaves_its_neighbours_apart(store: Storage) -> None:
    """A node wrote its part of the third one, and another node never did."""
    frozen = Frozen()
    frozen.save(store, V1)
    frozen.save(store, V2)
    file = frozen.write(store, V3)
    frozen.save(store, V4)
    assert store.versions() == [V1, V2, V4]
    assert not shared(store, file, V2, V4)
    frozen.save(store, V5)
    assert not shared(store, file, V4, V5)
    with path_of(store, V4, file).open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([frozen.image[-1] ^ 1]))
    for version in (V1, V2, V5):
        store.bundles.verify(version, file)
    frozen.save(store, V6)
    assert not shared(store, file, V5, V6)
    assert counted(store)[1] >= 2 * len(frozen.image), "and what stands is linked again"


def test_one_that_stands_later_shares_no_file_with_the_next(store: Storage) -> None:
    """Its other node was slow: when the next one was written nobody could know."""
    frozen = Frozen()
    for version in (V1, V2):
        frozen.save(store, version)
    frozen.write(store, V3)
    file = frozen.write(store, V4)
    files = [frozen.save(store, version) for version in (V5, V6)]
    for version in (V3, V4):
        name, length, digest = store.write_part(version, 0, [file], stamp=STAMP)
        store.commit(Manifest(version, store.job_id(), 1, JOB_LAYOUT, None, {name: (length, digest)}), stamp=STAMP)
    versions = store.versions()
    assert versions == [V1, V2, V3, V4, V5, V6]
    assert not any(shared(store, files[0], *pair) for pair in itertools.pairwise(versions))


def test_one_that_is_written_late_shares_no_file_with_its_neighbours(store: Storage) -> None:
    frozen = Frozen()
    for version in (V1, V2, V4, V3, V5, V6):
        file = frozen.save(store, version)
    versions = store.versions()
    assert versions == [V1, V2, V3, V4, V5, V6]
    assert not any(shared(store, file, *pair) for pair in itertools.pairwise(versions))
    assert counted(store) == (3 * len(frozen.image), 3 * len(frozen.image))


def test_the_next_incarnation_shares_no_file_with_those_before(store: Storage) -> None:
    """It may go on from any of them, or because one of them was found damaged, which only who read it knows."""
    frozen = Frozen()
    before = (V1, V2, V3, V4)
    for version in before:
        frozen.save(store, version)
    store.incarnations.register()
    incarnation = store.incarnations.register()
    after = [Version(incarnation, step) for step in (31, 32, 33)]
    for version in after:
        file = frozen.save(store, version)
    assert not any(shared(store, file, *pair) for pair in itertools.product(before, after))
    assert shared(store, file, after[0], after[2])


def test_a_version_whose_file_is_gone_is_no_source(store: Storage) -> None:
    frozen = Frozen()
    place = path_of(store, V1, frozen.save(store, V1))
    frozen.save(store, V2)
    place.unlink()
    store.bundles.verify(V3, frozen.save(store, V3))
    assert counted(store) == (3 * len(frozen.image), 0)


def test_small_files_are_written_again(store: Storage) -> None:
    small = Frozen(1000)
    for version in (V1, V2, V3):
        small.save(store, version)
    assert counted(store) == (3 * len(small.image), 0)


def test_encrypted_files_have_keys_of_their_own_and_are_written_again(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(bytes(range(32)).hex() + "\n")
    key.chmod(0o600)
    new_store(tmp_path / "root")
    store = open_storage(
        tmp_path / "root", new_store(tmp_path / "root").bundles._events, encryption=KeySource(str(key))
    )
    store.claim()
    frozen = Frozen()
    for version in (V1, V2, V3):
        store.bundles.verify(version, frozen.save(store, version))
    assert counted(store)[1] == 0


def test_another_process_and_another_start_write_a_copy_of_their_own(tmp_path: Path) -> None:
    """So damage of one file does not reach into whatever comes later for ever."""
    frozen = Frozen()
    store = new_store(tmp_path / "root")
    first = path_of(store, V1, frozen.save(store, V1))
    frozen.save(store, V2)
    store = new_store(tmp_path / "root")
    third = path_of(store, V3, frozen.save(store, V3))
    assert counted(store) == (len(frozen.image), 0)
    assert first.stat().st_ino != third.stat().st_ino


@pytest.mark.parametrize("how", ["written", "replaced", "grown", "cut", "a link", "a directory"])
def test_a_file_that_somebody_changed_is_no_source(store: Storage, how: str) -> None:
    frozen = Frozen()
    place = path_of(store, V1, frozen.save(store, V1))
    frozen.save(store, V2)
    data = place.read_bytes()
    if how == "written":  # the same bytes: nobody can tell what else was done
        with place.open("r+b") as file:
            file.write(data)
    elif how == "replaced":
        place.with_name("other").write_bytes(data)
        place.with_name("other").rename(place)
    elif how == "grown":
        place.write_bytes(data + b"0")
    elif how == "cut":
        os.truncate(place, len(data) - 1)
    elif how == "a link":
        place.rename(place.parent.parent / "aside")
        place.symlink_to(place.parent.parent / "aside")
    else:
        place.unlink()
        place.mkdir()
    file = frozen.save(store, V3)
    assert counted(store) == (3 * len(data), 0)
    store.bundles.verify(V3, file)
    assert list((place.parent.parent / ".tmp").iterdir()) == []


def test_damage_that_nothing_shows_is_found_within_some_versions(
    store: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of the last write is put back, as a failing disk leaves it."""
    frozen = Frozen(9 << 20)  # two chunks
    place = path_of(store, V1, frozen.save(store, V1))
    status = place.stat()
    with place.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([frozen.image[-1] ^ 1]))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    versions = [Version(1, 11 + number) for number in range(5)]
    files = [frozen.save(store, version) for version in versions]
    assert counted(store)[0] == 3 * len(frozen.image), "a whole round proves every chunk, and then it is written anew"
    store.bundles.verify(versions[-1], files[-1])
    assert "it is written anew" in caplog.text
    with pytest.raises(CorruptError):
        store.bundles.verify(V1, files[0])


def test_a_file_in_which_damage_was_read_is_no_source(store: Storage) -> None:
    frozen = Frozen()
    for version in (V1, V2):
        frozen.save(store, version)
    store.bundles.distrust(frozen.ref.bundle_id)
    frozen.save(store, V3)
    file = frozen.save(store, V4)
    assert counted(store) == (4 * len(frozen.image), 0)
    with path_of(store, V4, file).open("r+b") as opened:
        opened.write(b"\0")
    with pytest.raises(CorruptError):
        store.bundles.verify(V4, file)
    frozen.save(store, V5)
    assert counted(store) == (5 * len(frozen.image), 0)


@pytest.mark.parametrize("code", [errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_where_no_name_can_be_added_it_is_written(store: Storage, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    frozen = Frozen()
    frozen.save(store, V1)
    frozen.save(store, V2)
    real = os.link

    def refuse(old: Any, new: Any, **where: Any) -> None:
        if not str(old).endswith(".safetensors"):
            return real(old, new, **where)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    store.bundles.verify(V3, frozen.save(store, V3))
    assert counted(store) == (3 * len(frozen.image), 0)


@pytest.mark.parametrize("code", sampled([errno.EIO, errno.ENOSPC, errno.EDQUOT], errno.ENOSPC))
def test_a_fault_at_any_call_ends_in_an_error_or_in_a_whole_file(
    store: Storage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    frozen, sources = Frozen(), (V1, V2)
    for version in sources:
        frozen.save(store, version)
    steps = iter(range(100, 1000))
    wrote: list[Version] = []

    def attempt() -> None:
        store.bundles.distrust(frozen.ref.bundle_id)
        for version in sources:  # anew, and they are committed
            frozen.write(store, version)
        version = Version(1, next(steps))
        wrote.append(version)
        frozen.write(store, version)

    failures = list(every_failure(monkeypatch, attempt, code))
    assert any(noticed for _, noticed in failures)
    assert counted(store)[1] > 0
    for version in wrote:
        directory = path_of(store, version, BundleFile.of(frozen.ref, frozen.seal, "")).parent
        found = list(directory.glob("*.safetensors")) if directory.exists() else []
        assert all(file.read_bytes() == bytes(frozen.image) for file in found), "a name without all of its bytes"


def test_only_what_was_put_here_and_no_other_name_is_linked(tmp_path: Path) -> None:
    backend = local_backend(tmp_path / "root")
    put(backend, "v1/file", b"bytes")
    assert not backend.link("v2/file", "v1/other", stamp=STAMP)
    assert not LocalBackend(tmp_path / "root").link("v2/file", "v1/file", stamp=STAMP)
    assert backend.link("v2/file", "v1/file", stamp=STAMP)
    assert backend.link("v2/file", "v1/file", stamp=STAMP), "again: it is there"
    assert backend.read("v2/file") == b"bytes"
    put(backend, "v1/file", b"other")
    assert backend.read("v2/file") == b"bytes", "what replaces a name leaves the others"
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []
    with pytest.raises(UsageError):
        backend.link("v2/../../file", "v1/file", stamp=STAMP)


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.tiers.storage.version_store import open_storage
from tiers.samples import new_store
from tiers.test_linked_files import Frozen, V1, V2, V3
store = new_store(Path(sys.argv[1]))
frozen = Frozen()
frozen.save(store, V1)
frozen.save(store, V2)
number = 0
for name in ("link", "rename", "fsync", "unlink", "open", "mkdir"):
    def wrap(real):
        def call(*args, **kwargs):
            global number
            if number == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            number += 1
            return real(*args, **kwargs)
        return call
    setattr(os, name, wrap(getattr(os, name)))
frozen.save(store, V3)
print(number)
"""


def life(root: Path, at: int) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(root), str(at)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_writer_killed_at_any_call_leaves_whole_versions(tmp_path: Path) -> None:
    whole = life(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    frozen, ends = Frozen(), []
    for at in range(int(whole.stdout)):
        root = tmp_path / str(at)
        assert life(root, at).returncode == -signal.SIGKILL
        store = new_store(root)
        ends.append(store.versions())
        for version in ends[-1]:
            (file,) = store.manifest(version).bundles
            store.bundles.verify(version, file)
        frozen.save(store, V4)  # and the next one goes on
        assert store.versions()[-1] == V4
    assert [V1, V2] in ends
    assert [V1, V2, V3] in ends
