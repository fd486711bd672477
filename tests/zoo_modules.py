"""Modules of the zoo: every way in which PyTorch lets a module keep, name, make up and take back its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import return_and_correct_aliasing


def body(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Linear(8, 3))


class Beside(nn.Module):
    """A buffer of some kind beside two layers; what it holds is added to the input."""

    def __init__(self, buffer: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.net = body(nn.Tanh())
        self.register_buffer("extra", buffer, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = self.extra.to_dense() if self.extra.layout is not torch.strided else self.extra
        shift = torch.view_as_real(extra.resolve_conj()) if extra.is_complex() else extra.float()
        return self.net(x + (shift.sum() if shift.numel() else 0.0))


class Counting(Beside):
    """A buffer that training writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.extra.add_(1)
        return super().forward(x) * (1 + 1 / self.extra.sum())


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = body(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x) / self.calls

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}


class ExtraBack(Extra):
    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Saves(Extra):
    """State that `_save_to_state_dict` makes up and `_load_from_state_dict` takes, as quantized layers do."""

    def get_extra_state(self) -> Any:
        raise RuntimeError("not asked")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls = int(state_dict.pop(f"{prefix}calls"))


class WholeDict(Extra):
    """A `state_dict` of its own that takes no arguments, and hands out its parameters and more."""

    get_extra_state = nn.Module.get_extra_state

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {**self.net.state_dict(prefix="net."), "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        self.calls = state_dict["calls"]
        self.net.load_state_dict({k.removeprefix("net."): v for k, v in state_dict.items() if k != "calls"})


class HalfDict(WholeDict):
    """Hands out its first layer only."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.net[0].state_dict(prefix="net.0.")  # type: ignore[return-value]


class Casts(nn.Module):
    """Hands out 16-bit copies of what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        return {name: value.bfloat16() for name, value in super().state_dict(*args, **options).items()}


class Listed(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return [self.weight]


def with_hook(way_back: bool) -> nn.Module:
    """A hook that adds what the module keeps in an attribute, and one that takes it back."""
    model: Any = Extra()
    model.__class__ = type("Hooked", (nn.Module,), {"forward": Extra.forward})

    def add(module: Any, said: Any, prefix: str, *_: Any) -> None:
        said[f"{prefix}calls"] = torch.tensor(module.calls)

    def take(said: Any, prefix: str, *_: Any) -> None:
        model.calls = int(said.pop(f"{prefix}calls"))

    model._register_state_dict_hook(add)
    if way_back:
        model._register_load_state_dict_pre_hook(take)
    return model  # type: ignore[no-any-return]


def renamed() -> nn.Module:
    """A hook that calls a parameter by another name, and one that undoes it."""
    model = body()

    def rename(_: Any, said: Any, prefix: str, *__: Any) -> None:
        said[f"{prefix}first"] = said.pop(f"{prefix}0.weight")

    def undo(said: Any, prefix: str, *_: Any) -> None:
        said[f"{prefix}0.weight"] = said.pop(f"{prefix}first")

    model._register_state_dict_hook(rename)
    model._register_load_state_dict_pre_hook(undo)
    return model


class Derived(nn.Module):
    """Keeps what it makes of a frozen table, and makes it anew after every load."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = body(), nn.Parameter(torch.rand(6), requires_grad=False)
        self.rebuild()
        self.register_load_state_dict_post_hook(lambda module, _: module.rebuild())

    def rebuild(self) -> None:
        self.made = self.table.detach().square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.made)


class Views(nn.Module):
    """Parameters whose memory overlaps in part."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.rand(10)
        self.first, self.second = nn.Parameter(base[:7]), nn.Parameter(base[3:])
        self.net = body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.first.sum() * self.second.prod()


class Plain(nn.Parameter):
    """A subclass that is plain memory."""


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = body(), Plain(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale


class Two(torch.Tensor):
    """torchao: a tensor made of two others."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].codes, args[0].scale))
        args = [a.codes * a.scale if isinstance(a, Two) else a for a in args]
        return func(*args, **(kwargs or {}))


def quiet(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def old_norm(norm: Any) -> nn.Module:
    return quiet(lambda: nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)))  # type: ignore[no-any-return]


def lazy(*, made: bool) -> nn.Module:
    model = quiet(lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)))
    if made:
        model(torch.ones(1, 6))
    return model  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def frozen_two() -> nn.Module:
    model = body()
    model.register_buffer("codes", Two(torch.ones(2, 2), torch.ones(1)))
    return model


KEPT: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 8)), nn.Linear(8, 3)),
    "weight norm by hooks": lambda: old_norm(torch.nn.utils.weight_norm),
    "spectral norm by hooks": lambda: old_norm(torch.nn.utils.spectral_norm),
    "batch norm without momentum": lambda: body(nn.BatchNorm1d(8, momentum=None)),
    "instance norm that tracks": lambda: body(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "lazy and made": lambda: lazy(made=True),
    "an expanded buffer": lambda: Beside(torch.tensor([0.5]).expand(5)),
    "a buffer expanded in the middle": lambda: Beside(torch.rand(2, 1, 3).expand(2, 4, 3)),
    "an expanded buffer that is written": lambda: Counting(torch.zeros(1).expand(1)),
    "a buffer that overlaps itself": lambda: Beside(torch.rand(6).as_strided((4, 3), (1, 1))),
    "a buffer with large strides": lambda: Beside(torch.rand(100).as_strided((3, 2), (30, 7))),
    "a transposed buffer": lambda: Beside(torch.rand(3, 5).t()),
    "a buffer without dimensions": lambda: Counting(torch.tensor(2.0)),
    "an empty buffer": lambda: Beside(torch.empty(0, 3)),
    "a conjugated buffer": lambda: Beside(torch.randn(3, dtype=torch.complex64).conj()),
    "a negated buffer": lambda: Beside(torch.randn(3, dtype=torch.complex64).conj().imag),
    "an expanded buffer of eight bits": lambda: Beside(torch.ones(1).to(torch.float8_e4m3fn).expand(4)),
    "a buffer of bool": lambda: Beside(torch.tensor([True, False])),
    "parameters that overlap": Views,
    "a subclass of Parameter": Subclassed,
    "extra state": ExtraBack,
    "state that a method makes up": Saves,
    "state that a hook makes up": lambda: with_hook(way_back=True),
    "a hook that renames": renamed,
    "state_dict of its own": WholeDict,
    "a hook after the load": Derived,
    "tied weights": tied,
    "compiled": lambda: torch.compile(body(), backend="eager"),  # type: ignore[dict-item,return-value]
    "data parallel": lambda: nn.DataParallel(body()),
    "scripted": lambda: quiet(lambda: torch.jit.script(body())),
}

# What is refused before training, and a part of the words.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: lazy(made=False), r"no memory yet .* \[model.0.weight\]"),
    "on the meta device": (lambda: Beside(torch.empty(2, device="meta")), r"no memory yet .* \[model.extra\]"),
    "a sparse buffer": (lambda: Beside(torch.eye(3).to_sparse()), r"sparse tensors .* \[model.extra\]"),
    "a nested buffer": (
        lambda: Beside(quiet(lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]))), r"nested tensors .* \[model.extra\]"
    ),
    "a jagged buffer": (
        lambda: Beside(torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)),
        r"nested tensors .* \[model.extra\]",
    ),
    "a quantized buffer": (
        lambda: Beside(quiet(lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.quint8))), r"quint8 cannot be saved \[model.extra\]"
    ),
    "a buffer of complex128": (lambda: Beside(torch.rand(3, dtype=torch.complex128)), r"complex128 .* \[model.extra\]"),
    "a tensor made of two": (frozen_two, r"tensors of the class Two cannot be saved \[model.codes\]"),
    "extra state without a way back": (Extra, r"nothing takes it back \[model._extra_state\]. Remedy: write set_extra_state"),
    "a hook without a way back": (lambda: with_hook(way_back=False), r"nothing takes it back \[model.calls\]"),
    "half of its state": (HalfDict, r"does not hand out as it is \[optimizer: model.net.1.weight\]"),
    "16-bit copies of what is trained": (Casts, r"does not hand out as it is \[optimizer: model.net.0.weight\]"),
    "a list as state": (lambda: Listed(6, 3), r"state_dict\(\) of the module returns list \[model\]"),
}  # fmt: skip
