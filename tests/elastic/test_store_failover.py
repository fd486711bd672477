"""A rendezvous that lost a launcher while it met is held again. Torch's own rendezvous, over a real store on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from holdfast.elastic.launch.rendezvous.standby_store import Dialler
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
