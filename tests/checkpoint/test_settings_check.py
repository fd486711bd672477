"""A restart that leaves parameters frozen, modes and dropout otherwise than the run had them is told by name; nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.training_state import State
from state_kit import Saved, restore, save


class Life:
    """A model of two layers with an optimizer each, and their state, as a script makes them."""

    def __init__(self, began: Callable[[nn.Sequential], object] = lambda _: None, *, wrapped: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in self.model]
        began(self.model)
        given = nn.DataParallel(self.model) if wrapped else self.model
        self.objects = {"model": given, "optimizer": self.optimizers}
        self.look()

    def look(self, began: State | None = None) -> None:
        self.state = State(self.objects, rank=0, world_size=1, began=began and began.began)
        self.state.trained()

    def step(self) -> None:
        self.model(torch.ones(3, 4)).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            self.state.stepped(optimizer)
            optimizer.zero_grad()

    def saved(self) -> Saved:
        return save(self.state)


def thawed(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def ran(began: Callable[[nn.Sequential], object], changed: Callable[[nn.Sequential], object]) -> Life:
    """A life that changes something between its two steps."""
    life = Life(began)
    life.step()
    changed(life.model)
    life.step()
    return life


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("began", "changed", "is_now"), [(frozen, thawed, "frozen"), (thawed, frozen, "trained")])
def test_what_a_restart_does_not_do_again_is_told_by_name(
    began: Callable[[nn.Sequential], object],
    changed: Callable[[nn.Sequential], object],
    is_now: str,
    wrapped: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = ran(began, changed).saved()
    second = Life(began, wrapped=wrapped)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, saved)
        modes = [p.requires_grad for p in second.model.parameters()]
        assert not caplog.records
        second.step()
        second.step()
    assert len(caplog.records) == 1
    assert "model.0.bias, model.0.weight" in caplog.text
    assert f"{is_now} since the restart" in caplog.text
    assert [p.requires_grad for p in second.model.parameters()] == modes, "nothing is changed"


def test_a_third_life_is_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    """Its version was saved behind the restart, before the optimizer of what is frozen made a step."""
    first = ran(frozen, thawed)
    second = Life(frozen)
    restore(second.state, first.saved())
    second.state.stepped(second.optimizers[1])
    third = Life(frozen)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(third.state, second.saved())
        third.step()
    assert "model.0.weight" in caplog.text


def test_who_says_it_by_the_number_of_the_step_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    saved = ran(frozen, thawed).saved()
    second = Life(frozen)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, saved)
        thawed(second.model)
        second.step()
    assert not caplog.records


def test_a_script_that_begins_as_the_version_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    saved = ran(frozen, thawed).saved()
    second = Life(thawed)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, saved)
        second.step()
        assert save(second.state)
    assert not caplog.records


def test_what_is_frozen_while_another_learns_counts_as_at_its_own_step(caplog: pytest.LogCaptureFixture) -> None:
    """As with the two models of a GAN: one is frozen at the save, and learns again before its own next step."""

    def turn(life: Life) -> None:
        for layer, optimizer in zip(life.model, life.optimizers, strict=True):
            life.model.requires_grad_(False)
            layer.requires_grad_(True)
            life.model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            life.state.stepped(optimizer)
            optimizer.zero_grad()

    first = Life()
    turn(first)
    saved = first.saved()
    assert not any("frozen_or_thawed" in values for values in saved.decoded().values())
    second = Life()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, saved)
        turn(second)
    assert not caplog.records


def test_who_goes_back_in_one_process_is_told_what_was_thawed_since(caplog: pytest.LogCaptureFixture) -> None:
    life = Life(frozen)
    life.step()
    saved = life.saved()
    thawed(life.model)
    life.look(life.state)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(life.state, saved)
        life.step()
    assert "trained since the restart" in caplog.text


def test_a_version_without_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """As of a run that changed nothing, or of an older release: the script may begin otherwise."""
    first = Life(frozen)
    first.step()
    second = Life()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        second.step()
    assert not caplog.records


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_two_halves_that_take_turns_by_the_number_of_the_step_are_told_nothing(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(life: Life, begin: int, end: int) -> None:
        for number in range(begin, end):
            life.model[0].requires_grad_(number % 2 == 0)
            life.model[1].requires_grad_(number % 2 == 1)
            life.step()

    first = Life()
    train(first, 0, steps + 1)
    second = Life()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        train(second, steps + 1, steps + 2)
        third = Life()
        restore(third.state, second.saved())
        train(third, steps + 2, steps + 3)
    assert not caplog.records


class DropoutLife(Life):
    """A life whose model has a dropout and a running mean between its layers."""

    def __init__(self, *, wrapped: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]
        self.objects = {"model": nn.DataParallel(self.model) if wrapped else self.model, "optimizer": self.optimizers}
        self.look()


def evaluated(model: nn.Sequential) -> None:
    model[2].eval()


def dropping_less(model: nn.Sequential) -> None:
    model[1].p = 0.1


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("changed", "name", "was", "is_now"),
    [
        (evaluated, "model.2", "in evaluation mode", "in training mode"),
        (dropping_less, "model.1.p", "0.1", "0.5"),
        (nn.Sequential.eval, "model, model.0, model.1, model.2, model.3", "in evaluation mode", "in training mode"),
    ],
)
def test_a_mode_that_a_restart_does_not_set_again_is_told_by_name(
    changed: Callable[[nn.Sequential], object],
    name: str,
    was: str,
    is_now: str,
    wrapped: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = DropoutLife()
    first.step()
    changed(first.model)
    first.step()
    second = DropoutLife(wrapped=wrapped)
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        assert not caplog.records
        second.step()
        second.step()
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        f"{name}: {was} in the run that saved this version, {is_now} since the restart"
    ]
    assert second.model.training, "nothing is changed"
    assert second.model[1].p == 0.5


@pytest.mark.parametrize("again", [True, False])
def test_an_evaluation_between_steps_is_told_nothing(again: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Saved within an evaluation, restored before one or within one."""
    first = DropoutLife()
    first.step()
    first.model.eval()
    second = DropoutLife()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        if again:
            second.model.eval()
            second.model.train()
        second.step()
    assert not caplog.records


def test_modes_that_are_set_by_the_number_of_the_step_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def train(life: DropoutLife, begin: int, end: int) -> None:
        for number in range(begin, end):
            life.model.train()
            life.model[2].train(number < 2)
            life.model[1].p = 0.1 * number
            life.step()

    first = DropoutLife()
    train(first, 0, 4)
    second = DropoutLife()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        train(second, 4, 6)
    assert not caplog.records


@pytest.mark.parametrize("kind", [torch.tensor, np.float32])
def test_a_rate_of_another_kind_spoils_no_version(
    kind: Callable[[float], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It is learned, or computed: no version can have the tensor, and none is given up for it."""
    first = DropoutLife()
    first.step()
    first.model[1].p = kind(0.25)
    first.step()
    saved = first.saved()
    second = DropoutLife()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, saved)
        second.model[1].p = kind(0.25)
        second.step()
        assert not caplog.records
        third = DropoutLife()
        restore(third.state, saved)
        third.step()
    assert "model.1.p: " in caplog.text
    assert "in the run that saved this version, 0.5 since the restart" in caplog.text


def test_a_setting_that_may_be_due_to_change_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """The script says it at every step by the number, and the version is of the last step before it changes."""
    first = Life()
    frozen(first.model)
    first.step()
    second = Life()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        thawed(second.model)
        second.step()
    assert "unless this changes at this very step" in caplog.text


def test_halves_of_one_model_that_take_turns_in_evaluation_mode_are_told_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a GAN: each optimizer finds the same at each of its steps, and the other one something else."""

    def turn(life: Life) -> None:
        for layer, optimizer in zip(life.model, life.optimizers, strict=True):
            for each in life.model:
                each.train(each is layer)
            life.model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            life.state.stepped(optimizer)
            optimizer.zero_grad()

    first = Life()
    for _ in range(2):
        turn(first)
    second = Life()
    with caplog.at_level(logging.WARNING, "holdfast"):
        restore(second.state, first.saved())
        turn(second)
        turn(second)
    assert not caplog.records
