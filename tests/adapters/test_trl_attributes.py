"""What trainers of TRL count in attributes comes back as it was, with a stand-in for the package."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict, deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.hf_parts import trl_attributes
from holdfast.adapters.hf_parts.trl_attributes import Attributes


class Base:
    """As `transformers.Trainer`: what its own methods use is kept by its own adapter."""

    def train(self) -> None:
        self.flos = 1


class Trainer(Base):
    """With attributes as TRL's trainers have them."""

    __module__ = "trl.trainer.grpo_trainer"

    def __init__(self, **arguments: Any) -> None:
        self.args = SimpleNamespace(**arguments)
        self.state = SimpleNamespace(global_step=0)
        self.temperature, self.flos, self.calls, self._last_loaded_step = 0.9, 0, 0, -1
        self._step, self._buffered_inputs = 0, None
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs: Any = {"prompt": deque(maxlen=3), "rewards": defaultdict(lambda: deque(maxlen=3))}
        self.entropy_coef, self._last_world_entropy, self._entropy_window_stats = 0.5, float("inf"), None

    def one_step(self) -> None:
        self._step += 1
        self._buffered_inputs = [{"ids": torch.arange(self._step), "sampling": None, "num": torch.tensor(3)}]
        self._metrics["train"]["reward"].append(0.25 * self._step)
        self._logs["prompt"].extend("ab")
        self._logs["rewards"]["vowels"].append(self._step)
        self.entropy_coef += 0.1
        self._entropy_window_stats = torch.tensor([1.0, self._step])
        self._last_loaded_step = self.flos = self.state.global_step = self._step


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transformers")
    module.Trainer = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_only_trainers_of_the_package_are_meant() -> None:
    mine = type("Mine", (Trainer,), {"__module__": "script"})
    assert [trl_attributes.is_of_trl(each) for each in (Trainer(), mine(), Base())] == [True, True, False]


def test_a_reference_that_moves_is_saved_and_one_that_stays_is_not() -> None:
    for moves in (True, False):
        trainer: Any = Trainer(sync_ref_model=moves)
        trainer.ref_model = object()
        assert trl_attributes.moving_reference(trainer) is (trainer.ref_model if moves else None)
    assert trl_attributes.moving_reference(Trainer()) is None


@pytest.mark.parametrize("adapts", [True, False])
def test_counts_figures_and_completions_come_back_in_containers_of_the_same_kind(adapts: bool) -> None:
    trainer = Trainer(use_adaptive_entropy=adapts)
    kept = Attributes(trainer)
    trainer.one_step()
    trainer.one_step()
    state = kept.state_dict()
    back = Trainer(use_adaptive_entropy=adapts)
    back._metrics["train"]["stale"].append(1.0)
    Attributes(back).load_state_dict(state)

    assert back._step == 2
    assert back._metrics == trainer._metrics
    assert back._logs == trainer._logs
    (row,) = back._buffered_inputs
    assert row["ids"].tolist() == [0, 1]
    assert row["sampling"] is None
    back.one_step()  # containers make what is missing, and forget what is too much, as before
    assert list(back._logs["prompt"]) == ["b", "a", "b"]
    back._metrics["train"]["new"].append(1.0)
    back._logs["rewards"]["other"].extend(range(5))
    assert list(back._logs["rewards"]["other"]) == [2, 3, 4]
    assert back._last_loaded_step == 3, "that of its own step: an engine that was started anew has no weights"
    assert (back.entropy_coef == pytest.approx(0.8)) is adapts, "else it is the argument of the script, and a step"


def test_what_changes_and_is_not_kept_is_told_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    kept = Attributes(trainer)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            trainer.one_step()
            trainer.calls += 1
            kept.state_dict()
    (said,) = caplog.messages
    # What a trainer does not adapt is an argument; here it changes all the same.
    assert (
        said == "Trainer changes its calls, entropy_coef, which holdfast does not keep: after a restart it begins anew"
    )
