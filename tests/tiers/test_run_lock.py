"""One job per root: who is refused, who is let in, and what ends the lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from holdfast.base.errors import InUse, StorageError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage import run_lock
from holdfast.tiers.storage.version_store import Storage, open_storage

HOLDER = """
import os, socket, sys
if sys.argv[2] == "elsewhere":
    socket.gethostname = lambda: "node7"
from holdfast.base.events import Events
from holdfast.tiers.storage.version_store import open_storage
store = open_storage(sys.argv[1], Events())
store.claim()
store.run_lock.take("first")
if sys.argv[2] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
print("holds", flush=True)
sys.stdin.readline()
"""


OLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
print("holds", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(root: Path, how: str = "plain") -> Iterator[subprocess.Popen[str]]:
    """Another process that works on `root`."""
    command = [sys.executable, "-c", HOLDER, str(root), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def job(root: Path) -> Storage:
    store = open_storage(root, Events())
    store.claim()
    return store


def test_a_second_job_is_refused_by_name_and_let_in_when_the_first_is_dead(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with holder(root) as first:
        second = job(root)
        with pytest.raises(InUse) as caught:
            second.run_lock.take("second", timeout_s=0.2)
        assert f"process {first.pid} on {os.uname().nodename}, run 'first'" in caught.value.what
        assert caught.value.where == str(root / "run.lock")
        assert "another path" in caught.value.remedy
        first.kill()
        second.run_lock.take("second")
    assert f'"pid": {os.getpid()}' in (root / "run.lock").read_text()
    second.run_lock.release()


def test_a_dying_predecessor_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path / "root") as first:
        os.kill(first.pid, signal.SIGSTOP)
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -KILL {first.pid}"])
        store = job(tmp_path / "root")
        started = time.monotonic()
        store.run_lock.take("second")
        assert 0.2 < time.monotonic() - started < run_lock.PREDECESSOR_TIMEOUT_S
        killer.wait(30)
    store.run_lock.release()


def test_a_dead_machine_is_waited_for_where_a_file_server_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock ends later than anybody waits for a process of this machine; on a local disk nobody waits that long."""
    root = tmp_path / "root"
    with holder(root, "elsewhere") as first:
        second = job(root)
        with pytest.raises(InUse, match="on node7"):
            second.run_lock.take("second", timeout_s=0.1)
        monkeypatch.setattr(run_lock, "is_remote", lambda _: True)
        monkeypatch.setattr(run_lock, "REMOTE_LEASE_S", 0.4)
        with pytest.raises(InUse, match="on node7"):
            second.run_lock.take("second", timeout_s=0.1)
        monkeypatch.setattr(run_lock, "REMOTE_LEASE_S", 30.0)
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -KILL {first.pid}"])
        second.run_lock.take("second", timeout_s=0.1)
        killer.wait(30)
    assert "if that is dead, the file server drops the lock within 30 s" in caplog.text
    second.run_lock.release()


@pytest.mark.parametrize(("of_root", "of_file"), [(0o700, 0o600), (0o755, 0o600), (0o775, 0o660), (0o777, 0o666)])
@pytest.mark.parametrize("before", [None, 0o644])
def test_who_may_only_read_the_root_cannot_lock_it(
    tmp_path: Path, of_root: int, of_file: int, before: int | None
) -> None:
    """A lock for reading needs no more than to read the file, and keeps every job out."""
    store = job(tmp_path / "root")
    (tmp_path / "root").chmod(of_root)
    file = tmp_path / "root" / run_lock.LOCK_FILE
    if before is not None:
        file.touch()
        file.chmod(before)
    store.run_lock.take("first")
    try:
        assert file.stat().st_mode & 0o777 == of_file
    finally:
        store.run_lock.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path / "root", "fork") as first:
        store = job(tmp_path / "root")
        with pytest.raises(InUse):
            store.run_lock.take("second", timeout_s=0.1)
        first.kill()  # its child lives on, as a data loader's worker does for a while
        store.run_lock.take("second")
        store.run_lock.release()


def test_one_process_may_hold_it_twice_and_gives_it_back_once(tmp_path: Path) -> None:
    first, second = job(tmp_path / "root"), job(tmp_path / "root")
    first.run_lock.take("a")
    first.run_lock.take("a")
    second.run_lock.take("a")
    first.run_lock.release()
    first.run_lock.release()
    assert refused_elsewhere(tmp_path / "root"), "closing one descriptor would have dropped the other's lock"
    second.run_lock.release()
    assert (tmp_path / "root" / "run.lock").read_bytes() == b"", "nobody is named who is not there"
    assert not refused_elsewhere(tmp_path / "root")


def test_what_a_handler_raises_keeps_no_lock_from_its_own_process(tmp_path: Path) -> None:
    """At each moment of taking it and giving it back."""
    left = 0

    def look(_: FrameType, event: str, __: object) -> None:
        nonlocal left
        left -= event != "c_call"  # no handler comes between a call and what it calls
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    def handle(*_: object) -> None:
        raise SystemExit

    def strike(moment: int) -> bool:
        nonlocal left
        first, left = run_lock.RunLock(tmp_path), moment
        with suppress(SystemExit):
            sys.setprofile(look)
            first.take("run")
            first.release()
            sys.setprofile(None)
        sys.setprofile(None)
        first.release()
        return left > 0

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for moment in range(1, 1000):
            if strike(moment):
                break
            second = run_lock.RunLock(tmp_path)
            try:
                second.take("run", timeout_s=0.0)
            except InUse:
                pytest.fail(f"moment {moment}")
            second.release()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    assert 20 < moment < 999


def test_a_file_that_has_the_locks_number_is_neither_emptied_nor_closed(tmp_path: Path) -> None:
    """A script closed all descriptors, and opened its own."""
    store = job(tmp_path / "root")
    store.run_lock.take("a")
    lock = os.stat(tmp_path / "root" / "run.lock")
    number = next(int(n) for n in os.listdir("/proc/self/fd") if is_at(int(n), lock))
    (tmp_path / "theirs").write_bytes(b"theirs")
    own = os.open(tmp_path / "theirs", os.O_RDWR)
    os.dup2(own, number)
    store.run_lock.release()
    assert os.pread(number, 100, 0) == b"theirs"
    os.close(number)
    os.close(own)


def is_at(number: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(number), status)
    except OSError:  # that of the listing itself
        return False


def test_who_reads_the_whole_directory_in_the_same_process_drops_no_lock(tmp_path: Path) -> None:
    """`shutil.copytree`, an upload, a hash of the directory: each opens and closes the file."""
    first = job(tmp_path / "root")
    first.run_lock.take("a")
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    os.close(os.open(tmp_path / "root" / "run.lock", os.O_RDWR))
    assert refused_elsewhere(tmp_path / "root")
    assert not refused_elsewhere(tmp_path / "copy"), "a copy is another root"
    first.run_lock.release()
    assert not refused_elsewhere(tmp_path / "root")


def test_a_job_of_an_older_holdfast_is_kept_out_and_keeps_out(tmp_path: Path) -> None:
    """It locks the file for its process (F_SETLK)."""
    first = job(tmp_path / "root")
    first.run_lock.take("a")
    older = [sys.executable, "-c", OLDER, str(tmp_path / "root" / "run.lock")]
    assert subprocess.run(older, check=False, input="", text=True).returncode == 3
    first.run_lock.release()
    with subprocess.Popen(older, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        with pytest.raises(InUse):
            first.run_lock.take("a", timeout_s=0.1)
        process.communicate("")


def test_where_the_kernel_has_no_locks_of_open_files_a_process_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 9999)  # EINVAL, as any unknown command
    first = job(tmp_path / "root")
    first.run_lock.take("a")
    assert refused_elsewhere(tmp_path / "root")
    first.run_lock.release()
    assert not refused_elsewhere(tmp_path / "root")


def refused_elsewhere(root: Path) -> bool:
    code = """
import sys
from holdfast.base.errors import InUse
from holdfast.base.events import Events
from holdfast.tiers.storage.version_store import open_storage
store = open_storage(sys.argv[1], Events())
try:
    store.run_lock.take("x", timeout_s=0.0)
except InUse:
    sys.exit(3)
"""
    return subprocess.run([sys.executable, "-c", code, str(root)], check=False).returncode == 3


def test_a_removed_directory_takes_the_lock_with_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = job(root)
    first.run_lock.take("a")
    root.rename(tmp_path / "gone")
    second = job(root)
    second.run_lock.take("b")
    assert (root / "run.lock").read_text() != ""
    with pytest.raises(InUse, match="belongs to job"):
        first.claim()
    first.run_lock.release()
    second.run_lock.release()


@pytest.mark.parametrize(
    "words", [b"", b"\0" * 5000, b'{"pid":[]}', b'["pid"]', b"[" * 900, b'{"pid":1,"host":"\\u001b[2J"}']
)
def test_words_that_nobody_wrote_are_not_repeated(tmp_path: Path, words: bytes) -> None:
    with holder(tmp_path / "root"):
        (tmp_path / "root" / "run.lock").write_bytes(words)
        with pytest.raises(InUse, match="an unknown process"):
            job(tmp_path / "root").run_lock.take("b", timeout_s=0.0)


def test_something_else_in_its_place_is_named(tmp_path: Path) -> None:
    store = job(tmp_path / "root")
    lock = tmp_path / "root" / "run.lock"
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="refuses") as caught:
        store.run_lock.take("a", timeout_s=0.0)
    assert "link" in caught.value.remedy
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(StorageError, match="not a regular file"):
        store.run_lock.take("a", timeout_s=0.0)


def test_the_lock_is_in_nobodys_way(tmp_path: Path) -> None:
    """Looking, retiring and claiming go on beside it, and never remove it."""
    store = job(tmp_path / "root")
    store.run_lock.take("a")
    assert store.incarnations.register() == 1
    assert (store.versions(), store.unfinished(), store.incarnations.sweep(1)) == ([], [], [])
    assert job(tmp_path / "root").job_id() == store.job_id()
    (tmp_path / "root" / str(Version(1, 1))).mkdir()
    store.discard(Version(1, 1))
    assert (tmp_path / "root" / "run.lock").exists()
    store.run_lock.release()
