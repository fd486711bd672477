"""How a case of the zoo is judged: twelve steps, an interruption, fresh objects, eight steps more."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.state.training_state import State
from state_kit import Saved, restore, same_bits, save

# Fresh objects, and a function that trains one step with them and returns the loss.
Make = Callable[[], tuple[dict[str, Any], Callable[[], torch.Tensor]]]

BEFORE, AFTER = 12, 8


def start(objects: dict[str, Any]) -> State:
    """What `Checkpointer.restore()` does with the objects of a new job: all is looked at, and encoded once."""
    state = State(objects, rank=0, world_size=1)
    state.trained()
    save(state)
    return state


def goes_on(make: Make) -> Saved:
    """Fails unless a job that is interrupted ends with the bits of one that is not; returns what was saved."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of some elements: threads only wait for each other
    try:
        return _goes_on(make)
    finally:
        torch.set_num_threads(threads)


def _goes_on(make: Make) -> Saved:
    _seed(7)
    objects, step = make()
    expected = [step() for _ in range(BEFORE + AFTER)]
    final = save(State(objects, rank=0, world_size=1))

    _seed(7)
    objects, step = make()
    state = start(objects)
    for number in range(BEFORE):
        assert torch.equal(step(), expected[number]), "looking at the objects changes training"
        state.gather()
    saved = save(state)

    _seed(99)  # the second process starts elsewhere
    objects, step = make()
    state = start(objects)
    restore(state, saved)
    for number in range(BEFORE, BEFORE + AFTER):
        assert torch.equal(step(), expected[number]), f"step {number} differs"
    same_bits(save(state), final)
    return saved


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator behind numpy.random.*
