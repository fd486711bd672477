"""What was saved comes back though scripts replace, share, move or tie things; what these objects cannot show is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError
from holdfast.checkpoint.restore.reshard import _same_bytes
from holdfast.checkpoint.survivors.step_snapshot import as_bytes
from state_kit import restore, save
from zoo_kit import start


class Running(nn.Module):
    """A buffer that is assigned at each step, as running means are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(1))


def test_a_glance_sees_what_a_script_has_put_in_the_place_of_something() -> None:
    model, given = Running(), {"best": torch.tensor(9.0), "history": np.zeros(3)}
    state = start({"model": model, "given": given})
    state.glance()
    model.mean = model.mean + 1.0
    given["best"], given["history"][0] = torch.tensor(1.0), 5.0
    given["later"] = torch.ones(2)
    tensors = state.glance().tensors
    assert tensors["model.mean"].local.tolist() == [1.0]
    assert tensors["given.best"].local.item() == 1.0
    assert tensors["given.history"].local.tolist() == [5.0, 0.0, 0.0]
    assert tensors["given.later"].local.tolist() == [1.0, 1.0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(4))


@pytest.mark.parametrize(("value", "fits"), [([1.0, 2.0, 3.0, 4.0], False), ([float("nan")] * 4, True)])
def test_what_a_buffer_that_repeats_one_value_cannot_show_is_refused(value: list[float], fits: bool) -> None:
    before, after = Scaled(), Scaled()
    before.scale = torch.tensor(value)
    saved = save(start({"model": before}))
    if fits:
        restore(start({"model": after}), saved)
        assert after.scale.isnan().all()
        return
    with pytest.raises(MismatchError, match="scale was saved with several values"):
        restore(start({"model": after}), saved)


def groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    first, *rest = model.parameters()
    given = [{"params": [first]}, {"params": rest, "weight_decay": 0.5}]
    return model, torch.optim.AdamW(given, lr=torch.tensor(0.1), foreach=False)


@pytest.mark.parametrize("second", [0.001, 0.1])
def test_a_tensor_that_groups_share_is_not_the_last_ones(second: float) -> None:
    model, optimizer = groups()
    optimizer.param_groups[1]["lr"] = torch.tensor(second)
    saved = save(start({"model": model, "optimizer": optimizer}))
    again, restored = groups()
    shared = restored.param_groups[0]["lr"]
    restore(start({"model": again, "optimizer": restored}), saved)
    found = [group["lr"] for group in restored.param_groups]
    assert [rate.item() for rate in found] == [pytest.approx(0.1), pytest.approx(second)]
    assert (found[0] is shared) == (second == 0.1), "a compiled step holds on to it"


def test_parameters_that_go_to_another_group_are_saved_there() -> None:
    model, optimizer = groups()
    state = start({"model": model, "optimizer": optimizer})
    one, other = optimizer.param_groups
    other["params"].insert(0, one["params"].pop())
    one["params"].append(other["params"].pop())
    saved = save(state)
    one["params"].append(other["params"].pop(0))
    moved = save(state)
    assert [[*map(len, _names(each))] for each in (saved, moved)] == [[1, 2], [2, 1]]


def _names(saved: Any) -> list[list[str]]:
    values = {path: value for group in saved.decoded().values() for path, value in group.items()}
    return [group["params"] for group in values["optimizer.param_groups"]]


def tied(to: str) -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("one", "other", "tied")})
    model["tied"].weight = model[to].weight
    return model


def test_a_weight_that_is_tied_to_another_one_by_now_is_refused() -> None:
    saved = save(start({"model": tied("other")}))
    with pytest.raises(MismatchError, match=r"tied\.weight \(saved as another name of model\.other\.weight, here of"):
        restore(start({"model": tied("one")}), saved)
    restore(start({"model": tied("other")}), saved)


@pytest.mark.parametrize("shown", [torch.tensor([1 + 2j, 3 + 1j]).conj(), torch.tensor([1 + 2j]).conj().imag])
def test_bits_of_a_turned_tensor_are_those_that_it_shows(shown: torch.Tensor) -> None:
    assert torch.frombuffer(bytearray(as_bytes(shown)), dtype=shown.dtype).tolist() == shown.tolist()
    assert _same_bytes(shown, shown.resolve_conj().resolve_neg())
