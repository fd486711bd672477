"""A step under a `GradScaler` breaks off, and the script goes back in the same process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from holdfast.checkpoint.state.stateful import ScalerState
from kit.checkpointers import Make, Trainee


def _fails(*_: Any) -> None:
    raise ZeroDivisionError


def test_gradients_behind_a_restore_are_unscaled_though_the_step_before_broke_off(make: Make) -> None:
    """The scaler had seen that step's, and would take the next ones for those."""
    trainee = Trainee()
    checkpointer = make(trainee, model=trainee.model)
    checkpointer.restore()
    trainee.train()
    checkpointer.save(0, "durable").wait()
    trainee.train()
    expected = trainee.fingerprint()
    hook = trainee.optimizers[0].register_step_pre_hook(_fails)
    with suppress(ZeroDivisionError):
        trainee.train()
    hook.remove()
    assert checkpointer.restore() == 1
    for optimizer in trainee.optimizers:
        optimizer.zero_grad()
    trainee.train()
    assert trainee.fingerprint() == expected


@pytest.mark.parametrize("states", [None, (1,)])
def test_a_scaler_that_notes_nothing_of_optimizers_is_left_alone(states: Any) -> None:
    class Other(torch.amp.GradScaler):
        def __init__(self) -> None:
            super().__init__("cpu", init_scale=4.0)
            self._per_optimizer_states = states

    scaler = Other()
    state = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    ScalerState(scaler).load_state_dict(state)
    assert scaler.state_dict()["scale"] == 8.0
    assert scaler._per_optimizer_states is states
