"""Loaders that a hook draws are made again with the numbers of the first time. Nothing of Lightning is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.lightning.made_loaders import MadeLoaders


class Loop:
    """Makes its loaders once, or anew when they are due."""

    def __init__(self) -> None:
        self._combined_loader: Any = None
        self.due = False
        self.made = MadeLoaders(self, lambda: self.due)

    def set_up(self) -> float:
        self.made.set_up(self._make)
        return float(self._combined_loader.drawn)

    def _make(self) -> None:
        if self._combined_loader is None or self.due:
            self._combined_loader = SimpleNamespace(drawn=torch.rand(()))


@pytest.mark.parametrize("passes", [1, 2])
def test_loaders_are_drawn_as_the_first_time_whenever_a_restart_makes_them(passes: int) -> None:
    torch.manual_seed(1)
    first = Loop()
    drawn = first.set_up()
    for _ in range(1, passes):
        first.set_up()
    saved = first.made.state_dict()
    for _ in range(2):  # a restart of a restart too
        torch.manual_seed(2)
        before, again = torch.get_rng_state(), Loop()
        again.made.load_state_dict(saved)
        assert again.made.state_dict() == saved
        assert again.set_up() == drawn
        assert torch.equal(torch.get_rng_state(), before)
        saved = again.made.state_dict()


def test_loaders_that_are_due_are_drawn_anew() -> None:
    first = Loop()
    first.set_up()
    again = Loop()
    again.made.load_state_dict(first.made.state_dict())
    again.due = True
    torch.manual_seed(2)
    expected = float(torch.rand(()))
    torch.manual_seed(2)
    assert again.set_up() == expected
