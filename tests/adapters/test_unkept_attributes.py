"""What the script's own objects change, and no version has, is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapters.hf_parts.unkept_attributes import Unkept


class Own:
    """As a callback of a script."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        pytest.param(0, lambda one: setattr(one, "it", one.it + 1), id="a count"),
        pytest.param([], lambda one: one.it.append(1), id="a list"),
        pytest.param({"loss": [1.0]}, lambda one: one.it["loss"].append(2.0), id="a list in a dict"),
        pytest.param({"w": torch.ones(2)}, lambda one: one.it["w"].mul_(2), id="tensors in a dict"),
        pytest.param(np.random.default_rng(), lambda one: one.it.random(), id="a generator"),
        pytest.param(torch.ones(2), lambda one: setattr(one, "it", one.it * 2), id="another tensor"),
    ],
)
def test_a_change_is_named_once(held: Any, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    one, unkept = Own(it=held, still=float("nan"), other=[1, {2}]), Unkept("do this")
    for _ in range(3):
        unkept.look([one])
        change(one)
    assert caplog.text.count("what changes here: Own.it; after a restart") == 1
    assert "do this" in caplog.text
    assert "still" not in caplog.text


def test_what_is_kept_or_is_no_class_of_the_script_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    one, other, unkept = Own(it=0), torch.nn.Linear(1, 1), Unkept("")
    for number in range(3):
        unkept.look([one, other], frozenset(("it",)))
        one.it = other.counted = number
    assert not caplog.text


def test_what_comes_to_be_and_stays_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    one, unkept = Own(), Unkept("")
    unkept.look([one])
    one.tokenizer = "made late"
    unkept.look([one])
    unkept.look([one])
    assert not caplog.text
