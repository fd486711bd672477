"""Frames: whole or refused, within their time, from our own user only."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.base.errors import ConfigError, KeeperError, KeeperLost
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.frames import Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, two = socket.socketpair()
    channels = Channel(one, where="one"), Channel(two, where="two")
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    one, two = socket.socketpair()
    channel = Channel(two, where="peer")
    yield one, channel
    one.close()
    channel.close()


@pytest.mark.parametrize("moment", ["sent", "received", "waited for"])
def test_an_error_of_a_signals_handler_is_no_loss_of_the_peer(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def handle(*_: object) -> None:
        raise ConnectionResetError("of the script")

    def struck(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    channel = pair[0]
    if moment == "waited for":
        monkeypatch.setattr(frames, "select", SimpleNamespace(poll=struck, POLLIN=select.POLLIN))
    else:
        monkeypatch.setattr(channel._link, "send" if moment == "sent" else "receive", struck)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(ConnectionResetError, match="of the script"):
            channel.send(b"x", timeout_s=1) if moment == "sent" else channel.receive(timeout_s=1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_frames_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    bodies = [b"", b"x", b"y" * 3_000_000]
    sender = threading.Thread(target=lambda: [pair[0].send(body, timeout_s=5) for body in bodies])
    sender.start()

    assert [pair[1].receive(timeout_s=5)[0] for _ in bodies] == bodies
    sender.join()


def test_a_rank_that_comes_back_gets_two_hundred_slots_at_once(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(b"slots", fds=[0] * 200, timeout_s=1)
    body, fds = pair[1].receive(timeout_s=1)
    assert (body, len(fds)) == (b"slots", 200)
    frames.close_fds(fds)


def test_descriptors_come_with_their_frame(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send(b"plain", timeout_s=1)
    pair[0].send(b"with", fds=[writer], timeout_s=1)
    os.close(writer)

    assert pair[1].receive(timeout_s=1) == (b"plain", [])
    body, fds = pair[1].receive(timeout_s=1)

    assert body == b"with"
    assert not os.get_inheritable(fds[0]), "a child of the script that outlives the job would keep the memory of a slot"
    os.write(fds[0], b"!")
    assert os.read(reader, 1) == b"!"
    frames.close_fds(fds)
    os.close(reader)


def test_bulk_bytes_land_in_the_view(pair: tuple[Channel, Channel]) -> None:
    data = os.urandom(5 << 20)
    target = bytearray(len(data))
    sender = threading.Thread(target=lambda: pair[0].send_bulk(b"here", memoryview(data), timeout_s=5))
    sender.start()

    assert pair[1].receive(timeout_s=5)[0] == b"here"
    pair[1].receive_bulk(memoryview(target), timeout_s=5)
    sender.join()

    assert target == data


def test_silence_is_a_timeout_and_the_channel_stays_usable(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        pair[1].receive(timeout_s=0.05)
    pair[0].send(b"late", timeout_s=1)
    assert pair[1].receive(timeout_s=1)[0] == b"late"


def test_the_end_between_frames_and_inside_one(raw: tuple[socket.socket, Channel]) -> None:
    peer, channel = raw
    peer.sendall(struct.pack(">I", 100) + b"half")
    peer.close()
    with pytest.raises(KeeperLost, match="inside a frame"):
        channel.receive(timeout_s=1)
    with pytest.raises(KeeperLost, match="closed the connection"):
        channel.receive(timeout_s=1)


def test_a_length_above_the_limit_is_refused_before_a_byte_of_it_is_read(raw: tuple[socket.socket, Channel]) -> None:
    peer, channel = raw
    peer.sendall(struct.pack(">I", 0xFFFFFFFF))
    started = time.monotonic()
    with pytest.raises(KeeperError, match="above the limit"):
        channel.receive(timeout_s=1)
    assert time.monotonic() - started < 5  # within a second on a quiet machine


def test_a_writer_that_trickles_is_cut_off_in_time(raw: tuple[socket.socket, Channel]) -> None:
    peer, channel = raw
    stop = threading.Event()

    def trickle() -> None:
        peer.sendall(struct.pack(">I", 10_000))
        while not stop.wait(0.02):
            peer.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    with pytest.raises(KeeperError, match="did not finish its frame"):
        channel.receive(timeout_s=1, frame_timeout_s=0.3)
    assert time.monotonic() - started < 5  # within a second on a quiet machine
    stop.set()
    thread.join()


def test_a_peer_that_does_not_read_blocks_for_the_deadline_only(pair: tuple[Channel, Channel]) -> None:
    started = time.monotonic()
    with pytest.raises(KeeperLost, match="does not read"):
        pair[0].send(bytes(8 << 20), timeout_s=0.2)
    assert time.monotonic() - started < 5  # within a second on a quiet machine


def test_nothing_is_sent_in_the_middle_of_a_frame_or_behind_half_of_one(pair: tuple[Channel, Channel]) -> None:
    """A signal's handler may run in the thread that sends."""
    pair[0]._send_lock.acquire()
    pair[0].send(b"of a handler", timeout_s=1)
    pair[0]._send_lock.release()
    assert pair[1].receive(timeout_s=1)[0] == b"of a handler"
    with pytest.raises(KeeperLost, match="does not read"):
        pair[0].send(b"x" * 10_000_000, timeout_s=0.1)
    with pytest.raises(KeeperLost, match="is not whole"):
        pair[0].send(b"y", timeout_s=1)


@pytest.mark.parametrize("num_bytes", [5, 10_000_000])
def test_who_is_interrupted_with_a_part_sent_sends_nothing_behind_it(
    num_bytes: int, pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler that raises strikes before it is known how much was sent. The peer is told at once."""
    link, other = pair
    send, struck = link._link.send, iter([KeyboardInterrupt])

    def sends(data: memoryview, fds: Sequence[int]) -> int:
        sent = send(data, fds)
        for error in struck:
            raise error
        return sent

    monkeypatch.setattr(link._link, "send", sends)
    with pytest.raises(KeyboardInterrupt):
        link.send(b"x" * num_bytes, timeout_s=5)
    if num_bytes > frames.UNDIVIDED_BYTES:
        with pytest.raises(KeeperLost, match="is not whole"):
            link.send(b"y", timeout_s=1)
        with pytest.raises(KeeperLost, match="inside a frame"):
            other.receive(timeout_s=1)
        return
    link.send(b"y", timeout_s=1)
    assert [other.receive(timeout_s=1)[0] for _ in range(2)] == [b"xxxxx", b"y"]


def test_nothing_is_sent_behind_bulk_bytes_that_are_not_whole(pair: tuple[Channel, Channel]) -> None:
    link, other = pair
    blocks = iter([True])

    def before(_: int) -> None:
        if not next(blocks, False):
            raise KeeperError("no more of it")

    errors: list[str] = []
    view = bytearray(2 * frames.BULK_BLOCK_BYTES)
    reader = threading.Thread(target=lambda: [other.receive(timeout_s=5), errors.append(_error_of(other, view))])
    reader.start()
    with pytest.raises(KeeperError, match="no more"):
        link.send_bulk(b"head", memoryview(bytes(view)), timeout_s=5, before=before)
    with pytest.raises(KeeperLost):
        link.send(b"a refusal", timeout_s=1)
    reader.join()
    assert "inside a frame" in errors[0]


def _error_of(channel: Channel, view: bytearray) -> str:
    try:
        channel.receive_bulk(memoryview(view), timeout_s=2)
    except (KeeperLost, KeeperError) as error:
        return error.what
    return ""


def test_abort_wakes_a_reader_that_waits_for_ever(pair: tuple[Channel, Channel]) -> None:
    ended: list[str] = []

    def read() -> None:
        try:
            pair[1].receive(timeout_s=None)
        except KeeperLost as error:
            ended.append(error.what)

    thread = threading.Thread(target=read)
    thread.start()
    pair[1].abort()
    thread.join(2)

    assert len(ended) == 1


def test_a_frame_that_is_too_large_is_not_sent(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(KeeperError, match="above the limit"):
        pair[0].send(bytes(frames.MAX_FRAME_BYTES + 1), timeout_s=1)


def test_too_many_descriptors_are_refused_and_closed(raw: tuple[socket.socket, Channel]) -> None:
    peer, channel = raw
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(peer, [struct.pack(">I", 0)], [0] * (frames.MAX_DESCRIPTORS + 2))
    with pytest.raises(KeeperError, match="more descriptors"):
        channel.receive(timeout_s=1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(KeeperLost, match="no keeper listens"):
        frames.connect(f"unix:{tmp_path}/s", timeout_s=1)


@pytest.mark.parametrize("address", ["tcp:host:1", "relative/path", ""])
def test_what_is_not_an_address(address: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        frames.unix_path(address)


def test_a_path_that_is_too_long_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="the kernel takes 107") as caught:
        frames.unix_path("/" + "x" * 120)
    assert "HOLDFAST_RUNTIME_DIR" in caught.value.remedy


def test_the_socket_is_ours_alone(tmp_path: Path) -> None:
    listener = frames.listen(tmp_path / "s")
    try:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        assert frames.accept(listener) is None  # nobody came
    finally:
        listener.close()


@pytest.mark.root
def test_another_user_is_not_served(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == 0 and str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    path = tmp_path / "s"
    listener = frames.listen(path)
    path.chmod(0o777)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
            sock.settimeout(5)
            os._exit(0 if sock.recv(1) == b"" else 1)
        except OSError:
            os._exit(2)
    try:
        listener.setblocking(True)
        assert frames.accept(listener) is None
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        listener.close()


def test_a_line_for_which_no_descriptor_is_left_is_as_good_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = sorted(os.listdir("/proc/self/fd"))
    with contextlib.closing(frames.listen(path)):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for address in (f"unix:{path}", "tcp:127.0.0.1:9"):
                with pytest.raises(KeeperLost, match="ulimit -n"):
                    frames.connect(address, timeout_s=1.0, security=SimpleNamespace())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        frames.connect(f"unix:{path}", timeout_s=1.0).close()
    assert sorted(os.listdir("/proc/self/fd")) == before
