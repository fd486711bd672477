"""A zoo of optimizers: each is kept, so that training goes on bit for bit, or refused by name before training begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.base.errors import MismatchError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence
from holdfast.checkpoint.survivors.update_window import Window
from state_kit import restore, save
from zoo_kit import Make, goes_on, start
from zoo_optimizers import OPTIMIZERS, REFUSED, Accelerated, Forgets, Galore, Lookahead, Sam, Scaled, Silent

CLOSURES = ("torch LBFGS", "SAM", "LookSAM", "accelerate around SAM")


def training(make_optimizer: Callable[[nn.Module], Any], *, closure: bool = False) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = make_optimizer(model)

        def step() -> torch.Tensor:
            x = torch.randn(4, 6)

            def loss() -> torch.Tensor:
                model.zero_grad()
                value = model(x).square().mean()
                value.backward()
                return value

            value = loss()
            optimizer.step(loss) if closure else optimizer.step()
            return value.detach()

        return {"model": model, "optimizer": optimizer}, step

    return make


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    goes_on(training(OPTIMIZERS[kind], closure=kind.startswith(CLOSURES)))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_optimizer_is_refused_by_name_before_training(kind: str) -> None:
    make_optimizer, words = REFUSED[kind]
    objects, _ = training(make_optimizer)()
    with pytest.raises(UsageError, match=words) as caught:
        start(objects)
    assert caught.value.remedy


def test_sparse_gradients_go_on_bit_for_bit() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Embedding(9, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randint(0, 9, (3,))).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"model": model, "optimizer": optimizer}, step

    goes_on(make)


def test_moments_with_scales_go_on_and_what_load_makes_anew_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its `load_state_dict` computes the scales anew: the saved moments stand only if the same is handed out again."""
    goes_on(training(lambda m: Scaled(m.parameters(), torch.float16)))

    class Rounds(Scaled):
        def set_scaled_state(self, p: Any, value: Any) -> None:
            super().set_scaled_state(p, value)
            self._scales[p]["exp_avg"] *= 1 + 2**-20

    objects, step = training(lambda m: Rounds(m.parameters(), torch.float16))()
    for _ in range(3):
        step()
    saved = save(start(objects))
    objects, step = training(lambda m: Rounds(m.parameters(), torch.float16))()
    restore(start(objects), saved)
    assert "load_state_dict() made something else of state than was handed out" in caplog.text
    step()


def test_what_load_state_dict_does_not_take_back_is_refused_by_name() -> None:
    objects, step = training(lambda m: Forgets(m.parameters()))()
    state = start(objects)
    step()
    saved = save(state)
    fresh = start(training(lambda m: Forgets(m.parameters()))()[0])
    words = r"optimizer.state_dict \(load_state_dict\(\) did not take back k\)"
    with pytest.raises(MismatchError, match=words) as caught:
        restore(fresh, saved)
    assert "strict=False" in caught.value.remedy
    record = restore(start(training(lambda m: Forgets(m.parameters()))()[0]), saved, strict=False)
    assert [name.partition(" ")[0] for name in record.misfit] == ["optimizer.state_dict"]


def test_a_version_without_what_is_handed_out_here_is_refused() -> None:
    plain = save(start(training(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))()[0]))
    with pytest.raises(MismatchError, match=r"1 missing in the checkpoint: optimizer.state_dict"):
        restore(start(training(lambda m: Lookahead(m.parameters()))()[0]), plain)
    more = save(start(training(lambda m: Lookahead(m.parameters()))()[0]))
    with pytest.raises(MismatchError, match=r"unexpected in the checkpoint: optimizer.state_dict"):
        restore(start(training(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))()[0]), more)


@pytest.mark.parametrize(
    "value",
    [3, {"as_kept": ["state"], "more": []}, {"as_kept": ["x"], "more": {}}, {"as_kept": 1, "more": {}}, {}],
    ids=str,
)
def test_handed_out_state_of_another_form_is_refused(value: Any) -> None:
    saved = save(start(training(lambda m: Lookahead(m.parameters()))()[0]))
    state = start(training(lambda m: Lookahead(m.parameters()))()[0])
    damaged = {**saved.decoded()[0,], "optimizer.state_dict": value}
    with pytest.raises(MismatchError, match=r"optimizer\.state_dict"):
        state.create(state.fitting(saved.offered(), {(0,): damaged}))


def test_an_object_in_the_state_is_named_at_every_save() -> None:
    objects, step = training(lambda m: Galore(m.parameters(), lr=0.1))()
    state = start(objects)
    step()
    with pytest.raises(
        UsageError, match=r"Projector cannot be stored as a value \[optimizer.state.0.weight.projector\]"
    ):
        save(state)


def test_a_load_hook_may_change_what_is_loaded() -> None:
    """Who lowers the rate in a hook at every load means it; the moments stay those that were saved."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.bfloat16().parameters(), lr=0.1)

        def lower(_: Any, said: dict[str, Any]) -> None:
            said["param_groups"] = [{**group, "lr": 0.05} for group in said["param_groups"]]

        optimizer.register_load_state_dict_pre_hook(lower)
        return optimizer

    def objects() -> tuple[dict[str, Any], dict[str, Any]]:
        model = nn.Linear(4, 4)
        optimizer = make(model)
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        return {"model": model, "optimizer": optimizer}, optimizer.param_groups[0]

    given, _ = objects()
    given["optimizer"].step()
    given["optimizer"].state[given["model"].weight]["exp_avg"] = torch.rand(4, 4)  # float32 beside a bfloat16 parameter
    saved = save(start(given))
    fresh, group = objects()
    restore(start(fresh), saved)
    assert fresh["optimizer"].param_groups[0] is group
    assert group["lr"] == 0.05
    there, here = (each["optimizer"].state[each["model"].weight]["exp_avg"] for each in (given, fresh))
    assert here.dtype is torch.float32
    assert torch.equal(here, there)


def test_state_in_attributes_is_told_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    objects, step = training(lambda m: Silent(m.parameters()))()
    state = start(objects)
    for _ in range(9):
        step()
        state.gather()
    told = [record.message for record in caplog.records if "is in no version" in record.message]
    assert len(told) == 1
    assert "optimizer (Silent.count)" in told[0]


@pytest.mark.parametrize(
    "kind", ["state_dict of its own", "hooks of both directions", "accelerate", "SAM", "masters inside"]
)
def test_what_is_handed_out_is_not_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    objects, step = training(OPTIMIZERS[kind], closure=kind == "SAM")()
    state = start(objects)
    for _ in range(9):
        step()
        state.gather()
    assert "is in no version" not in caplog.text


def test_the_fence_is_put_before_what_steps_inside_a_wrapper() -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Accelerated(inner)
    state = start({"model": model, "optimizer": wrapper})
    assert state.optimizers == [inner]
    fence = Fence(timeout_s=1.0, events=Events())
    fence.guard(state.optimizers)
    window = Window(state.optimizers)
    wrapper.step()
    assert (fence.num_steps, window.begun, window.open) == (1, 1, False)
    fence.close()
    window.close()


def test_the_fence_is_put_before_an_optimizer_inside_another() -> None:
    """A script may call the two halves of SAM's step itself, past the step that has hooks."""
    model = nn.Linear(4, 4)
    sam = Sam(model.parameters())
    state = start({"model": model, "optimizer": sam})
    assert state.optimizers == [sam, sam.base_optimizer]
    fence = Fence(timeout_s=1.0, events=Events())
    fence.guard(state.optimizers)
    sam.base_optimizer.step()
    assert fence.num_steps == 1
    fence.close()


def test_an_optimizer_that_is_given_twice_is_kept_once() -> None:
    model = nn.Linear(4, 4)
    sam = Sam(model.parameters())
    objects, names = {"model": model, "optimizer": [sam, sam.base_optimizer]}, []
    model(torch.ones(1, 4)).sum().backward()
    sam.base_optimizer.step()
    names = [name for name in start(objects).gather().tensors if "momentum" in name]
    assert names == ["optimizer.1.state.weight.momentum_buffer", "optimizer.1.state.bias.momentum_buffer"]


def test_references_between_optimizers_are_not_followed_to_other_parameters() -> None:
    """Two optimizers of a GAN that know of each other are two optimizers."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one: Any = torch.optim.SGD(first.parameters(), lr=0.1)
    one.partner = torch.optim.SGD(second.parameters(), lr=0.1)
    state = start({"model": first, "optimizer": one})
    assert state.optimizers == [one]


def test_groups_and_state_keep_their_identity_over_a_restore() -> None:
    """A scheduler, a compiled step or an optimizer inside may hold on to them."""
    for kind in ("torch NAdam", "state_dict of its own, and momentum", "accelerate", "SAM that shares its state"):
        make = training(OPTIMIZERS[kind], closure=kind.startswith(CLOSURES))
        objects, step = make()
        state = start(objects)
        step()
        saved = save(state)
        fresh, _ = make()
        optimizer = fresh["optimizer"]
        held = optimizer.state, optimizer.param_groups, optimizer.param_groups[0]
        restore(start(fresh), saved)
        assert all(
            a is b
            for a, b in zip(held, (optimizer.state, optimizer.param_groups, optimizer.param_groups[0]), strict=True)
        )
        assert len(optimizer.state) > 0


@pytest.mark.parametrize("kind", ["eigenvectors", "a list of eigenvectors"])
def test_state_that_is_made_anew_lies_in_memory_as_it_did(kind: str) -> None:
    objects, step = training(OPTIMIZERS[kind])()
    state = start(objects)
    step()
    saved = save(state)
    fresh, _ = training(OPTIMIZERS[kind])()
    restore(start(fresh), saved)
    for there, here in zip(objects["model"].parameters(), fresh["model"].parameters(), strict=True):
        bases = [each["optimizer"].state[p]["basis"] for each, p in ((objects, there), (fresh, here))]
        left, right = (basis[0] if isinstance(basis, list) else basis for basis in bases)
        assert left.stride() == right.stride()
        assert not left.is_contiguous()
