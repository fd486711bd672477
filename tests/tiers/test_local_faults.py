"""The directory backend under faults: a failure at every system call, and file systems that are full or refuse."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.errors import Fenced, StorageError, StorageFull, StorageUnfit
from holdfast.tiers.backends import posix_io
from holdfast.tiers.backends.local import LocalBackend
from tiers.faults import CALLS, every_failure, ext4, mounted
from tiers.samples import STAMP, local_backend, page_memory, put


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return local_backend(tmp_path / "root")


# Failures at every call.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("size", [10, 1 << 20], ids=["small", "large"])
def test_a_put_that_fails_anywhere_leaves_the_old_file_or_the_whole_new_one(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, code: int
) -> None:
    old, new = page_memory(size + 1), page_memory(size)
    put(backend, "v/file", old)
    failed = []
    for call, noticed in every_failure(monkeypatch, lambda: put(backend, "v/file", new), code, CALLS[:-1]):
        failed.append(call)
        assert noticed, call
        renamed = "rename" in failed and failed[-1] != "rename"
        assert backend.read("v/file") == (new if renamed else old)
        assert backend.listing("v") == [("file", size if renamed else size + 1)]
        assert backend.listing(".tmp") == []
    assert {"open", "pwrite", "fsync", "rename"} <= set(failed)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_create_that_fails_anywhere_is_whole_or_absent_and_can_be_repeated(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    names = iter(range(1000))
    current = ""

    def create() -> None:
        nonlocal current
        current = f"v/{next(names)}"
        backend.create(current, b"data", stamp=STAMP)

    failed = []
    for call, noticed in every_failure(monkeypatch, create, code, CALLS[:-1]):
        failed.append(call)
        assert noticed, call
        leaf = current.removeprefix("v/")
        assert dict(backend.listing("v")).get(leaf, 4) == 4
        assert backend.listing(".tmp") == []
        backend.create(current, b"data", stamp=STAMP)
        assert backend.read(current) == b"data"
    assert {"open", "pwrite", "fsync", "link"} <= set(failed)


def test_an_error_of_close_counts(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.close
    targets: list[str] = []

    def close(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor)
        if STAMP in path:
            targets.append(path)
            raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        with pytest.raises(StorageError, match="lost"):
            put(backend, "v/file", b"data")
    assert len(targets) == 1
    assert backend.listing("v") == []
    assert backend.listing(".tmp") == []


def test_fsync_is_never_repeated_on_a_file_and_the_file_is_never_used_again(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(seen) == 1:
            raise OSError(errno.EIO, "lost")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with contextlib.suppress(StorageError):
            put(backend, "v/file", b"data")
    temporaries = [path for path in seen if ".tmp/" in path]
    assert len(temporaries) == len(set(temporaries)) == 2


def test_short_writes_go_on_where_they_stopped(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 2)], at))
    data = page_memory(10_000)
    put(backend, "v/file", data)
    assert backend.read("v/file") == data


def test_a_direct_write_that_ends_inside_a_page_goes_through_the_page_cache(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000] if len(data) > 1000 else data, at))
    data = page_memory(300_000)
    put(backend, "v/file", data)
    assert backend.read("v/file") == data
    assert backend.listing(".tmp") == []


# File systems that refuse.


def test_without_links_a_rename_that_replaces_nothing_serves(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert backend.create("v/file", b"one", stamp=STAMP)
    assert not backend.create("v/file", b"one", stamp=STAMP)
    with pytest.raises(Fenced):
        backend.create("v/file", b"two", stamp=STAMP)
    assert backend.read("v/file") == b"one"


class NoRename:
    """A C library whose renameat2 fails with a code, or that has none."""

    def __init__(self, code: int | None) -> None:
        if code is not None:
            self.renameat2 = lambda *_: ctypes.set_errno(code) or -1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, None])
def test_without_both_the_path_is_refused(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(posix_io.ctypes, "CDLL", lambda *_, **__: NoRename(code))
    with pytest.raises(StorageUnfit, match="exactly once"):
        backend.create("v/file", b"one", stamp=STAMP)
    assert backend.listing("v") == backend.listing(".tmp") == []


def test_a_directory_that_cannot_be_made_durable_is_refused(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "not for directories")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageUnfit, match="durable"):
        put(backend, "v/file", b"x")


def fill_up(backend: LocalBackend, data: memoryview) -> None:
    for number in range(1, 100):
        put(backend, f"v/{number}", data)


@pytest.mark.root
@pytest.mark.parametrize("size", [100_000, 3 << 20], ids=["small", "large"])
def test_a_full_file_system_keeps_the_old_and_shows_no_half(tmp_path: Path, size: int) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as place:
        backend = LocalBackend(place)
        backend.prepare()
        data = page_memory(size)
        put(backend, "v/0", data)
        with pytest.raises(StorageFull, match="free space"):
            fill_up(backend, data)
        assert all(backend.read(f"v/{name}") == data for name, _ in backend.listing("v"))
        assert backend.listing(".tmp") == []
        backend.delete("v/0")
        put(backend, "v/again", data)  # space returned, so it works again
        assert backend.read("v/again") == data


@pytest.mark.root
def test_a_real_ext4_that_is_full_gives_the_same_answer(tmp_path: Path) -> None:
    with ext4(tmp_path) as place:
        backend = LocalBackend(place)
        backend.prepare()
        data = page_memory(3 << 20)
        with pytest.raises(StorageFull):
            fill_up(backend, data)
        stored = backend.listing("v")
        assert stored
        assert all(size == len(data) and backend.read(f"v/{name}") == data for name, size in stored)
        assert backend.listing(".tmp") == []


@pytest.mark.root
def test_a_file_system_that_is_read_only_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as place:
        backend = LocalBackend(place)
        backend.prepare()
        put(backend, "v/file", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=30)
        with pytest.raises(StorageError, match="writable"):
            put(backend, "v/file", b"y")
        assert backend.read("v/file") == b"x"


@pytest.mark.root
def test_a_directory_that_may_not_be_written_is_named(backend: LocalBackend, tmp_path: Path) -> None:
    put(backend, "v/file", b"x")
    target = str(tmp_path / "root" / "v")
    if subprocess.run(["chattr", "+i", target], capture_output=True, timeout=30).returncode:
        pytest.skip("chattr +i does not work here")
    try:
        with pytest.raises(StorageError, match="right to read and write"):
            put(backend, "v/other", b"y")
        with pytest.raises(StorageError, match="right to read and write"):
            backend.delete("v/file")
        assert backend.listing("v") == [("file", 1)]
        assert backend.listing(".tmp") == []
    finally:
        subprocess.run(["chattr", "-i", target], check=True, timeout=30)


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from holdfast.base.errors import StorageError
from holdfast.tiers.backends.local import LocalBackend
backend = LocalBackend(Path(sys.argv[1]))
backend.prepare()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    backend.put("v/file", [memoryview(bytes(2 << 20))], stamp="s")
except StorageError as error:
    print(error, backend.listing("v"), backend.listing(".tmp"))
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True, timeout=60
    )
    assert "ulimit -f" in result.stdout, result.stderr
    assert result.stdout.endswith("[] []\n")


def test_too_few_descriptors_are_named_and_none_leaks(backend: LocalBackend) -> None:
    put(backend, "v/file", b"x")
    before = sorted(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    for allowed in range(3):  # a put needs three at a time
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + allowed, hard))
        try:
            with pytest.raises(StorageError, match="ulimit -n"):
                put(backend, "v/file", b"y")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert backend.read("v/file") == b"x"
