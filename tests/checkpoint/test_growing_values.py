"""Carried values whose size differs from save to save: each version has a layout of its own, and is captured as any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.keeper.rpc.client import KeeperClient, Slot
from keeper.rig import eventually
from kit.checkpointers import Make, kill_keeper

NUM_STEPS = 200
# Longer than any copy or seal here takes.
PATIENCE_S = 10.0


@pytest.mark.parametrize(
    "rows",
    [lambda n: n, lambda n: NUM_STEPS - n, lambda n: n if n % 3 else 0],
    ids=["it grows", "it shrinks", "it is emptied at times"],
)
def test_no_save_of_a_value_that_changes_its_size_is_left_out(make: Make, rows: Callable[[int], int]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = make(
        model=model, optimizer=optimizer, every="1", begin_timeout_s=PATIENCE_S, fence_timeout_s=2 * PATIENCE_S
    )
    checkpointer.restore()
    losses = checkpointer.carry("losses", torch.zeros(0, 64))
    handles: list[holdfast.SaveHandle] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses = loss.detach().expand(rows(step + 1), 64).clone()
        handle = checkpointer.step(step, losses=losses)
        assert handle is not None
        handles.append(handle)
        assert not [reason for before in handles[-3:] if (reason := before.given_up)]
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < PATIENCE_S
    assert checkpointer.events.counters().get("saves_left_out", 0) == 0
    again = make(model=model, optimizer=optimizer)
    assert again.restore() == NUM_STEPS
    assert torch.equal(again.carry("losses", torch.zeros(0, 64)), losses)


def test_slots_of_a_keeper_that_died_become_free_where_each_version_has_its_own_layout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keeper finds versions in both slots, and hears from nobody but the rank what they are made of."""
    checkpointer = make(every="0", begin_timeout_s=PATIENCE_S)
    checkpointer.restore()
    checkpointer.carry("losses", torch.zeros(0, 64))
    for step in range(4):
        checkpointer.step(step, losses=torch.ones(step + 1, 64))
        checkpointer.save(step).wait("captured", PATIENCE_S)
    begin = KeeperClient.begin

    def killed(client: KeeperClient, *args: Any, **options: Any) -> Slot:  # it has the next layout by then
        kill_keeper(checkpointer)
        return begin(client, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(KeeperClient, "begin", killed)
        checkpointer.step(4, losses=torch.ones(5, 64))
        assert "the keeper is lost" in checkpointer.save(4).given_up
    eventually(lambda: checkpointer._run.link.client is not None and checkpointer._run.link.client.alive)  # type: ignore[union-attr]
    checkpointer.step(5, losses=torch.ones(6, 64))
    checkpointer.save(5).wait("captured", 2 * PATIENCE_S)
