"""Whose connections are cut when a group is left: the group's own, and nobody else's. Real sockets."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from holdfast.elastic.watchdog import worker_interrupt
from holdfast.elastic.worker import group_teardown, worker_main


@pytest.fixture
def open_sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Peer:
    """A port that somebody connects to."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self.door.getsockname()[1]

    def dial(self) -> socket.socket:
        """Our end."""
        return self._stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=20))

    def accept(self) -> socket.socket:
        """Its end of the next connection."""
        link = self.door.accept()[0]
        link.settimeout(20)
        return self._stack.enter_context(link)


def waits(link: socket.socket) -> bool:
    """Whether who reads from it would wait: nobody has ended it."""
    return not select.select([link], [], [], 0)[0]


def test_what_was_opened_while_a_group_was_made_is_cut_and_nothing_else(
    open_sockets: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, storage, rank, own = (Peer(open_sockets) for _ in range(4))
    made: list[socket.socket] = []
    others = [storage.dial()]

    def make() -> None:  # as torch makes a group: a port of its own, the store, its peers
        own.door = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        own.port = own.door.getsockname()[1]
        others.append(store.dial())
        made.append(rank.dial())

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    sockets = group_teardown.GroupSockets()
    sockets.install()
    c10d._new_process_group_helper()
    others.append(storage.dial())
    assert all(map(waits, [*others, *made]))
    sockets.cut(store.port)
    assert made[0].recv(1) == b"", "who waits for the peer waits on"
    assert all(map(waits, others)), "not a connection between ranks"
    own.dial()
    own.accept()
    sockets.forget()
    again = rank.dial()
    assert sockets.cut(store.port) == 0, "the groups are gone"
    assert waits(again)


# Talks to a rank and to the store, and says at the end what became of both. It never asks its Python for anything else.
WORKER = """
import socket, sys
rank, store = (socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:])
door = socket.create_server(("127.0.0.1", 0))
store.sendall(b"%d" % door.getsockname()[1])
rank.recv(1)
socket.create_connection(door.getsockname()).close()
store.sendall(b"left")
store.recv(1)
"""


def test_a_process_that_cannot_help_itself_is_cut_from_outside(open_sockets: ExitStack) -> None:
    rank, store = Peer(open_sockets), Peer(open_sockets)
    with subprocess.Popen([sys.executable, "-IS", "-c", WORKER, str(rank.port), str(store.port)]) as worker:
        try:
            _, of_store = rank.accept(), store.accept()
            assert of_store.recv(16)
            pidfd = os.pidfd_open(worker.pid)
            num_cut = worker_interrupt.cut(worker.pid, pidfd, spared_ports=(store.port,))
            os.close(pidfd)
            assert num_cut == 1
            assert of_store.recv(16) == b"left", "it waits on, or lost its store or its own port"
        finally:
            worker.kill()


class DeviceGroup:
    """A group as torch shows it; aborting takes as long as it is let."""

    def __init__(self, device: str) -> None:
        self._device_types = [torch.device(device)]
        self.aborted, self.may_end = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        self.may_end.wait(20)
        raise RuntimeError("it refuses")


def test_groups_of_devices_are_aborted_all_together_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: the first that never ends must not keep the others from being aborted, nor the caller."""
    groups = [DeviceGroup(device) for device in ("cuda", "cpu", "cuda")]
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    group_teardown.Aborts().begin()
    assert all(group.aborted.wait(60) for group in (groups[0], groups[2]))
    assert not groups[1].aborted.is_set()
    for group in groups:
        group.may_end.set()


def test_broken_group_errors_are_known_by_type_or_text() -> None:
    assert worker_main.looks_broken(torch.distributed.DistBackendError("NCCL is not named here")) is True
    assert worker_main.looks_broken(torch.distributed.DistStoreError("wait timeout")) is True
    assert (
        worker_main.looks_broken(RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer")) is True
    )
    assert worker_main.looks_broken(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is False
    traceback = "".join(f'  File "layer_{number}.py", line {number}, in forward\n' for number in range(99))
    assert worker_main.looks_broken(RuntimeError(f"{traceback}Connection closed by peer")) is True
    assert worker_main.looks_broken(ValueError("socket")) is False, "the script's own"
    assert worker_main.looks_broken(type("SocketsLeft", (RuntimeError,), {})("planted")) is False, (
        "its name says nothing"
    )
    follows = ValueError("no batch")
    follows.__cause__ = torch.distributed.DistNetworkError("no route")
    assert worker_main.looks_broken(follows) is True


def test_without_a_descriptor_nothing_is_cut_and_nothing_raised(caplog: pytest.LogCaptureFixture) -> None:
    """The thread that hears the agent must live on where a script has used up its descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets = group_teardown.GroupSockets()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert sockets.cut(0) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "left to the launcher" in caplog.text


def test_a_thread_that_hears_goes_on_when_groups_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes the main thread, and hears the next word."""
    runner: Any = object.__new__(worker_main.Runner)
    heard = [[{"op": "none"}], [{"op": "none"}], None]
    runner._line = SimpleNamespace(receive=lambda **_: heard.pop(0), lost=False)
    runner._changed, runner._main, runner._must_leave, runner._running = (
        threading.Condition(),
        1,
        lambda: True,
        object(),
    )

    def fails(_: object) -> None:
        raise RuntimeError("can't start new thread")

    woken: list[int] = []
    runner._break_off = fails
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(signal, "pthread_kill", lambda _, number: woken.append(number))
    monkeypatch.setattr(worker_main, "AGAIN_S", 0.0)

    def ends() -> None:
        raise EOFError

    monkeypatch.setattr(worker_main, "_end_now", ends)
    with pytest.raises(EOFError):
        runner._hear()
    assert woken == [worker_main.WAKE] * 2
