"""A zoo of everything else: schedulers, averages, scalers, generators, loaders; kept bit for bit, or refused by name."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from holdfast.base.errors import CorruptError, UsageError
from holdfast.checkpoint.entries.pytree import flatten, unflatten
from state_kit import restore, save
from zoo_kit import Make, goes_on, start
from zoo_optimizers import Accelerated


class Warmup:
    """A rate as an object that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (epoch + self.calls)


def chained(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.9)]
    )


def sequential(optimizer: Any) -> Any:
    parts = [
        schedulers.LinearLR(optimizer),
        schedulers.CosineAnnealingLR(optimizer, 5),
        schedulers.StepLR(optimizer, 2),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4, 13])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "lambda with an object": lambda o: schedulers.LambdaLR(o, Warmup()),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.95),
    "multiplicative with an object": lambda o: schedulers.MultiplicativeLR(o, Warmup()),
    "step": lambda o: schedulers.StepLR(o, 5),
    "multistep": lambda o: schedulers.MultiStepLR(o, [2, 4, 13, 13]),
    "constant": lambda o: schedulers.ConstantLR(o, total_iters=14),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=15),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 16, power=2.0),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=2),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "cyclic with a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=25, three_phase=True),
    "chained": chained,
    "sequential": sequential,
    "averaging": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=15),
}


def training(make_scheduler: Callable[[Any], Any]) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make_scheduler(optimizer)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(*((loss.item(),) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()))
            return loss.detach()

        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step

    return make


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
def test_a_scheduler_goes_on_bit_for_bit(kind: str) -> None:
    goes_on(training(SCHEDULERS[kind]))


def test_a_scheduler_of_a_wrapped_optimizer_goes_on_bit_for_bit() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        objects, step = training(lambda o: schedulers.StepLR(o, 5))()
        return {**objects, "optimizer": Accelerated(objects["optimizer"])}, step

    goes_on(make)


@pytest.mark.parametrize("how", ["mean", "ema", "ema of buffers"])
def test_an_averaged_model_goes_on_bit_for_bit(how: str) -> None:
    options: dict[str, Any] = {} if how == "mean" else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}

    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        average = AveragedModel(model, use_buffers=how == "ema of buffers", **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            batch = torch.randn(8, 4)
            (model(batch).square().mean() + average(batch).mean() * 0).backward()
            optimizer.step()
            average.update_parameters(model)
            update_bn([batch], average)
            return average(batch).square().mean().detach()

        return {"model": model, "average": average, "optimizer": optimizer}, step

    goes_on(make)


def test_a_scaler_goes_on_through_overflows_bit_for_bit() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Linear(4, 4)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

        def step() -> torch.Tensor:
            inner.zero_grad()
            loss = model(torch.randn(2, 4)).square().sum()
            scaler.scale(loss * (torch.inf if random.random() < 0.3 else 1.0)).backward()
            scaler.step(inner)
            scaler.update()
            return loss.detach()

        return {"model": model, "optimizer": Accelerated(inner), "scaler": scaler}, step

    goes_on(make)


class SlowScaler(torch.amp.GradScaler):
    """Halves the scale at every second overflow only, and hands out what it counts."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=64.0, growth_interval=2)
        self.overflows, self.recent = 0, torch.zeros(3)

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if self.get_scale() < before:
            self.overflows += 1
            self.recent = self.recent.roll(1) + 1
            if self.overflows % 2:
                super().update(before)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "overflows": self.overflows, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.overflows, self.recent = state.get("overflows", 0), state.get("recent", torch.zeros(3))
        super().load_state_dict(state)


def test_what_a_scaler_of_another_class_hands_out_besides_goes_on() -> None:
    scalers = list[SlowScaler]()

    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model = nn.Linear(4, 4)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = SlowScaler()
        scalers.append(scaler)

        def step() -> torch.Tensor:
            inner.zero_grad()
            loss = model(torch.randn(2, 4)).square().sum()
            scaler.scale(loss * (torch.inf if random.random() < 0.5 else 1.0)).backward()
            scaler.step(inner)
            scaler.update()
            return loss.detach() + scaler.overflows + scaler.get_scale() + scaler.recent.sum()

        return {"model": model, "optimizer": inner, "scaler": scaler}, step

    goes_on(make)
    assert scalers[0].overflows > 0


class Loader:
    """Shuffles with generators of its own, and hands out the very containers and tensors that it goes on changing."""

    def __init__(self) -> None:
        self.state = {
            "position": 0,
            "order": torch.randperm(7),
            "recent": deque([0.0], maxlen=3),
            "seen": Counter(),
            "shapes": {(0, 1): torch.Size([2])},
            "kind": torch.float32,
            "words": OrderedDict({0.5: [np.arange(3)]}),
        }

    def next(self) -> float:
        state: dict[str, Any] = self.state
        state["position"] += 1
        state["order"].copy_(state["order"].roll(1))
        state["recent"].append(float(state["order"][0]) + state["position"])
        state["seen"][int(state["order"][0])] += 1
        state["words"][0.5][0] += 1
        return sum(state["recent"]) + sum(state["seen"].values()) + state["shapes"][0, 1][0]  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_that_hands_out_what_it_goes_on_changing_is_kept_as_it_was() -> None:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        model, loader = nn.Linear(1, 1), Loader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        generator = torch.Generator().manual_seed(3)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            drawn = loader.next() + float(torch.rand((), generator=generator)) + random.random()
            drawn += float(np.random.rand())  # noqa: NPY002 - the generator behind numpy.random.*
            loss = model(torch.tensor([[drawn]])).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"model": model, "optimizer": optimizer, "loader": loader, "generator": generator}, step

    goes_on(make)


@pytest.mark.parametrize("thing", [lambda: 0, 3, object()], ids=lambda t: type(t).__name__)
def test_an_object_without_state_dict_is_refused_by_name(thing: Any) -> None:
    with pytest.raises(UsageError, match=rf"nothing is known about saving .*{type(thing).__name__} \[thing\]"):
        start({"thing": thing})


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "value", [defaultdict(int), lambda: 0, Warmup(), slice(3), bytearray(b"x")], ids=lambda v: type(v).__name__
)
def test_a_value_that_cannot_be_kept_is_refused_by_place(value: Any) -> None:
    with pytest.raises(UsageError, match=r"\[thing.deep\[0\]\]"):
        start({"thing": Holder({"deep": [value]})})


@pytest.mark.parametrize(
    "value",
    [deque([1, torch.ones(2)], 5), deque(), torch.Size((2, 3)), torch.bfloat16, torch.device("cpu"), {1.5: 1, (1, "a"): [2], None: 3},
     OrderedDict({0.5: torch.ones(1)}), {True: 1}, {b"x": {2.5: 3}}],
    ids=str,
)  # fmt: skip
def test_what_the_format_does_not_know_comes_back_as_it_was(value: Any) -> None:
    holder = Holder({"value": value})
    other = Holder(None)
    restore(start({"thing": other}), save(start({"thing": holder})))
    found = other.state["value"]
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_memory_lies_as_it_did_in_objects_that_are_made_anew() -> None:
    """Products of matrices round by the order in which their rows and columns lie."""
    holder, other = Holder({"m": torch.rand(4, 3, 2).permute(1, 2, 0), "plain": torch.rand(3, 2)}), Holder(None)
    saved = save(start({"thing": holder}))
    restore(start({"thing": other}), saved)
    assert other.state["m"].stride() == holder.state["m"].stride()
    assert other.state["plain"].is_contiguous()
    for hostile in ({"thing.m": "x"}, {"thing.m": [0, 0, 1]}, {"thing.m": [True, 0, 2]}, {"thing.m": [0]}):
        state = start({"thing": Holder(None)})
        values = {(0,): {**saved.decoded()[0,], "memory_order": hostile}}
        assert state.create(state.fitting(saved.offered(), values))["thing.m"].local.is_contiguous()


@pytest.mark.parametrize("name", ["ndarray", "pairs", "deque", "torch.Size", "torch.dtype", "torch.device"])
@pytest.mark.parametrize("content", [3, [], ["x"], {"a": 1}, None, "os.system"])
def test_a_value_that_is_not_what_it_announces_is_damage(name: str, content: Any) -> None:
    if (name, content) != ("torch.Size", []):
        with pytest.raises(CorruptError, match=name):
            unflatten({f"holdfast.{name}": content}, lambda _: torch.ones(1))
    with pytest.raises(UsageError, match="is reserved"):
        flatten({f"holdfast.{name}": content}, "thing", lambda name, _: name)
