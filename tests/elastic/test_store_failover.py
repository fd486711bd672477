"""A rendezvous that lost a launcher while it met is held again. Torch's own rendezvous, over a real store on loopback."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, dynamic_rendezvous

import forked
from holdfast.elastic.launch.rendezvous.incarnation_rounds import Round
from holdfast.elastic.launch.rendezvous.standby_store import DIAL_S, Dialler
from holdfast.elastic.launch.rendezvous.store_failover import MovingRendezvous


@pytest.fixture
def alone() -> Iterator[MovingRendezvous]:
    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    params = RendezvousParameters("c10d", f"127.0.0.1:{port}", "moving", 1, 1, "127.0.0.1", is_host=True)
    made = MovingRendezvous(params)
    yield made
    made.shutdown()


def test_ranks_with_a_gap_are_not_believed(alone: MovingRendezvous, caplog: pytest.LogCaptureFixture) -> None:
    """So torch leaves them if a launcher's sign of life comes late just after the rendezvous was complete."""
    inner, met = alone._handler.next_rendezvous, []

    def without_rank_0() -> RendezvousInfo:
        met.append(inner())
        if len(met) < 3:
            participants = alone._handler._state_holder.state.participants
            participants.update(dict.fromkeys(participants, 1))
        return met[-1]

    alone._handler.next_rendezvous = without_rank_0
    assert alone.next_rendezvous() is met[2]
    assert caplog.text.count("it meets again") == 2


def test_no_event_is_made_up_that_nobody_hears(alone: MovingRendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name costs a look at the whole stack: two launchers without a processor to spare never met (five minutes, nice 10)."""
    asked: list[str] = []
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: asked.append("name") or "name")
    alone.next_rendezvous()
    alone._handler._keep_alive()
    assert asked == []


def test_a_word_that_never_comes_is_not_waited_for_for_ever(alone: MovingRendezvous) -> None:
    assert alone.next_rendezvous().store.timeout.total_seconds() <= 20.0


def test_a_launcher_at_an_address_of_ipv6_keeps_a_store_that_others_reach() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    port = TCPStore("::1", 0, is_master=True, wait_for_workers=False).port
    params = RendezvousParameters("c10d", f"[::1]:{port}", "moving", 1, 1, "::1", is_host=True)
    made = MovingRendezvous(params)
    try:
        found = Dialler().ask([made._standby.address])
        assert found.keys() == {made._standby.address}
        assert made._standby.address.startswith("[::1]:")
        assert found[made._standby.address][0].uses == f"[::1]:{port}"
    finally:
        made.shutdown()


def test_a_launcher_that_is_proven_gone_is_dropped_and_its_replacement_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the dead one until its signs of life have stayed away for three minutes, as set here."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port

    def launcher(place: int) -> MovingRendezvous:
        conf = {"is_host": place == 1, "keep_alive_interval": 60, "keep_alive_max_attempt": 3}
        return MovingRendezvous(
            RendezvousParameters("c10d", f"127.0.0.1:{port}", "dropped", 2, 2, f"127.0.0.{place}", **conf)
        )

    first, dead, third = made = [launcher(1), launcher(2), launcher(3)]
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda one: one.next_rendezvous(), (first, dead)))
        assert [info.rank for info in met] == [0, 1]
        joins = pool.submit(third.next_rendezvous)
        first.drop(1)
        again = first.next_rendezvous()
        assert (again.rank, again.world_size) == (0, 2)
        assert joins.result(timeout=60).rank == 1
        first.drop(5)  # nobody has that rank
        assert len(first._handler._state_holder.state.participants) == 2
    for one in made:
        one.leave()
    first.shutdown()


def test_proofs_of_a_meeting_that_is_over_say_nothing_of_the_next(alone: MovingRendezvous) -> None:
    """Where the job meets next another launcher may have the rank of the one that is gone."""
    alone.next_rendezvous()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        alone.links.lead_to({1: f"127.0.0.1:{listener.getsockname()[1]}"})
        listener.accept()[0].close()
        assert alone.links.gone() == {}
        assert len(alone.links.filenos()) == 1
    alone.lost(ConnectionError("the store is gone"))
    assert alone.links.filenos() == []
    assert alone.links.gone() == {}


def test_a_launcher_that_leaves_takes_its_signs_of_life_with_it(alone: MovingRendezvous) -> None:
    """Torch leaves that thread to the end of Python, which aborts the process if it is in a call of the store then."""
    alone.next_rendezvous()
    signs = [thread for thread in threading.enumerate() if thread.name.startswith("RendezvousKeepAlive")]
    assert signs
    alone.leave()
    assert not [thread for thread in signs if thread.is_alive()]


def test_launchers_know_each_other_before_a_worker_starts() -> None:
    """The host of their store may die in the next moment, and who knows nobody opens a store of its own then."""
    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    endpoint = f"127.0.0.1:{port}"
    both = [
        MovingRendezvous(RendezvousParameters("c10d", endpoint, "both", 2, 2, "127.0.0.1", is_host=not node))
        for node in range(2)
    ]

    def meet(launcher: MovingRendezvous) -> None:
        info = launcher.next_rendezvous()
        Round(info.store, rank=info.rank, size=2, address="here").open(0, launcher.apart, launcher.introduce)
        launcher.learn()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, both))
    known = [launcher._members for launcher in both]
    for launcher in both:
        launcher.shutdown()
    assert set(known[0]) == {0, 1}
    assert known[0] == known[1]


LEAVES = """
import atexit, socket
from holdfast.elastic.launch import run_command
from holdfast.elastic.launch.rendezvous.standby_store import Dialler, any_calls
listener = socket.create_server(("127.0.0.1", 0))
atexit.register(print, "exit handlers")
print(Dialler().ask([f"127.0.0.1:{listener.getsockname()[1]}"]), any_calls())
run_command.leave(3)
"""


def test_a_launcher_ends_with_its_exit_code_while_a_store_says_nothing() -> None:
    done = forked.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split("\n")) == (3, ["{} True", "exit handlers", ""]), done.stderr[-2000:]


def test_a_store_that_takes_longer_than_one_question_answers_the_next_one() -> None:
    """As on a busy machine. Else launchers that lost their store find nobody, and each opens one of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(8) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        pool.submit(serve_slowly, listener, store.port, pool)
        dialler = Dialler()
        assert dialler.ask([address]) == {}
        assert dialler.under_way() == {address}
        deadline = time.monotonic() + 60.0
        answered = False  # the store itself is let go of at once, or what passes its words on would not end
        while not answered and time.monotonic() < deadline:
            answered = address in dialler.ask([address])
        assert answered
        listener.shutdown(socket.SHUT_RDWR)


def serve_slowly(listener: socket.socket, port: int, pool: ThreadPoolExecutor) -> None:
    """Pass on what clients say to the store, so late that a question is over; and what it answers."""
    while True:
        try:
            link = listener.accept()[0]
        except OSError:
            return  # the test is over
        behind = socket.create_connection(("127.0.0.1", port))
        back = behind.dup(), link.dup()  # before anything is passed on: a client that only knocks ends at once
        pool.submit(pass_on, link, behind, DIAL_S + 0.5)
        pool.submit(pass_on, *back, 0.0)


def pass_on(source: socket.socket, target: socket.socket, late_s: float) -> None:
    with source, target, suppress(OSError):
        while data := source.recv(1 << 16):
            time.sleep(late_s)
            late_s = 0.0
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
