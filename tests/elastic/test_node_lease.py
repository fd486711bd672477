"""A node's name in a real store: one launcher has it, and who was silent for too long has lost it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore

from holdfast.base.errors import InUse
from holdfast.core.elastic.node_lease import Claim
from holdfast.elastic.launch.agent import Agent
from holdfast.elastic.launch.base_agent import BaseAgent
from holdfast.elastic.launch.rendezvous import node_lease
from holdfast.elastic.launch.rendezvous.node_lease import BEAT_S, Identity
from holdfast.elastic.launch.rendezvous_agent import RendezvousAgent


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def claimed(store: TCPStore, *, guard_s: float = 30.0) -> Identity:
    one = Identity(store, "node1", guard_s=guard_s)
    one.claim()
    return one


def test_a_second_launcher_is_refused_while_the_first_lives(store: TCPStore) -> None:
    first, stop = claimed(store), threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            first._beat_at = 0.0
            assert first.holds(time.monotonic())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(InUse, match="has the name and lives"):
            claimed(store)
    finally:
        stop.set()
        thread.join()
    assert first.holds(time.monotonic() + 10)


def test_a_silent_one_is_waited_for_and_then_replaced_for_good(store: TCPStore) -> None:
    first, began = claimed(store), time.monotonic()
    second = claimed(store, guard_s=0.6)
    assert time.monotonic() - began >= 0.6
    assert not first.holds(time.monotonic() + 10)
    with pytest.raises(InUse, match="took its place"):
        first.claim()
    first.leave()
    assert second.holds(time.monotonic() + 10)


class Clock:
    """Time that passes while somebody sleeps or waits for an answer, and what happens then."""

    def __init__(self, then: Callable[[float], None]) -> None:
        self.now, self._then = 100.0, then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then(self.now)


def lives(store: TCPStore, since: float) -> Callable[[float], None]:
    """A launcher elsewhere that renews its claim every second, from a moment on."""
    claim = Claim("elsewhere", machine="elsewhere", pid=7)

    def beat(now: float) -> None:
        if now >= since:
            store.set("holdfast.nodes/node1", json.dumps(asdict(replace(claim, beat=int(now)))))

    return beat


def test_who_took_the_place_of_a_silent_one_is_not_replaced_at_once(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two wait for the name of a dead one; the second comes a moment later."""
    store.set("holdfast.nodes/node1", json.dumps(asdict(Claim("dead", machine="elsewhere", pid=6))))
    monkeypatch.setattr(node_lease, "time", Clock(lives(store, 129.95)))
    with pytest.raises(InUse, match="process 7 has the name and lives"):
        claimed(store, guard_s=29.9)


def test_an_answer_that_comes_late_proves_no_silence(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = lives(store, 0.0)
    beat(100.0)
    clock, real, late = Clock(beat), Identity._read, [40.0]

    def read(self: Identity) -> tuple[str, Claim | None]:
        found = real(self)
        clock.now += late.pop() if late else 0.0
        return found

    monkeypatch.setattr(node_lease, "time", clock)
    monkeypatch.setattr(Identity, "_read", read)
    with pytest.raises(InUse, match="process 7 has the name and lives"):
        claimed(store)


def test_who_left_or_is_proven_gone_is_not_waited_for(store: TCPStore) -> None:
    first, began = claimed(store), time.monotonic()
    first.leave()
    second = claimed(store)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead = replace(second._mine, nonce="of another", pid=ended.pid)
    store.set("holdfast.nodes/node1", json.dumps(asdict(dead)))
    claimed(store)
    assert time.monotonic() - began < 5


def test_a_launcher_that_was_replaced_ends_its_workers_and_does_not_begin_again() -> None:
    signals: list[int] = []
    agent: Any = object.__new__(Agent)
    agent._program, agent._round, agent._meeting, agent._remaining_restarts = object(), object(), None, 5
    agent._wait = lambda: None
    agent._workers = SimpleNamespace(worker_slots={0: SimpleNamespace(close=signals.append)})
    agent._identity = SimpleNamespace(holds=lambda _: False)
    agent._rules, agent._ends_by = SimpleNamespace(name="node1"), 0
    with pytest.raises(InUse, match="another launcher took the place of this one"):  # the job, which is open, goes on
        agent._monitor_workers(None)
    assert signals == [signal.SIGKILL]


def test_a_name_that_is_taken_again_is_held(store: TCPStore) -> None:
    """All workers are restarted: the launcher meets the others anew, and is the node as before."""
    first = claimed(store)
    first.leave()
    first.claim()
    known = json.loads(store.get("holdfast.nodes/node1"))
    assert not known["left"], "a second launcher of the name would be let in at once"
    assert first.holds(time.monotonic() + 10)
    assert not json.loads(store.get("holdfast.nodes/node1"))["left"]


def left_behind(store: TCPStore, **facts: object) -> None:
    """Somebody else's claim stands under the name, and nobody renews it."""
    mine = Identity(store, "node1", guard_s=30.0)._mine
    store.set("holdfast.nodes/node1", json.dumps(asdict(replace(mine, nonce="of another", **facts))))


def test_a_process_number_that_was_given_away_is_another_process(store: TCPStore) -> None:
    left_behind(store, pid=os.getpid(), started=1)
    began = time.monotonic()
    claimed(store)
    assert time.monotonic() - began < 5


def test_what_runs_on_another_machine_is_not_proven_gone_here(store: TCPStore) -> None:
    """A process that has its number there may live; here that number is nobody's."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left_behind(store, pid=ended.pid, machine="another one")
    began = time.monotonic()
    claimed(store, guard_s=0.6)
    assert time.monotonic() - began >= 0.6


def test_a_launcher_that_waits_in_a_meeting_keeps_its_name(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement of another node may take minutes to come, and nobody monitors workers meanwhile."""
    over, agent = threading.Event(), cast(RendezvousAgent, object.__new__(RendezvousAgent))
    agent._meeting, agent._identity = None, Identity(store, "node1", guard_s=30.0)

    def meet(self: RendezvousAgent, _: object) -> None:
        assert self._identity is not None
        self._identity.claim()
        over.wait(30)

    monkeypatch.setattr(BaseAgent, "_initialize_workers", meet)
    waiting = threading.Thread(target=agent._initialize_workers, args=(None,))
    waiting.start()
    try:
        while not store.check(["holdfast.nodes/node1"]):
            time.sleep(0.01)
        with pytest.raises(InUse, match="has the name and lives"):
            claimed(store, guard_s=4 * BEAT_S)
    finally:
        over.set()
        waiting.join()
    assert agent._identity.holds(time.monotonic() + 10)
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast claim"]
