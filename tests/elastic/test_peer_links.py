"""Connections that end with a process tell that it is gone; those of one that lives, however slow, tell nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from holdfast.elastic.launch.rendezvous.peer_links import PeerLinks
from holdfast.elastic.processes.forkserver import readable
from launch_kit import free_port, wait_for

# Listens as a launcher's store does, and ends connections on request.
LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listener.accept()[0])
    print("accepted", flush=True)
    if sys.argv[1:]:
        kept.pop().close()
        sys.argv.clear()
"""
Listen = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """A process that listens, and its address."""
    made: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen([sys.executable, "-c", LISTENER, *flags], stdout=subprocess.PIPE, text=True)
        made.append(child)
        assert child.stdout is not None
        return child, f"127.0.0.1:{int(child.stdout.readline())}"

    yield start
    for child in made:
        child.kill()
        with child:
            pass


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    made = PeerLinks()
    yield made
    made.close()


def stand(links: PeerLinks, number: int) -> None:
    wait_for(lambda: not links.gone() and len(links.filenos()) == number, f"{number} connections", str)


def test_a_killed_launcher_is_gone_at_once_and_a_frozen_one_is_not(links: PeerLinks, listen: Listen) -> None:
    (killed, one), (frozen, other) = listen(), listen()
    links.lead_to({1: one, 2: other})
    stand(links, 2)
    os.kill(frozen.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
    assert readable(links.filenos(), 0.0) == []
    killed.kill()
    assert readable(links.filenos(), 60.0), "the death of a process ends the wait"
    wait_for(lambda: 1 in links.gone(), "the proof", str)
    assert links.gone().keys() == {1}
    assert len(links.filenos()) == 1, "what is known is not waited for again"


def test_a_connection_that_ends_between_two_that_live_proves_nothing(links: PeerLinks, listen: Listen) -> None:
    child, address = listen("close the first")
    links.lead_to({1: address})
    wait_for(lambda: not links.gone() and links.filenos(), "the first connection", str)
    assert readable(links.filenos(), 60.0), "the other end closes it"
    stand(links, 1)
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(2)] == ["accepted\n"] * 2
    assert readable(links.filenos(), 0.0) == []
    assert links.gone() == {}
    child.kill()
    wait_for(lambda: 1 in links.gone(), "the proof", str)


def test_an_address_that_never_answered_proves_nothing(links: PeerLinks) -> None:
    links.lead_to({1: f"127.0.0.1:{free_port()}", 2: "no-such-host.invalid:1", 3: "nonsense"})
    for _ in range(3):
        assert links.gone() == {}
    assert links.filenos() == []


def test_links_of_a_round_that_is_over_are_closed(links: PeerLinks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links.lead_to({1: f"127.0.0.1:{listener.getsockname()[1]}"})
        theirs, _ = listener.accept()
        links.lead_to({})
        theirs.settimeout(60)
        assert theirs.recv(1) == b""
        theirs.close()
    assert links.gone() == {}
