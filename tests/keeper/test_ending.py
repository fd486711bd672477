"""A keeper whose job is over meets the ranks of the next one: it serves them or turns them away, never half of each."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import InUse, KeeperLost
from holdfast.base.events import Events
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import RANK, Cadence, Hello, Ok, encode
from holdfast.keeper.rpc.server import Connection
from holdfast.keeper.rpc.thread_pool import ThreadPool
from holdfast.keeper.service.keeper import TICK_S
from holdfast.keeper.slots.sessions import Trainers
from holdfast.tiers.memory.processes import start_time
from holdfast.tiers.wire import frames
from keeper.rig import Rig, eventually

MakeRig = Callable[..., Rig]


def served(client: KeeperClient, seconds: float = 0.0) -> bool:
    """Whether the keeper answers twenty times, and for so long."""
    until = time.monotonic() + seconds
    while client.answers(5.0) and time.monotonic() < until:
        time.sleep(0.02)
    return all(client.answers(5.0) for _ in range(20))


def test_a_keeper_does_not_end_under_a_rank_that_it_let_in(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    place, pid = rig.keeper(0), trainer.client.welcome.pid
    newcomer = KeeperClient.connect(place.socket, job=place.job, rank=1)  # the next job has two

    trainer.client.goodbye(finished=True)
    trainer.client.close()

    assert served(newcomer, 2 * TICK_S), "the keeper ended by its clock"
    newcomer.close()
    eventually(lambda: start_time(pid) is None)


def test_the_decision_to_end_and_the_greeting_of_a_rank_exclude_each_other() -> None:
    def client(rank: int) -> Any:
        hello = Hello(job="", role=RANK, rank=rank)
        return SimpleNamespace(pid=os.getpid(), ended=False, hello=None, greeted=hello, channel=None)

    trainers = Trainers(SimpleNamespace(lock=threading.RLock(), place=SimpleNamespace(node="n0")), lambda _: None)
    first, second = client(0), client(1)
    trainers.attach(first, first.greeted)
    assert not trainers.end(finished=True), "a rank is here"
    trainers.finish(first)
    assert not trainers.end(finished=False)
    assert trainers.end(finished=True)
    with pytest.raises(KeeperLost, match="on its way out"):
        trainers.attach(second, second.greeted)
    with pytest.raises(KeeperLost, match="on its way out"):
        trainers.require_open()


SPEAKS = """
import os, signal, socket, sys
held = socket.socket(socket.AF_UNIX)
held.connect(sys.argv[1])
child = os.fork()
if not child:
    signal.pause()
held.sendall(bytes.fromhex(sys.argv[2]))
print(child, flush=True)
signal.pause()
"""


@contextlib.contextmanager
def speaker(listener: socket.socket, said: bytes) -> Iterator[tuple[Connection, subprocess.Popen[str]]]:
    """A process that has sent this, as the keeper sees it; a child of it holds the other end too."""
    frame = struct.pack(">I", len(said)) + said
    command = [sys.executable, "-c", SPEAKS, listener.getsockname(), frame.hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    channel = frames.accept(listener)
    assert channel is not None
    connection = Connection(channel, 1, ThreadPool("test", 1))
    try:
        yield connection, process
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()
        connection.end()


def registry(gone: list[int]) -> Trainers:
    """Of a keeper that has no slots; who leaves is noted in `gone`."""
    state = SimpleNamespace(
        lock=threading.RLock(),
        slot_pool=SimpleNamespace(of_rank=lambda _: []),
        callbacks=SimpleNamespace(changed=lambda: None),
        place=SimpleNamespace(node="n0"),
    )
    return Trainers(state, lambda trainer: gone.append(trainer.rank))


def attach_and_kill(trainers: Trainers, connection: Connection, process: subprocess.Popen[str]) -> None:
    """It becomes rank 3 and dies; a child of it still holds the connection."""
    trainers.attach(connection, HELLO)
    process.kill()
    process.wait()


SAID, HELLO = encode(Cadence(reason="every step")), Hello(job="", role=RANK, rank=3)


def test_what_a_trainer_said_last_is_heard_before_it_counts_as_gone(tmp_path: Path) -> None:
    gone: list[int] = []
    trainers = registry(gone)
    with frames.listen(tmp_path / "s") as listener, speaker(listener, SAID) as (connection, process):
        attach_and_kill(trainers, connection, process)

        trainers.reap()

        assert not gone
        assert connection.channel.receive(timeout_s=5) == (SAID, [])
        with pytest.raises(KeeperLost, match="closed"):  # although the child holds it
            connection.channel.receive(timeout_s=5)


def test_a_dead_trainer_is_not_kept_by_a_thread_that_still_works_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.keeper.slots.sessions.LAST_WORDS_S", 0.0)
    gone: list[int] = []
    trainers = registry(gone)
    with frames.listen(tmp_path / "s") as listener, speaker(listener, SAID) as (connection, process):
        attach_and_kill(trainers, connection, process)
        trainers.reap()  # nobody reads
        assert gone == [3]


def test_next_process_connects_after_its_predecessors_messages(tmp_path: Path) -> None:
    trainers = registry([])
    successor: Any = SimpleNamespace(pid=os.getpid(), hello=None)
    here: list[object] = []

    def read(connection: Connection) -> None:
        """As the keeper's thread of that connection, which is slow: it begins when the connection is cut off."""
        hangs_up = select.poll()
        hangs_up.register(connection.channel._sock, 0)  # nothing but the end
        hangs_up.poll(20_000)
        here.append(trainers.connected[3].connection)
        with contextlib.suppress(KeeperLost):
            while True:
                here.append(connection.channel.receive(timeout_s=5))
        trainers.gone(connection)

    with frames.listen(tmp_path / "s") as listener, speaker(listener, SAID) as (connection, process):
        connection.hello = HELLO
        attach_and_kill(trainers, connection, process)
        reader = threading.Thread(target=read, args=(connection,))
        reader.start()

        trainers.reap()  # as the keeper's clock does
        trainers.attach(successor, HELLO)

        reader.join()
        assert here == [connection, (SAID, [])]
        assert trainers.connected[3].connection is successor


def test_processes_of_another_pid_namespace_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names all of them 0. Whoever holds the rank does so until its connection ends."""
    monkeypatch.setattr("holdfast.keeper.slots.sessions.PREDECESSOR_TIMEOUT_S", 0.0)
    gone: list[int] = []
    trainers = registry(gone)
    first, second = (
        SimpleNamespace(pid=0, hello=HELLO, greeted=HELLO, channel=SimpleNamespace(abort=lambda: None))
        for _ in range(2)
    )
    trainers.attach(first, HELLO)

    with pytest.raises(InUse, match="another pid namespace is rank 3"):
        trainers.attach(second, HELLO)
    trainers.reap()
    assert trainers.connected[3].connection is first
    assert not gone

    trainers.gone(first)
    trainers.attach(second, HELLO)
    assert trainers.connected[3].connection is second


def test_the_reply_of_a_thread_that_gets_its_turn_late_is_sent_before_the_end(tmp_path: Path) -> None:
    begun, never = threading.Event(), threading.Event()
    with frames.listen(tmp_path / "s") as listener:
        client = frames.connect(f"unix:{tmp_path}/s", timeout_s=5)
        channel = frames.accept(listener)
        assert channel is not None
        connection = Connection(channel, 1, ThreadPool("test", 1))
        connection.start()

        def answer() -> None:
            with connection.answering():
                begun.set()
                never.wait(1.5)  # as on a busy machine
                connection.send(Ok(id=7))

        thread = threading.Thread(target=answer)
        thread.start()
        assert begun.wait(20)
        connection.flush()
        connection.end()
        thread.join(20)
        assert client.receive(timeout_s=5)[0] == encode(Ok(id=7))
        client.close()


def test_who_comes_while_it_ends_is_turned_away_or_served(make_rig: MakeRig) -> None:
    for _ in range(4):
        rig = make_rig()
        (trainer,) = rig.start()
        place, pid = rig.keeper(0), trainer.client.welcome.pid
        trainer.client.goodbye(finished=True)
        try:
            newcomer = KeeperClient.connect(place.socket, job=place.job, rank=0)
        except KeeperLost:
            pass
        else:
            assert served(newcomer)
            newcomer.close()
        eventually(lambda pid=pid: start_time(pid) is None)


def test_a_rank_that_is_turned_away_finds_the_next_keeper(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    (trainer,) = rig.start()
    pid = trainer.client.welcome.pid
    connect = KeeperClient.connect

    def too_late(*args: object, **options: object) -> KeeperClient:
        """Between the look for a keeper and the greeting the last rank of the job before says goodbye."""
        monkeypatch.setattr(KeeperClient, "connect", connect)
        trainer.client.goodbye(finished=True)
        eventually(lambda: start_time(pid) is None)
        return connect(*args, **options)

    monkeypatch.setattr(KeeperClient, "connect", too_late)
    link = KeeperLink(rig.root, rig.config_of(0), rank=0, events=Events(), on_appointment=lambda _: None)
    client = link.open()
    assert client.welcome.pid != pid
    assert client.answers(5.0)
    rig.pids.add(client.welcome.pid)
    link.close(finished=True)
