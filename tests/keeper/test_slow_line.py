"""A line between nodes that is slower than steps: what is on its way arrives, and nobody is cut off where that helps nobody."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import LevelNotReached
from holdfast.core.model import Level, Topology, Version
from holdfast.core.versions.replication_lag import FIRST_PATIENCE_S
from holdfast.core.versions.slot_guard import Knowledge, SlotState, SlotView
from holdfast.keeper.rpc.messages import KEEPER, Hello
from holdfast.keeper.service.peer_requests import PIN, PeerRequests, _Transfer
from holdfast.keeper.slots.overwrite_guard import LATE, OverwriteGuard
from holdfast.keeper.slots.slot_pool import HeldSlot
from holdfast.tiers.wire import tcp
from keeper.rig import Rig, Trainer, save_all

OLDER, NEWER = Version(1, 1), Version(1, 2)


def saved(trainers: list[Trainer], step: int) -> None:
    """Every rank saves, and waits for a slot as long as the script would let it."""
    for trainer in trainers:
        try:
            slot = trainer.begin(step, timeout_s=1.0)
            trainer.client.copied(trainer.version(step), trainer.write(slot, step))
        except LevelNotReached:
            trainer.client.abandon(trainer.version(step), "no slot in time")


@pytest.mark.slow  # 25 s
def test_a_replica_that_takes_longer_than_steps_and_patience_arrives(make_rig: Callable[..., Rig]) -> None:
    """Saves that wait for its slot neither cut it off nor give it up, and it is said once."""
    rig = make_rig(num_nodes=2, own_bytes=3_600_000, replicate_bandwidth="200KB")
    trainers = rig.start()
    first, began = save_all(trainers, 0), time.monotonic()
    for step in itertools.count(1):
        saved(trainers, step)
        level, _ = trainers[0].client.announced.level(first)
        if level >= Level.REPLICATED:
            break
        assert time.monotonic() - began < 60
    took = time.monotonic() - began
    assert took > FIRST_PATIENCE_S + 2, "the line was not slow enough to prove anything"
    assert took < 30, "it was sent more than once"
    alarms = {alarm["key"]: alarm for alarm in rig.status(0)["alarms"]}
    assert set(alarms) == {LATE}
    assert alarms[LATE]["count"] == 1
    assert "MB/s" in alarms[LATE]["text"]


class Ledger:
    """A node that waits for second copies of everything, or of nothing."""

    topology = Topology(("a", "b"), (0, 1))
    knowledge = Knowledge(captured=NEWER)

    def __init__(self, *, awaits: bool) -> None:
        self.awaits_copies = lambda _: awaits
        self.asked: list[Version] = []

    def give_up_copies(self, version: Version) -> Any:
        self.asked.append(version)
        return SimpleNamespace(value=True, reason="")


class Line:
    """The connection of the node that pulls."""

    greeted = Hello(job="j", role=KEEPER, node=1)
    channel = SimpleNamespace(abort=lambda: None)


def sending(ledger: Ledger, version: Version) -> tuple[Any, _Transfer, OverwriteGuard]:
    """A keeper that sends a version from a slot of rank 0."""
    alarms: Any = SimpleNamespace(warn=lambda *_: None, is_raised=lambda _: False)
    guard = OverwriteGuard(lambda: ledger, alarms, lambda _: None)  # type: ignore[arg-type, return-value]
    state: Any = SimpleNamespace(lock=threading.RLock(), guard=guard, assembly=None, incarnation=1)
    state.unpin = lambda held, why: held.unpin(why)
    peers: Any = PeerRequests(state, *(None,) * 3)  # type: ignore[arg-type]
    line: Any = Line()
    slot: Any = SimpleNamespace(slot_id=1)
    held = HeldSlot(slot, 0, replica=False)
    held.state, held.version = SlotState.SEALED, version
    held.pins[PIN] += 1
    transfer = _Transfer({line: None}, [held], moved_s=time.monotonic())
    peers._transfers[line] = transfer
    return peers, transfer, guard


def test_a_save_cuts_off_what_would_free_its_slot_and_nothing_else() -> None:
    peers, transfer, _ = sending(Ledger(awaits=True), OLDER)
    peers.yield_slots([0])
    assert transfer.held, "the guard keeps the slot all the same"

    peers, transfer, _ = sending(Ledger(awaits=False), NEWER)
    peers.yield_slots([0])
    assert transfer.held, "the newest captured version"

    peers, transfer, _ = sending(Ledger(awaits=False), OLDER)
    peers.yield_slots([1])
    assert transfer.held, "another rank waits"
    peers.yield_slots([0])
    assert not transfer.held


def test_what_is_sent_is_given_up_for_who_gets_its_slot_alone() -> None:
    """A save that finds another slot leaves it alone, however long it takes."""
    ledger = Ledger(awaits=True)
    peers, transfer, guard = sending(ledger, OLDER)
    guard.lag.captured(time.monotonic() - 10 * FIRST_PATIENCE_S)
    (held,) = transfer.held
    assert guard.view(held) == SlotView(1, SlotState.SEALED, OLDER, 1)
    assert not ledger.asked
    peers.yield_slots([0])
    assert ledger.asked == [OLDER]
    assert not transfer.held


def test_it_gives_a_sign_of_what_it_sends_once_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, transfer, _ = sending(Ledger(awaits=True), OLDER)
    now, told = [1000.0], []
    monkeypatch.setattr("holdfast.keeper.service.peer_requests.time.monotonic", lambda: now[0])
    peers._state.callbacks = SimpleNamespace(report=lambda reports: told.append(reports.sending))
    peers.give_sign()
    assert not told, "nothing left yet"
    for seconds in (0.0, 0.5, 0.5, 9.0):
        now[0] += seconds
        transfer.sends(1 << 20, now[0]) if seconds < 9 else None
        peers.give_sign()
    assert told == [(OLDER,), (OLDER,)]


def test_what_the_system_takes_ahead_of_a_slow_line_is_little() -> None:
    """Else a block leaves a buffer of megabytes every few seconds, and a line that moves looks dead."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with tcp.dial(f"tcp:127.0.0.1:{listener.getsockname()[1]}", timeout_s=5) as sock:
            sock.setblocking(False)
            taken, block = 0, bytes(1 << 16)
            with contextlib.suppress(BlockingIOError):
                while taken <= 2 * tcp.UNSENT_BYTES:
                    taken += sock.send(block)
    assert taken <= 2 * tcp.UNSENT_BYTES
