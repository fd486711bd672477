"""A zoo of modules: each is kept, so that training goes on bit for bit, or refused by name before training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from state_kit import restore, save
from zoo_kit import Make, goes_on, start
from zoo_modules import KEPT, REFUSED, Counting, Saves, body, with_hook


def training(make_model: Callable[[], nn.Module]) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"model": model, "optimizer": optimizer}, step

    return make


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_a_module_goes_on_bit_for_bit(kind: str) -> None:
    goes_on(training(KEPT[kind]))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_module_is_refused_by_name_before_training(kind: str) -> None:
    make_model, words = REFUSED[kind]
    model = make_model()
    trained = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
    with pytest.raises(UsageError, match=words) as caught:
        start({"model": model, "optimizer": torch.optim.SGD(trained, lr=0.1)})
    assert caught.value.remedy


def test_a_buffer_that_is_not_persistent_and_changes_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    objects, step = training(lambda: Counting(torch.ones(2), persistent=False))()
    state = start(objects)
    for _ in range(6):
        step()
        state.gather()
    assert caplog.text.count("is in no version") == 1
    assert "model.extra" in caplog.text


def test_what_the_module_does_not_take_back_is_refused_by_name() -> None:
    class Forgets(Saves):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict.pop(f"{prefix}calls")

    model = Forgets()
    model.calls = 5
    saved = save(start({"model": model}))
    with pytest.raises(MismatchError, match=r"model.calls \(load_state_dict\(\) of the module did not take it back\)"):
        restore(start({"model": Forgets()}), saved)
    record = restore(start({"model": Forgets()}), saved, strict=False)
    assert len(record.misfit) == 1


def test_modules_are_told_the_version_of_their_state() -> None:
    """A load hook asks the metadata of a state for it, and treats a state without as an old one."""
    versions: list[Any] = []
    model = with_hook(way_back=True)
    model._version = 3
    model._register_load_state_dict_pre_hook(lambda *said: versions.append(said[2].get("version")))
    restore(start({"model": model}), save(start({"model": model})))
    assert versions == [3]


def test_an_expanded_buffer_stays_one_element() -> None:
    def make(value: float) -> nn.Module:
        model = body()
        model.register_buffer("row", torch.tensor([[value], [value + 1]]).expand(2, 3))
        return model

    there, here = make(1.0), make(7.0)
    row = here.row
    restore(start({"model": here}), save(start({"model": there})))
    assert here.row is row
    assert row.stride() == (1, 0)
    assert row.tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_dict_of_tensors_may_hold_expanded_ones() -> None:
    content = {"mask": torch.zeros(1).expand(4)}
    restore(start({"content": content}), save(start({"content": {"mask": torch.ones(1).expand(4)}})))
    assert content["mask"].tolist() == [1.0] * 4
