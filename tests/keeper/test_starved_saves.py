"""Which saves that wait for a slot end what is being sent from the slots of their rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.model import Version
from holdfast.keeper.rpc.messages import Begin
from holdfast.keeper.service.save_requests import SaveRequests, _Waiting


@pytest.mark.parametrize(
    ("timeout_s", "comes_back", "starved"),
    [(5.0, True, [3]), (0.05, False, [3]), (0.05, True, []), (0.0, True, [])],
    ids=["patient", "asked for by the script", "a moment", "at once"],
)
def test_a_save_that_is_left_out_at_once_cuts_no_replica_off(
    timeout_s: float, comes_back: bool, starved: list[int]
) -> None:
    """With every step there is one; a replica over a slow line would never arrive."""
    parts: Any = SimpleNamespace(lock=threading.RLock())
    saving = SaveRequests(parts, parts, parts, parts)
    request = Begin(version=Version(1, 7), num_bytes=1, durable=False, timeout_s=timeout_s, comes_back=comes_back)
    trainer: Any = SimpleNamespace(rank=3)
    saving._waiting.append(_Waiting(trainer, request, time.monotonic() - timeout_s))
    assert saving.starved() == starved
