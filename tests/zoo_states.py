"""Kinds of state that people train: each makes fresh objects and a function that trains one step with them."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zoo_optimizers import Lookahead, MixedPrecision, ScheduleFree


class Probe:
    """An object that a save asks for its state; `during` is called then, once."""

    def __init__(self) -> None:
        self.during: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        during, self.during = self.during, None
        if during is not None:
            during()
        return {"asked": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"asked": True}


@dataclass
class World:
    """What a script trains.

    Attributes:
        model: the network.
        optimizers: those that step it.
        batch: draws an input of it.
        objects: all that is given to the Checkpointer, by name.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[], torch.Tensor]
    objects: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.probe = Probe()
        self.objects = {"model": self.model, "optimizer": self.optimizers, "probe": self.probe, **self.objects}

    def backward(self) -> None:
        """One forward and backward; gradients add up."""
        out = self.model(self.batch())
        (out.abs() if out.is_complex() else out).float().square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self) -> None:
        """One whole step."""
        self.backward()
        self.step()
        for name in ("scheduler", "counts", "averaged"):
            thing = self.objects.get(name)
            if isinstance(thing, AveragedModel):
                thing.update_parameters(self.model)
            elif thing is not None:
                thing.step()

    def fingerprint(self) -> dict[str, str]:
        """A digest of everything that the objects hand out themselves, and of the random generators, by name."""
        parts: dict[str, Any] = {"model": self.model.state_dict()}
        parts |= {f"optimizer {i}": optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}
        for name, thing in self.objects.items():
            if name not in ("model", "optimizer"):
                parts[name] = thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()
        parts["random"] = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002
        found: dict[str, str] = {}
        for name, part in parts.items():
            found |= dict(_digests(name, part))
        return found


def _digests(name: str, thing: Any) -> list[tuple[str, str]]:
    if isinstance(thing, torch.Tensor):
        plain = torch.view_as_real(thing.resolve_conj()) if thing.is_complex() else thing
        data = plain.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [(name, f"{thing.dtype} {tuple(thing.shape)} {hashlib.md5(data).hexdigest()}")]
    if isinstance(thing, np.ndarray):
        return [(name, f"{thing.dtype} {thing.shape} {hashlib.md5(thing.tobytes()).hexdigest()}")]
    if isinstance(thing, Mapping):
        return [row for key, value in thing.items() for row in _digests(f"{name}.{key}", value)]
    if isinstance(thing, Sequence | deque) and not isinstance(thing, str | bytes):
        if len(thing) > 50 and all(isinstance(value, int) for value in thing):
            return [(name, hashlib.md5(repr(thing).encode()).hexdigest())]
        return [row for index, value in enumerate(thing) for row in _digests(f"{name}.{index}", value)]
    return [(name, f"{type(thing).__name__} {thing!r}")]


def _net(width: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, 3),
    )  # fmt: skip


def _rows(num: int = 6) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(4, num)


def plain() -> World:
    model = _net()
    first, *rest = model.parameters()
    optimizers = [torch.optim.AdamW(rest, lr=0.01), torch.optim.SGD([first], lr=0.01, momentum=0.9)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    return World(model, optimizers, _rows(), {"scheduler": scheduler})


def small() -> World:
    """Many tensors of some bytes."""
    model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(3, 3), nn.Tanh())])
    return World(model, [torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)], _rows(3))


def big() -> World:
    """Some MiB: much is copied at a time."""
    model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(4)])
    return World(model, [torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)], _rows(384))


class Tied(nn.Module):
    """An output layer that is the embedding, and parameters that are views of one flat memory."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.randn(6 * 8 + 8)
        self.inner = nn.Linear(6, 8)
        self.inner.weight = nn.Parameter(self.flat[:48].view(8, 6))
        self.inner.bias = nn.Parameter(self.flat[48:])
        self.encoder = nn.Linear(8, 6, bias=False)
        self.decoder = nn.Linear(8, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("sums", torch.zeros(8))
        self.register_buffer("first_sums", self.sums[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            self.sums.add_(hidden.mean(0))
        return self.encoder(hidden) + self.decoder(hidden)


def tied() -> World:
    model = Tied()
    return World(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], _rows())


class Odd(nn.Module):
    """Parameters and buffers of all sorts of types and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).to(torch.bfloat16)
        self.turn = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("codes", torch.zeros(7, dtype=torch.int8))
        self.register_buffer("void", torch.empty(2, 0))
        self.register_buffer("mirrored", torch.randn(3, dtype=torch.complex64).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.codes[int(self.steps) % 7] += 1
        out = self.layer(x.to(torch.bfloat16)).float() * self.scale + self.exact.float()
        self.seen |= out.detach().amax(0) > 1
        return out.to(torch.complex64) @ self.turn


def odd() -> World:
    model = Odd()
    return World(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], _rows())


class Strided(nn.Module):
    """Parameters whose memory is not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.spread = nn.Parameter(torch.randn(4, 12)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) @ self.turned @ self.spread.t()


def strided() -> World:
    model = Strided()
    return World(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], lambda: torch.randn(2, 2, 5, 5))


def handed() -> World:
    """An optimizer that keeps slow weights in attributes and hands them out itself."""
    model = _net()
    return World(model, [Lookahead(model.parameters(), momentum=0.9)], _rows())


def masters() -> World:
    """Half precision with master copies inside the optimizer."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.float16)
    optimizer = MixedPrecision(model.parameters())
    return World(model, [optimizer], lambda: torch.randn(4, 6).to(torch.float16))


def free() -> World:
    """A schedule-free optimizer."""
    model = _net()
    return World(model, [ScheduleFree(model.parameters())], _rows())


def averaged() -> World:
    """A second model of averages, which no optimizer steps."""
    model = _net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return World(model, [torch.optim.SGD(model.parameters(), lr=0.01)], _rows(), {"averaged": average})


class Counts:
    """Plain containers, handed out as they are: the live ones."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {
            "losses": [0.5], "seen": {1: "a", "b": (2, None)}, "window": deque([1.0, 2.0], maxlen=4),
            "order": OrderedDict(x=1), "array": np.arange(5.0), "tensor": torch.arange(4), "name": "\u00e9t\u00e9",
            "bytes": b"\x00\xff", "nested": [[1, 2], [3, [4]]], "nan": float("nan"), "large": 2**70,
        }  # fmt: skip

    def step(self) -> None:
        items = self.items
        items["losses"].append(random.random())
        items["seen"][len(items["seen"]) + 1] = "c"
        items["window"].append(np.random.rand())  # noqa: NPY002
        items["order"].move_to_end("x")
        items["array"] += 1
        items["tensor"] += 1
        items["nested"][1][1].append(len(items["losses"]))

    def state_dict(self) -> dict[str, Any]:
        return self.items

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state


def containers() -> World:
    model = _net()
    objects = {"counts": Counts(), "draws": torch.Generator().manual_seed(3)}
    return World(model, [torch.optim.NAdam(model.parameters(), lr=0.01)], _rows(), objects)


STATES: dict[str, Callable[[], World]] = {
    made.__name__: made for made in (plain, small, big, tied, odd, strided, handed, masters, free, averaged, containers)
}
