"""A rendezvous that lost a launcher while it met is held again. Torch's own rendezvous, over a real store on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from holdfast.train.moving import MovingRendezvous


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
