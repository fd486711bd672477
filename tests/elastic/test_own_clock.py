"""Whose sign of life stays away is judged by each launcher's own clock, and by what it could see."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from holdfast.elastic.launch.rendezvous import own_clock
from holdfast.elastic.launch.rendezvous.own_clock import judge_by_own_clock


class Looks:
    """A launcher that looks at a round in which it and another one are, which said a sign `skew_s` seconds off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, skew_s: float = 0.0) -> None:
        self.now_s, self.skew = 1000.0, timedelta(seconds=skew_s)
        monkeypatch.setattr(own_clock.time, "monotonic", lambda: self.now_s)
        backend = C10dRendezvousBackend(HashStore(), "job")
        self.handler = DynamicRendezvousHandler.from_backend(
            "job", HashStore(), backend, 2, 2, keep_alive_interval=1, keep_alive_max_attempt=3
        )
        judge_by_own_clock(self.handler)
        self.other = DynamicRendezvousHandler._node_desc_generator.generate("other")
        state = self.state
        state.complete, state.participants = True, {self.handler._this_node: 0, self.other: 1}
        self.signs()

    @property
    def state(self) -> Any:
        return self.handler._state_holder.state

    def signs(self) -> None:
        now = datetime.now(timezone.utc)
        self.state.last_heartbeats = {self.handler._this_node: now, self.other: now + self.skew}

    def after(self, seconds: float) -> bool:
        """Whether the other one is still in it, at a look so much later."""
        self.now_s += seconds
        self.handler._state_holder._sanitize()  # type: ignore[attr-defined]
        return self.other in self.state.participants


@pytest.mark.parametrize("skew_s", [-3600.0, -5.0, 5.0, 3600.0])
def test_clocks_that_differ_drop_nobody(monkeypatch: pytest.MonkeyPatch, skew_s: float) -> None:
    looks = Looks(monkeypatch, skew_s=skew_s)
    for _ in range(20):
        looks.signs()
        assert looks.after(1.0)


def test_a_launcher_without_a_sign_is_dropped_when_it_was_silent_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, skew_s=3600.0)
    assert [looks.after(1.0) for _ in range(6)] == [True, True, True, True, False, False]
    assert looks.handler._this_node in looks.state.participants, "it keeps itself"


def test_a_time_in_which_nobody_could_look_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the store stood still, or this launcher: the signs are as old as that, and come anew."""
    looks = Looks(monkeypatch)
    assert looks.after(1.0)
    assert looks.after(60.0)
    looks.signs()
    assert all(looks.after(1.0) for _ in range(3))
