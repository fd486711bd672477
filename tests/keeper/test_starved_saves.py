"""Which saves that wait for a slot end what is being sent from the slots of their rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.model import Decision, Version
from holdfast.core.versions.replication_lag import FIRST_PATIENCE_S, LEAST_PATIENCE_S, ReplicationLag
from holdfast.keeper.rpc.messages import Begin
from holdfast.keeper.service.save_requests import SaveRequests, _Waiting


@pytest.mark.parametrize(
    ("timeout_s", "comes_back", "starved"),
    [(600.0, False, [3]), (5.0, True, [3]), (0.05, False, [3]), (0.05, True, []), (0.0, True, [])],
    ids=["the last one", "patient", "asked for by the script", "a moment", "at once"],
)
def test_a_save_that_is_left_out_at_once_cuts_no_replica_off(
    timeout_s: float, comes_back: bool, starved: list[int]
) -> None:
    """With every step there is one; a replica over a slow line would never arrive."""
    parts: Any = SimpleNamespace(lock=threading.RLock())
    saving = SaveRequests(parts, parts, parts, parts)
    request = Begin(version=Version(1, 7), num_bytes=1, durable=False, timeout_s=timeout_s, comes_back=comes_back)
    trainer: Any = SimpleNamespace(rank=3)
    saving._waiting.append(_Waiting(trainer, request, time.monotonic() - min(timeout_s, LEAST_PATIENCE_S)))
    assert saving.starved() == starved


@pytest.mark.parametrize(("durable", "comes_back"), [(True, False), (True, True), (False, False)])
def test_a_last_save_waits_for_no_replica_that_moves_on_and_on(durable: bool, comes_back: bool) -> None:
    """A job that was told to end may have seconds, and then storage has something newer."""
    lag, now = ReplicationLag(), time.monotonic()
    lag.captured(now - 2 * FIRST_PATIENCE_S)
    lag.moved(now)
    nothing: Any = SimpleNamespace(begin=lambda *_: Decision(None, "none is free"))
    state: Any = SimpleNamespace(
        lock=threading.RLock(), guard=SimpleNamespace(lag=lag), need_ledger=lambda: nothing,
        slot_pool=SimpleNamespace(of_rank=lambda _: []),
    )  # fmt: skip
    failover: Any = SimpleNamespace(yield_slots=lambda _: False)
    saving = SaveRequests(state, nothing, nothing, failover)
    request = Begin(version=Version(1, 7), num_bytes=1, durable=durable, timeout_s=600.0, comes_back=comes_back)
    trainer: Any = SimpleNamespace(rank=3)
    assert not saving._try(_Waiting(trainer, request, now - LEAST_PATIENCE_S - 1.0))
    assert lag.lasts(now) is not (durable and not comes_back)
