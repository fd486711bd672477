"""What a loop changes of its modules on the way is so behind a restart too: frozen and thawed layers, modes, dropout."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.training_state import State
from state_kit import Saved, restore, save


class Life:
    """A model and its state, as a script makes them."""

    def __init__(self, began: Callable[[nn.Sequential], object] = lambda _: None, *, wrapped: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        began(self.model)
        given = nn.DataParallel(self.model) if wrapped else self.model
        self.objects = {"model": given, "optimizer": self.optimizer}
        self.state = State(self.objects, rank=0, world_size=1)
        self.state.trained()

    def step(self) -> None:
        self.model(torch.ones(3, 4)).sum().backward()
        self.optimizer.step()
        self.state.stepped(self.optimizer)
        self.optimizer.zero_grad()

    def saved(self) -> Saved:
        return save(self.state)

    def modes(self) -> object:
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        return trained, [each.training for each in self.model.modules()], self.model[1].p


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda model: model[0].requires_grad_(False),
    "evaluates": lambda model: model[2].eval(),
    "drops more": lambda model: setattr(model[1], "p", 0.4),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_loop_changed_stays_so(name: str, wrapped: bool) -> None:
    first = Life()
    first.step()
    CHANGES[name](first.model)
    first.step()
    second = Life(wrapped=wrapped)
    restore(second.state, first.saved())
    assert second.modes() == first.modes() != Life().modes()
    third = Life()
    restore(third.state, second.saved())
    assert third.modes() == first.modes()


def test_a_layer_that_is_thawed_stays_so() -> None:
    first = Life(CHANGES["frozen"])
    first.step()
    first.model.requires_grad_(True)
    second = Life(CHANGES["frozen"])
    restore(second.state, first.saved())
    assert second.modes() == first.modes() == Life().modes()


def test_an_evaluation_between_step_and_save_is_none_of_the_training() -> None:
    first = Life()
    first.step()
    first.model.eval()
    second = Life()
    restore(second.state, first.saved())
    assert second.modes() == Life().modes()


def test_a_run_that_changes_nothing_says_nothing() -> None:
    first = Life()
    first.step()
    assert not any("module_modes" in values for values in first.saved().decoded().values())


def test_a_script_that_begins_otherwise_has_decided_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    first = Life()
    first.step()
    CHANGES["frozen"](first.model)
    second = Life(lambda model: model[3].requires_grad_(False))
    before = second.modes()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
    assert second.modes() == before
    assert "parameters of model were frozen or thawed" in caplog.text


def test_dropout_that_the_script_begins_with_now_keeps_nothing_from_coming_back() -> None:
    first = Life()
    first.step()
    CHANGES["frozen"](first.model)
    second = Life(CHANGES["drops more"])
    restore(second.state, first.saved())
    assert not second.model[0].weight.requires_grad
    assert second.model[1].p == 0.4


def test_who_goes_back_in_one_process_goes_back_before_the_change() -> None:
    life = Life()
    life.step()
    saved = life.saved()
    CHANGES["frozen"](life.model)
    life.state = State(life.objects, rank=0, world_size=1, began=life.state.began)
    restore(life.state, saved)
    assert life.modes() == Life().modes()


def test_who_keeps_modes_by_himself_is_left_alone() -> None:
    class Keeps:
        holdfast_keeps_modes = True

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: object) -> None:
            pass

    first = Life()
    state = State({**first.objects, "kept": Keeps()}, rank=0, world_size=1)
    state.trained()
    CHANGES["frozen"](first.model)
    assert not any("module_modes" in values for values in save(state).decoded().values())
