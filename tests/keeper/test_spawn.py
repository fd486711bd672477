"""Starting, electing, finding a keeper; and strangers at its door."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, InUse, KeeperError, KeeperLost, KeeperNotStarted
from holdfast.core.model import Version
from holdfast.keeper.rpc import messages, server, spawn
from holdfast.keeper.rpc.caller import dial
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.paths import KEEPER_LOCK, job_digest, place_of
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.keeper.rpc.stopped_keeper import wake
from holdfast.testing.contracts.adapter_processes import keepers_under
from holdfast.tiers.memory.processes import start_time
from holdfast.tiers.wire import frames
from keeper.rig import Rig, eventually
from keepers_kit import end_keepers, of_threads, processors_of_threads, wait_ended
from kit.strikes import Strike, called, exits, strikes
from sample_kit import MORE

MakeRig = Callable[..., Rig]


def test_the_keeper_is_up_fast_and_small_and_free_of_torch(make_rig: MakeRig) -> None:
    rig = make_rig()
    started = time.monotonic()
    place = rig.keeper(0)
    assert time.monotonic() - started < 8  # 0.15 s on a quiet machine
    pid = rig.pid_of(place)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 80 << 10
    assert rig.keeper(0) == place
    assert rig.pid_of(place) == pid


def test_who_is_interrupted_while_it_waits_for_the_start_lock_does_not_keep_it(
    runtime_dir: Path, tmp_path: Path
) -> None:
    place = place_of(str(tmp_path / "ck"), Config(runtime_dir=str(runtime_dir)))
    place.make()
    held = place.lock(place.start_lock, blocking=True)
    assert held is not None
    strike = Strike(exits, called(threading.Thread.join))
    with contextlib.suppress(SystemExit), strike:
        spawn._lock_within(place, time.monotonic() + 60.0)
    assert strike.came
    os.close(held)
    eventually(lambda: all(thread.name != "holdfast start lock" for thread in threading.enumerate()))
    again = place.lock(place.start_lock, blocking=False)
    assert again is not None
    place.start_lock.unlink()
    os.close(again)


def test_a_handler_that_raises_while_the_start_lock_is_taken_does_not_keep_it(
    runtime_dir: Path, tmp_path: Path
) -> None:
    """At each moment: neither by a descriptor nor by a thread that goes on to wait."""
    codes = (spawn._lock_within.__code__, threading.Thread.join.__code__)
    place = place_of(str(tmp_path / "ck"), Config(runtime_dir=str(runtime_dir)))
    place.make()
    for moment, strike in enumerate(
        strikes(exits, counts=lambda frame, event: frame.f_code in codes and event != "return")
    ):
        with contextlib.suppress(SystemExit), strike:
            os.close(spawn._lock_within(place, time.monotonic() + 60.0))
        eventually(lambda: all(thread.name != "holdfast start lock" for thread in threading.enumerate()))
        again = place.lock(place.start_lock, blocking=False)
        assert again is not None, moment
        os.close(again)
    place.start_lock.unlink()
    assert moment > 5


def test_jobs_of_tests_wait_for_a_keeper_that_is_about_to_end(runtime_dir: Path, tmp_path: Path) -> None:
    """It was killed in that moment once, and its directory stayed."""
    place = ensure_keeper(str(tmp_path), Config(runtime_dir=str(runtime_dir)))
    (keeper,) = keepers_under(runtime_dir)
    keeper.suspend()
    keeper.terminate()
    slow = threading.Timer(0.3, keeper.resume)
    slow.start()
    end_keepers(runtime_dir)
    slow.join()
    assert not wait_ended([keeper], 0.0)
    assert not place.directory.exists()
    ensure_keeper(str(tmp_path), Config(runtime_dir=str(runtime_dir)))
    with pytest.raises(AssertionError, match="stayed"):
        end_keepers(runtime_dir, grace_s=0.1)
    assert not runtime_dir.exists()


def test_no_thread_of_it_interrupts_a_trainer_by_waking_up(make_rig: MakeRig) -> None:
    rig = make_rig()
    pid = rig.pid_of(rig.keeper(0))
    assert of_threads(pid, os.sched_getscheduler) == {os.SCHED_BATCH}


def test_it_is_detached_from_whoever_started_it(make_rig: MakeRig) -> None:
    rig = make_rig()
    pid = rig.pid_of(rig.keeper(0))
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, group, session = (int(field) for field in stat[1:4])
    assert parent != os.getpid()
    assert group != os.getpgrp()
    assert session != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    children = psutil.Process().children()
    assert pid not in [child.pid for child in children]
    assert not [child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("planted", ["holdfast/__init__.py", "importlib.py", "typing.py"])
def test_nothing_is_imported_from_the_directory_where_a_job_is_started(
    make_rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Others may write there, and a keeper inherits the secret and the key."""
    ran, file = tmp_path / "ran", tmp_path / "shared" / planted
    file.parent.mkdir(parents=True)
    file.write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path / "shared")
    rig = make_rig()
    assert rig.pid_of(rig.keeper(0))
    assert not ran.exists()


def test_many_starters_get_one_keeper(base: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from holdfast.base.config import Config
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.spawn import ensure_keeper
place = ensure_keeper({str(base / "ck")!r}, Config(runtime_dir={str(base / "rt")!r}, node_label="n0", linger_s=20))
client = KeeperClient.connect(place.socket, job=place.job)
print(client.welcome.pid)
client.close()
"""
    starters = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    found = {starter.communicate(timeout=60)[0].strip() for starter in starters}

    assert len(found) == 1
    pid = int(found.pop())
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: start_time(pid) is None)


def test_it_may_run_wherever_any_of_its_trainers_may(base: Path) -> None:
    """A launcher bound each rank to a processor: the work for both is not done on that of the first."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two processors")
    code = f"""
import os, sys
os.sched_setaffinity(0, {{int(sys.argv[1])}})
sys.path[:0] = {sys.path!r}
from holdfast.base.config import Config
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.spawn import ensure_keeper
place = ensure_keeper({str(base / "ck")!r}, Config(runtime_dir={str(base / "rt")!r}, node_label="n0", linger_s=20))
client = KeeperClient.connect(place.socket, job=place.job, rank=int(sys.argv[2]))
print(client.welcome.pid, flush=True)
sys.stdin.read()
client.close()
"""
    found = []
    with contextlib.ExitStack() as ranks:
        for rank, core in enumerate(cores):
            command = [sys.executable, "-c", code, str(core), str(rank)]
            process = ranks.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdin is not None
            ranks.callback(process.stdin.close)
            assert process.stdout is not None
            keeper = int(process.stdout.readline())
            found.append(processors_of_threads(keeper))
    os.kill(keeper, signal.SIGTERM)
    eventually(lambda: start_time(keeper) is None)
    assert found == [{frozenset(cores[:1])}, {frozenset(cores)}]


def test_a_second_keeper_of_a_node_leaves_it_to_the_first(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    first = rig.pid_of(place)
    ready, theirs = os.pipe()
    code = "import sys; from holdfast.keeper.service.keeper_main import main; sys.exit(main(sys.argv[1:]))"
    options = ["--root", rig.root, "--run-id", "default", "--node", place.node, "--runtime-dir", str(place.runtime)]
    second = subprocess.Popen([sys.executable, "-c", code, *options, "--ready-fd", str(theirs)], pass_fds=(theirs,))
    os.close(theirs)
    try:
        with os.fdopen(ready) as said:
            assert said.readline() == '{"pid": 0}\n'
        assert second.wait(30) == 0
    finally:
        second.kill()
        second.wait()
    assert rig.pid_of(place) == first


def test_a_stale_socket_and_lock_of_a_killed_keeper_are_taken_over(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    first = rig.pid_of(place)
    os.kill(first, signal.SIGKILL)

    assert rig.keeper(0) == place

    assert rig.pid_of(place) != first


@MORE
def test_a_frozen_keeper_is_named(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "wake", lambda _: False)  # as one that no signal has stopped
    rig = make_rig()
    pid = rig.pid_of(rig.keeper(0))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(KeeperError, match=f"keeper {pid} holds the lock and does not answer"):
            ensure_keeper(rig.root, rig.config_of(0), timeout_s=5)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_frozen_keeper_is_waited_for_aloud_where_it_may_hold_what_nobody_else_has(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that lost a rank failed within seconds, and again with each restart."""
    rig = make_rig()
    place = rig.keeper(0)
    keeper = psutil.Process(rig.pid_of(place))
    monkeypatch.setattr(spawn, "wake", lambda _: False)  # as one that no signal has stopped

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is waited for" in record.getMessage():
                keeper.resume()

    hears = Hears()
    spawn.logger.addHandler(hears)
    keeper.suspend()
    try:
        assert ensure_keeper(rig.root, rig.config_of(0), timeout_s=0.1, patience_s=60) == place
    finally:
        spawn.logger.removeHandler(hears)
        keeper.resume()
    assert rig.pid_of(place) == keeper.pid
    assert caplog.text.count(f"keeper {keeper.pid} holds the lock and does not answer: it is waited for") == 1


def test_a_keeper_that_a_signal_stopped_is_continued(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    keeper = psutil.Process(rig.pid_of(place))
    keeper.suspend()
    try:
        eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)
        assert ensure_keeper(rig.root, rig.config_of(0)) == place
        assert keeper.status() != psutil.STATUS_STOPPED
    finally:
        keeper.resume()
    assert rig.pid_of(place) == keeper.pid


@pytest.mark.parametrize("is_keeper", [False, True], ids=["no keeper", "of another job"])
def test_only_the_keeper_of_the_job_is_continued(make_rig: MakeRig, base: Path, *, is_keeper: bool) -> None:
    """The number of one that died may have come to another process, which somebody has stopped on purpose."""
    program, rig = [sys.executable, "-c", "import time; time.sleep(600)"], make_rig()
    other = psutil.Process(rig.pid_of(rig.keeper(0))) if is_keeper else psutil.Popen(program)
    (base / "died").mkdir()
    (base / "died" / KEEPER_LOCK).write_text(f"{other.pid}\n")
    try:
        other.suspend()
        eventually(lambda: other.status() == psutil.STATUS_STOPPED)
        assert not wake(base / "died")
        assert other.status() == psutil.STATUS_STOPPED
    finally:
        other.kill()
        other.wait()
    assert not wake(base / "died")


def test_a_stopped_keeper_is_continued_though_a_disk_of_it_does_not_answer(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been writing there, and whoever waits for it must not wait for that disk."""
    rig, real = make_rig(), Path.stat
    place = rig.keeper(0)
    keeper = psutil.Process(rig.pid_of(place))

    def answers(path: Path, **more: bool) -> os.stat_result:
        if path.parent == Path(f"/proc/{keeper.pid}/fd") and path.readlink().name != KEEPER_LOCK:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", answers)
    keeper.suspend()
    eventually(lambda: keeper.status() == psutil.STATUS_STOPPED)
    assert wake(place.directory)
    eventually(lambda: keeper.status() != psutil.STATUS_STOPPED)


def test_jobs_and_nodes_have_keepers_of_their_own(base: Path) -> None:
    config = Config(runtime_dir=str(base / "rt"), node_label="n0")
    places = {
        place_of(str(base / "a"), config),
        place_of(str(base / "b"), config),
        place_of(str(base / "a"), Config(runtime_dir=str(base / "rt"), node_label="n1")),
        place_of(str(base / "a"), Config(runtime_dir=str(base / "rt"), node_label="n0", run_id="other")),
    }
    assert len({place.socket for place in places}) == 4
    assert job_digest("ck", "r") == job_digest(os.path.abspath("ck"), "r")
    assert job_digest("s3://x/y", "r") == job_digest("s3://x/y", "r")
    (base / "link").symlink_to(base / "a")
    (base / "above").symlink_to(base, target_is_directory=True)
    spelt = [str(base / "a"), f"file://{base}/a", str(base / "link"), str(base / "above" / "a"), f"{base}/x/../a"]
    assert len({job_digest(each, "r") for each in spelt}) == 1  # not there yet
    (base / "a").mkdir()
    assert len({job_digest(each, "r") for each in spelt}) == 1


def test_a_keeper_of_another_job_refuses(make_rig: MakeRig) -> None:
    place = make_rig().keeper(0)
    with pytest.raises(InUse, match="belongs to job"):
        KeeperClient.connect(place.socket, job="0" * 16)


def test_a_runtime_directory_that_others_can_enter_is_refused(base: Path) -> None:
    (base / "rt").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not ours alone"):
        ensure_keeper(str(base / "ck"), Config(runtime_dir=str(base / "rt"), node_label="n0"))


def test_a_link_in_place_of_the_runtime_directory_is_refused(base: Path) -> None:
    (base / "real").mkdir(mode=0o700)
    (base / "rt").symlink_to(base / "real")
    with pytest.raises(ConfigError, match="not ours alone"):
        ensure_keeper(str(base / "ck"), Config(runtime_dir=str(base / "rt"), node_label="n0"))


@pytest.mark.root
@pytest.mark.parametrize("planted", ["directory", "link", "file"])
def test_who_takes_our_default_directory_first_costs_the_keeper_and_not_the_job(
    base: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Its name can be guessed, and where all may write nobody can remove what another made."""
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    taken = Config().runtime_path
    assert taken.parent == base
    if planted == "directory":
        taken.mkdir()
    elif planted == "link":
        (base / "theirs").mkdir(mode=0o700)
        taken.symlink_to(base / "theirs")
    else:
        taken.touch()
    os.lchown(taken, 65534, 65534)
    with pytest.raises(KeeperNotStarted, match="set HOLDFAST_RUNTIME_DIR to a private directory") as caught:
        ensure_keeper(str(base / "ck"), Config(node_label="n0"))
    assert caught.value.where == str(taken)
    why = "another user made it" if planted == "directory" else "no directory, or a link to one"
    with pytest.raises(ConfigError, match=why):
        ensure_keeper(str(base / "ck"), Config(runtime_dir=str(taken), node_label="n0"))


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(ConfigError, match="the kernel takes 107"):
        ensure_keeper(str(base / "ck"), Config(runtime_dir=str(base / ("x" * 90)), node_label="n0"))
    assert list(base.iterdir()) == []


# --- strangers at the door


def raw(place: object) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(place.socket))
    sock.settimeout(10)
    return sock


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    struct.pack(">I", 1 << 31),
    struct.pack(">I", 2000) + b"x" * 2000,
    struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    struct.pack(">I", 16) + b"\x91" * 16,
    struct.pack(">I", 0),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_cut_off_without_harm(make_rig: MakeRig, garbage: bytes) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    sock = raw(place)
    with sock:
        sock.sendall(garbage)
        assert b"welcome" not in everything(sock)
    assert rig.status(0)["node"] == "n0"


def everything(sock: socket.socket) -> bytes:
    seen = b""
    try:
        while part := sock.recv(4096):
            seen += part
    except ConnectionResetError:
        pass  # cut off with bytes of ours unread
    return seen


def test_a_greeting_above_a_kilobyte_is_not_read(make_rig: MakeRig) -> None:
    """It is a right one otherwise: who has not said who it is gets no more room than that."""
    rig = make_rig()
    place = rig.keeper(0)
    for length, welcome in ((10, True), (1024, False)):
        channel = frames.connect(place.address, timeout_s=1)
        hello = messages.Hello(job=place.job, role=messages.VIEWER, job_id="x" * length)
        channel.send(messages.encode(hello), timeout_s=1)
        if welcome:
            assert isinstance(messages.decode(channel.receive(timeout_s=5)[0]), messages.Welcome)
        else:
            with pytest.raises(KeeperLost):
                channel.receive(timeout_s=5)
        channel.close()
    assert rig.status(0)["node"] == "n0"


def test_garbage_after_the_greeting_ends_that_connection_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    channel = frames.connect(place.address, timeout_s=1)
    channel.send(messages.encode(messages.Hello(job=place.job, role=messages.VIEWER)), timeout_s=1)
    assert isinstance(messages.decode(channel.receive(timeout_s=2)[0]), messages.Welcome)
    channel.send(b"\x85nonsense", timeout_s=1)
    with pytest.raises(KeeperLost):
        channel.receive(timeout_s=5)
    channel.close()
    assert rig.status(0)["node"] == "n0"


@MORE
def test_a_silent_and_a_trickling_client_are_cut_off_in_time(make_rig: MakeRig) -> None:
    rig = make_rig()
    place = rig.keeper(0)
    silent, slow = raw(place), raw(place)
    slow.sendall(struct.pack(">I", 500))
    started = time.monotonic()
    stop = threading.Event()

    def trickle() -> None:
        try:
            while not stop.wait(0.2):
                slow.sendall(b"x")
        except OSError:
            pass

    thread = threading.Thread(target=trickle)
    thread.start()
    assert rig.status(0)["node"] == "n0"
    assert everything(silent) == b""
    assert everything(slow) == b""
    assert time.monotonic() - started < frames.HELLO_TIMEOUT_S + 3
    stop.set()
    thread.join()
    silent.close()
    slow.close()


def test_too_many_connections_are_turned_away_and_room_is_made_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    place = rig.keeper(0)
    crowd = [raw(place) for _ in range(frames.MAX_CONNECTIONS)]
    eventually(lambda: refused(place))
    assert trainer.client.status()["node"] == "n0"  # who is in stays in
    for sock in crowd:
        sock.close()
    eventually(lambda: not refused(place))


def refused(place: object) -> bool:
    try:
        KeeperClient.connect(place.socket, job=place.job, timeout_s=2).close()
    except KeeperLost:
        return True
    return False


@pytest.mark.parametrize(
    ("role", "message"),
    [
        (messages.VIEWER, messages.Prepare(num_bytes=4096, num_slots=2)),
        (messages.VIEWER, messages.Goodbye(finished=True)),
        (messages.KEEPER, messages.Goodbye(finished=True)),
        (messages.KEEPER, messages.Adopt(num_slots=0)),
        (messages.RANK, messages.Pull(version=messages.Version(1, 1), bundle_id="x", start=0, length=1)),
    ],
)
def test_a_role_may_only_do_what_is_listed(make_rig: MakeRig, role: str, message: messages.Message) -> None:
    place = make_rig().keeper(0)
    hello = messages.Hello(job=place.job, role=role, rank=0)
    caller = dial(place.address, hello, timeout_s=2, on_push=lambda _: None, on_lost=lambda _: None)
    try:
        with pytest.raises(KeeperError, match="may not say"):
            caller.call(message, timeout_s=2)
    finally:
        caller.close()


def test_another_protocol_is_refused_with_the_remedy(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    pid = rig.pid_of(rig.keeper(0))
    # What a rank of a later holdfast does first; a keeper of this one has been left by an earlier job.
    monkeypatch.setattr(spawn, "Hello", partial(messages.Hello, protocol=99))
    with pytest.raises(KeeperError) as caught:
        ensure_keeper(rig.root, rig.config_of(0))
    assert f"process {pid}" in caught.value.what
    assert f"it speaks protocol {messages.PROTOCOL}, this process 99" in caught.value.what
    assert "one version of holdfast" in caught.value.remedy
    assert f"kill {pid}" in caught.value.remedy


def test_a_field_that_is_not_known_is_passed_over_and_a_message_is_refused() -> None:
    """Under one number of the protocol; the specification names the number."""
    text = Path(messages.__file__).parents[4].joinpath("docs", "spec", "keeper.md").read_text(encoding="utf-8")
    assert f"protocol = {messages.PROTOCOL}," in text
    said = msgspec.msgpack.decode(messages.encode(messages.Persist(version=Version(1, 2))))
    body = msgspec.msgpack.encode({**said, "later": [1]})
    assert messages.decode(body) == messages.Persist(version=Version(1, 2))
    with pytest.raises(KeeperError, match="not a message of this protocol"):
        messages.decode(msgspec.msgpack.encode({**said, "is": "of-a-later-release"}))


def test_a_greeting_of_another_protocol_need_not_look_like_ours(make_rig: MakeRig) -> None:
    place = make_rig().keeper(0)
    channel = frames.connect(place.address, timeout_s=1)
    channel.send(msgspec.msgpack.encode({"is": "salute", "protocol": 99, "who": [1]}), timeout_s=1)
    reply = messages.decode(channel.receive(timeout_s=2)[0])
    assert isinstance(reply, messages.Refusal)
    assert f"protocol {messages.PROTOCOL}, this process 99" in reply.what
    channel.close()


def test_who_left_before_it_was_greeted_takes_no_place_of_the_others(tmp_path: Path) -> None:
    """On a busy machine dozens may have come and gone before a thread looks at the first."""
    served = server.Server(tmp_path / "socket", SimpleNamespace())  # type: ignore[arg-type]
    served._thread_pool = SimpleNamespace(lend=lambda _: None)  # type: ignore[assignment]
    ends: list[socket.socket] = []

    def come() -> frames.Channel:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return frames.Channel(ours, where="someone")

    try:
        for _ in range(frames.MAX_CONNECTIONS):
            served._accept(come)
        served._accept(come)
        assert len(served._connections) == frames.MAX_CONNECTIONS, "those that are there come first"
        for end in ends[:2]:
            end.close()
        next(iter(served._connections.values())).channel._sock.close()  # a thread of it does so, before it is forgotten
        served._accept(come)
        assert len(served._connections) == frames.MAX_CONNECTIONS + 1
        assert sum(connection.channel.is_cut for connection in served._connections.values()) == 2
    finally:
        for connection in served._connections.values():
            connection.channel.close()
        for end in ends:
            end.close()
        served._listener.close()
        os.close(served._wake)
        served._poll.close()
