"""The directory backend: what is put is read, in the order that a power cut forgives, and hostile names lead nowhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.base.errors import Fenced, StorageError, UsageError, VersionNotFound
from holdfast.tiers.backends.local import LocalBackend
from tiers.faults import Calls
from tiers.samples import STAMP, local_backend, page_memory, put


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return local_backend(tmp_path / "root")


# What it does when nothing is wrong.


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 262_143, 262_144, 262_145, (8 << 20) + 4096 + 13])
def test_what_is_put_is_read(backend: LocalBackend, size: int) -> None:
    data = page_memory(size)
    put(backend, "v/file", data)
    assert backend.read("v/file") == data
    assert backend.listing("v") == [("file", size)]


@pytest.mark.parametrize("name", ["link/root", "link/new/root"])
def test_a_root_is_made_behind_a_link(name: str, tmp_path: Path) -> None:
    """As a home's link to the large disk is one: the first start was refused, and the second was not."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    backend = LocalBackend(tmp_path / name)
    backend.prepare()
    put(backend, "v/file", page_memory(7))
    assert backend.listing("v") == [("file", 7)]


def test_large_files_are_written_directly_from_the_callers_pages(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not directly_writable(tmp_path):
        pytest.skip("this file system knows no O_DIRECT")
    flags: list[int] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args, **kwargs: flags.append(args[1]) or real(*args, **kwargs))
    data = page_memory((1 << 20) + 17)
    put(backend, "v/file", data)
    writes = [flag for flag in flags if flag & os.O_WRONLY]
    assert len(writes) == 1
    assert writes[0] & os.O_DIRECT
    monkeypatch.undo()
    assert backend.read("v/file") == data


def directly_writable(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("start", [0, 1, 512, 4095])
def test_memory_that_is_not_aligned_is_written_all_the_same(backend: LocalBackend, start: int) -> None:
    data = page_memory(600_000)[start:]
    put(backend, "v/file", data)
    assert backend.read("v/file") == data


@pytest.mark.parametrize("cut", [4096 * 100, 300_001])
def test_several_chunks_become_one_file(backend: LocalBackend, cut: int) -> None:
    data = page_memory(900_000)
    put(backend, "v/file", data[:cut], data[cut:])
    assert backend.read("v/file") == data


def test_a_put_replaces_the_file_before(backend: LocalBackend) -> None:
    put(backend, "v/file", b"before, and longer")
    put(backend, "v/file", b"after")
    assert backend.read("v/file") == b"after"


def test_parts_of_files_are_read(backend: LocalBackend) -> None:
    put(backend, "v/file", b"0123456789")
    assert backend.read("v/file", offset=2, length=3) == b"234"
    assert backend.read("v/file", offset=8, length=1 << 60) == b"89"
    assert backend.read("v/file", offset=99) == b""
    view = memoryview(bytearray(4))
    assert (backend.read_into("v/file", view, offset=7), bytes(view[:3])) == (3, b"789")


def test_creating_once_means_once(backend: LocalBackend) -> None:
    assert backend.create("incarnations/1", b"one", stamp=STAMP)
    assert not backend.create("incarnations/1", b"one", stamp=STAMP)
    for other in (b"two", b"on", b"one more", b""):
        with pytest.raises(Fenced, match="other content"):
            backend.create("incarnations/1", other, stamp=STAMP)
    assert backend.read("incarnations/1") == b"one"
    assert backend.listing(".tmp") == []


def test_of_many_creators_one_wins_and_the_rest_is_fenced(backend: LocalBackend) -> None:
    results: list[object] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait(30)
        for turn in range(20):
            try:
                results.append(backend.create(f"v/{turn}", bytes([number]), stamp=STAMP))
            except Fenced as error:
                results.append(error.code)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (results.count(True), results.count("HF601"), len(results)) == (20, 140, 160)


def test_deleting_removes_and_may_be_repeated(backend: LocalBackend) -> None:
    put(backend, "v/a", b"a")
    put(backend, "v/b", b"b")
    backend.delete("v/a", "v/missing", "v/")
    assert backend.listing("v") == [("b", 1)]  # a directory that is not empty stays
    backend.delete("v/b", "v/")
    backend.delete("v/b", "v/")
    assert backend.listing("") == [(".tmp/", 0)]


def test_what_is_not_there_is_not_found(backend: LocalBackend, tmp_path: Path) -> None:
    for name in ("v/file", "file"):
        with pytest.raises(VersionNotFound, match=name):
            backend.read(name)
    with pytest.raises(VersionNotFound):
        LocalBackend(tmp_path / "nowhere").read("file")
    assert LocalBackend(tmp_path / "nowhere").listing("") == []


def test_a_root_that_vanished_is_not_made_again(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "root").rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="vanished"):
        put(backend, "v/file", b"x")
    assert not (tmp_path / "root").exists()


def test_the_root_is_made_with_all_its_parents(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path / "a" / "b" / "c")
    backend.prepare()
    backend.prepare()
    assert (tmp_path / "a" / "b" / "c" / ".tmp").is_dir()


# The order.


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["small", "large"])
def test_a_put_follows_the_order_that_a_power_cut_forgives(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    data = page_memory(size)
    calls = Calls(monkeypatch, ("pwrite", "fsync", "rename"))
    put(backend, "v/file", data)
    assert [call for call in calls.seen if call != "pwrite"] == ["fsync", "rename", "fsync", "fsync"]
    assert calls.seen[0] == "pwrite"
    assert Path(calls.synced[0]).parent == tmp_path / "root" / ".tmp"
    assert calls.synced[1:] == [str(tmp_path / "root" / "v"), str(tmp_path / "root")]


def test_a_create_follows_the_same_order_with_a_link(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls(monkeypatch, ("pwrite", "fsync", "link"))
    backend.create("v/file", b"data", stamp=STAMP)
    assert calls.seen == ["pwrite", "fsync", "link", "fsync", "fsync"]
    assert calls.synced[1:] == [str(tmp_path / "root" / "v"), str(tmp_path / "root")]


def test_a_deletion_is_durable_before_it_returns(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(backend, "v/file", b"data")
    calls = Calls(monkeypatch, ("unlink", "fsync"))
    backend.delete("v/file")
    assert calls.seen == ["unlink", "fsync"]
    assert calls.synced == [str(tmp_path / "root" / "v")]


# Names and what stands in their place.


@pytest.mark.parametrize(
    "name", ["../file", "v/../file", "/etc/passwd", "", ".", "..", ".hidden", "v/", "a/b/c", "v/x\n", "v/" + "x" * 200]
)
def test_names_that_holdfast_never_gives_are_refused(backend: LocalBackend, name: str) -> None:
    with pytest.raises(UsageError):
        put(backend, name, b"x")
    with pytest.raises(UsageError):
        backend.read(name)


def test_links_are_not_followed(backend: LocalBackend, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "v").symlink_to(outside)
    (tmp_path / "root" / "file").symlink_to(outside / "secret")
    with pytest.raises(StorageError, match=r"not a directory|link"):
        put(backend, "v/file", b"x")
    for name in ("v/secret", "file"):
        with pytest.raises(StorageError):
            backend.read(name)
    with pytest.raises(StorageError):
        backend.create("file", b"other", stamp=STAMP)
    put(backend, "file", b"ours")  # replaces the link, not what it points to
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_pipe_does_not_hold_the_reader(backend: LocalBackend, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "root" / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        backend.read("pipe")


def test_a_file_where_the_root_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match="not a directory"):
        LocalBackend(tmp_path / "file").prepare()
    with pytest.raises(StorageError, match="not a directory"):
        LocalBackend(tmp_path / "file").listing("")


def test_a_root_of_ours_is_private_and_what_is_beneath_follows_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        backend = local_backend(tmp_path / "root")
        put(backend, "v/private", b"x")
        (tmp_path / "root").chmod(0o750)
        put(backend, "w/shared", b"x")
        backend.create("w/once", b"x", stamp=STAMP)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "root").rglob("*")}
    assert modes == {".tmp": 0o700, "v": 0o700, "private": 0o600, "w": 0o750, "shared": 0o640, "once": 0o640}


def test_where_each_removes_only_what_is_theirs_so_it_is_beneath(tmp_path: Path) -> None:
    """The sticky bit of a root in which all write; without it any of them empties the directories of versions."""
    before = os.umask(0)
    try:
        backend = local_backend(tmp_path / "root")
        (tmp_path / "root").chmod(0o1777)
        put(backend, "v/bundle", b"x")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "root").rglob("*")}
    assert modes == {".tmp": modes[".tmp"], "v": 0o1777, "bundle": 0o666}


def test_beneath_a_root_that_vanished_nothing_is_known(tmp_path: Path) -> None:
    """Unmounted, say. That a version's files cannot be reached does not mean that they are not there."""
    backend = local_backend(tmp_path / "root")
    put(backend, "v/file", b"x")
    put(backend, "top", b"x")
    (tmp_path / "root").rename(tmp_path / "away")
    for look in (
        lambda: backend.read("v/file"),
        lambda: backend.read_into("v/file", memoryview(bytearray(1))),
        lambda: backend.listing("v"),
    ):
        with pytest.raises(StorageError, match=r"vanished|No such|refuses") as caught:
            look()
        assert "mount it" in caught.value.remedy
    assert backend.listing("") == [], "a root that is not made yet has nothing in it"
    with pytest.raises(VersionNotFound):
        backend.read("top")
    (tmp_path / "away").rename(tmp_path / "root")
    assert backend.listing("v") == [("file", 1)]
    assert backend.listing("w") == []


def test_a_file_that_is_removed_while_it_is_created_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = local_backend(tmp_path / "root")
    backend.create("v/once", b"x", stamp=STAMP)
    read = LocalBackend.read

    def removed(self: LocalBackend, name: str, **more: int) -> bytes:
        backend.delete(name)
        return read(self, name, **more)

    monkeypatch.setattr(LocalBackend, "read", removed)
    with pytest.raises(StorageError, match="removed meanwhile") as caught:
        backend.create("v/once", b"x", stamp=STAMP)
    assert caught.value.retryable
