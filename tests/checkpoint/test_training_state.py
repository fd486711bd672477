"""After a restore training goes on bit for bit: every optimizer, scheduler and kind of model state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from holdfast.checkpoint.state.optimizer_forecast import predict_state
from holdfast.checkpoint.state.training_state import State
from state_kit import continues, restore, save

Make = Callable[[], tuple[dict[str, Any], Callable[[], None]]]


class Net(nn.Module):
    """Dropout, BatchNorm, a frozen and an unused parameter, extra state."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).to(dtype)
        self.frozen = nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, dtype=dtype))
        self.calls = 0
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(x) + self.frozen

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "history": torch.tensor([self.calls])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert state["history"].item() == self.calls


def training(make_optimizer: Callable[[nn.Module], Any], *, dtype: torch.dtype = torch.float32) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        model = Net(dtype)
        optimizer = make_optimizer(model)

        def step() -> None:
            # Normal numbers come in pairs, of which the second waits for its turn.
            x = torch.randn(4, 6, dtype=dtype) + random.gauss(0, 1) + float(np.random.randn())  # noqa: NPY002

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

        return {"model": model, "optimizer": optimizer}, step

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw-for": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "adamw-amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "adam-tensor-lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "sgd-momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "sgd-groups": lambda m: torch.optim.SGD(
        [{"params": m.body.parameters(), "momentum": 0.9}, {"params": [m.unused, m.frozen], "lr": 0.5}], lr=0.01
    ),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, history_size=4),
}
NOT_PREDICTED = {"adafactor", "asgd", "lbfgs"}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_training_goes_on_bit_for_bit(kind: str) -> None:
    saved = continues(training(OPTIMIZERS[kind]))
    assert "model.body.0.weight" in saved.tensors


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_the_state_after_the_first_step_is_predicted(kind: str) -> None:
    objects, step = training(OPTIMIZERS[kind])()
    objects["model"].unused.requires_grad_(False)  # a parameter without gradient gets no state
    state = State(objects, rank=0, world_size=1)
    predicted = state.predict()
    step()
    actual = {name: live.shard for name, live in state.gather().tensors.items()}
    if predicted is None:
        assert kind in NOT_PREDICTED
    else:
        assert predicted == actual


def test_prediction_leaves_training_as_it_was() -> None:
    torch.manual_seed(0)
    objects, step = training(OPTIMIZERS["adamw"])()
    state = State(objects, rank=0, world_size=1)
    calls: list[str] = []
    objects["optimizer"].register_step_pre_hook(lambda *_: calls.append("step"))
    before = save(state)
    state.predict()
    after = save(state)
    assert before.values == after.values
    assert not objects["optimizer"].state
    assert not calls
    step()
    assert calls == ["step"]


def test_state_in_another_dtype_than_the_parameter_keeps_its_bits() -> None:
    class Master(torch.optim.Optimizer):
        """Keeps 32-bit state for 16-bit parameters, a number and a list of tensors per parameter."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    master = state.setdefault("master", p.float())
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("past", []).append(p.grad.float().mean())
                    state["kind"] = "master"
                    master -= group["lr"] * p.grad.float() / state["count"]
                    p.copy_(master)

    saved = continues(training(lambda m: Master(m.parameters()), dtype=torch.bfloat16))
    assert saved.shards["optimizer.state.body.0.weight.master"].dtype == "F32"
    assert saved.shards["model.body.0.weight"].dtype == "BF16"


def test_state_that_shares_memory_shares_it_again() -> None:
    """One step count for all parameters, and a master copy that is the parameter itself where dtypes agree."""

    class Sharing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            used = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            count = self.state[used[-1]].setdefault("count", torch.tensor(0.0))
            count += 1
            for p in used:
                state = self.state[p]
                state.setdefault("count", count)
                state.setdefault("master", p.float()).sub_(p.grad, alpha=0.1 / float(state["count"]))

    optimizers: list[torch.optim.Optimizer] = []

    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        objects, step = training(lambda m: Sharing(m.parameters()))()
        optimizers.append(objects["optimizer"])
        return objects, step

    saved = continues(make)
    assert len([name for name in saved.tensors if name.startswith("optimizer.")]) == 1
    for optimizer in optimizers:
        assert len({id(state["count"]) for state in optimizer.state.values()}) == 1
        assert all(state["master"] is p for p, state in optimizer.state.items())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=50),
    "multistep": lambda o: schedulers.MultiStepLR(o, [2, 4, 4]),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_schedulers_go_on(kind: str) -> None:
    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        objects, step = training(OPTIMIZERS["sgd-momentum"])()
        scheduler = SCHEDULERS[kind](objects["optimizer"])

        def both() -> None:
            step()
            scheduler.step()

        return {**objects, "scheduler": scheduler}, both

    saved = continues(make)
    assert saved.decoded()[0,]["scheduler"]["last_epoch"] == 3


def test_scaler_goes_on_through_overflows() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4)).sum()
            if random.random() < 0.3:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return {"model": model, "optimizer": optimizer, "scaler": scaler}, step

    random.seed(5)
    saved = continues(make, before=7, after=9, whole=False)
    assert saved.tensors["scaler.scale"].item() != 64.0


def test_a_scaler_that_was_never_used_and_one_that_is_off() -> None:
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, enabled=enabled)
        saved = save(State({"scaler": scaler}, rank=0, world_size=1))
        other = torch.amp.GradScaler("cpu", init_scale=5.0, enabled=enabled)
        restore(State({"scaler": other}, rank=0, world_size=1), saved)
        assert other.get_scale() == (3.0 if enabled else 1.0)


def test_shuffled_data_goes_on_at_its_position() -> None:
    class Loader:
        """A shuffling loader with a position and a generator of its own."""

        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(3)
            self.order = torch.randperm(20, generator=self.generator)
            self.position = 0

        def next(self) -> torch.Tensor:
            if self.position == 20:
                self.order, self.position = torch.randperm(20, generator=self.generator), 0
            self.position += 4
            return self.order[self.position - 4 : self.position]

        def state_dict(self) -> dict[str, Any]:
            order = {"order": self.order.numpy(), "generator": self.generator.get_state()}
            return {"position": self.position, "nested": [order, (1, "a", None)]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order, rest = state["nested"]
            assert rest == (1, "a", None)
            assert isinstance(order["order"], np.ndarray)
            self.position, self.order = state["position"], torch.from_numpy(order["order"])
            self.generator.set_state(order["generator"])

    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        model, loader = nn.Linear(1, 1), Loader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

        def step() -> None:
            optimizer.zero_grad()
            model(loader.next()[:, None].float()).sum().backward()
            optimizer.step()

        return {"model": model, "optimizer": optimizer, "loader": loader}, step

    saved = continues(make, before=6, after=9)
    assert "loader.nested.0.order" in saved.tensors


def test_several_models_and_optimizers() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        shared = nn.Linear(4, 4)
        first, second = nn.Sequential(shared, nn.Linear(4, 2)), nn.Sequential(shared, nn.Linear(4, 2))
        ema = {"shadow": torch.zeros(4, 4), "decay": 0.5, "deep": {"count": torch.tensor(0)}}
        optimizers = {
            "a": torch.optim.AdamW(first.parameters(), lr=0.1),
            "b": torch.optim.SGD(second[1].parameters(), lr=0.1, momentum=0.5),
        }

        def step() -> None:
            x = torch.randn(3, 4)
            (first(x).sum() + second(x).square().sum()).backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                ema["shadow"].lerp_(shared.weight, ema["decay"])
            ema["decay"] *= 0.9
            ema["deep"]["count"] += 1

        generator = torch.Generator().manual_seed(1)
        return {"model": [first, second], "optimizer": optimizers, "ema": ema, "generator": generator}, step

    saved = continues(make)
    assert "model.0.0.weight" in saved.tensors
    assert "model.1.0.weight" not in saved.tensors, "shared memory is kept once, under its first name"
    assert "optimizer.a.state.0.0.weight.exp_avg" in saved.tensors
    assert "optimizer.b.state.1.1.bias.momentum_buffer" in saved.tensors
    assert {"ema.shadow", "ema.deep.count"} <= set(saved.tensors)


def test_a_restore_leaves_modes_as_the_script_made_them() -> None:
    """A loop over two models freezes one by turns, and DDP behind `restore()` asks what is trained; so does an evaluation for its mode."""

    def made() -> tuple[nn.Linear, torch.optim.Optimizer, State]:
        model = nn.Linear(4, 2).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
        state.trained()
        return model, optimizer, state

    model, optimizer, first = made()
    model.train()(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    first.stepped(optimizer)
    model.requires_grad_(False)
    again, _, second = made()
    restore(second, save(first))
    assert again.weight.requires_grad
    assert not again.training


def test_gradients_may_come_later() -> None:
    """Parameters that join training after the save have no state before it; a roll-back in place removes theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = State({"model": model, "optimizer": optimizer}, rank=0, world_size=1)

    def step() -> torch.Tensor:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model[1].weight.detach().clone()

    model[1].requires_grad_(False)
    step()
    saved = save(state)
    model[1].requires_grad_(True)
    expected = step(), step()
    restore(state, saved)
    assert set(optimizer.state) == set(model[0].parameters())
    assert all(torch.equal(wanted, step()) for wanted in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_a_gpu_is_read_without_waiting_and_goes_on(options: dict[str, bool], card: str) -> None:
    forbid_waits = getattr(torch.get_device_module(card), "set_sync_debug_mode", lambda _: None)  # CUDA alone has it

    def make() -> tuple[dict[str, Any], Callable[[], None]]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(card)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler(card, growth_interval=2)
        state = State({"model": model, "optimizer": optimizer, "scaler": scaler}, rank=0, world_size=1)

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8, device=card)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            forbid_waits("error")
            try:
                state.gather()
            finally:
                forbid_waits("default")

        return {"model": model, "optimizer": optimizer, "scaler": scaler}, step

    saved = continues(make, whole=False)
    assert "rng.device.words" in saved.tensors


def test_answers_that_are_kept_are_told_apart_by_all_that_decides() -> None:
    """Two optimizers of one model that differ in one option, or in the default type, are not given one answer."""
    model = torch.nn.Linear(2, 2)

    def asked(**options: Any) -> set[str] | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        made = predict_state(optimizer)
        assert made == predict_state(optimizer)
        return None if made is None else {key for state in made.values() for key in state}

    assert asked() == set()
    assert asked(momentum=0.9) == {"momentum_buffer"}
    assert asked() == set()
    adam = torch.optim.Adam(model.parameters())
    counts = {state["step"].dtype for state in (predict_state(adam) or {}).values()}
    torch.set_default_dtype(torch.float64)
    try:
        wider = {state["step"].dtype for state in (predict_state(adam) or {}).values()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert (counts, wider) == ({torch.float32}, {torch.float64})
