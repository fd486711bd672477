"""Optimizers of the zoo: torch's own, and faithful stand-ins for those that people use and torch does not have.

Each stand-in keeps its state where the original keeps it: in `.state`, in parameter groups, in attributes, in an optimizer
inside. The comments name the originals.
"""

from __future__ import annotations

import enum
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles what is deprecated
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.distributed.optim.named_optimizer import _NamedOptimizer

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
Made = torch.optim.Optimizer


def params_of(optimizer: Made) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Lookahead(SGD):
    """Slow weights and a counter in attributes, handed out as torch says."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{"lr": 0.1, **options})
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.k += 1
        if self.k % 5 == 0:
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "k": self.k}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.slow, self.k = state_dict.pop("slow"), state_dict.pop("k")
        super().load_state_dict(state_dict)


class SaysOnly(SGD):
    """Hands out a counter and takes nothing back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        self.param_groups[0]["lr"] = 0.1 / self.k
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}


class Forgets(SaysOnly):
    """Takes everything and keeps nothing of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "k"})


class Silent(SGD):
    """Counts in an attribute that no `state_dict` hands out: `torch.save` loses it too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p in params_of(self):
            p.sub_(p.grad, alpha=0.1 / self.count)


class GlobalKey(SGD):
    """MADGRAD, SPAM, TRAC: numbers, tensors and dicts under names in `.state`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("k", torch.tensor([0]))
        self.state["k"] += 1
        self.state.setdefault("ema", {"short": 0.0, "shapes": []})
        self.state["ema"]["short"] += 0.25
        for p in params_of(self):
            self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.3)
            p.sub_(self.state[p]["m"] / float(self.state["k"]) * self.state["ema"]["short"])


class ScheduleFree(Made):
    """schedule_free.SGDScheduleFree: `z` per parameter, weights and mode in the groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(
            params, {"lr": 0.05, "k": 0, "weight_sum": 0.0, "train_mode": True, "beta": 0.9, "lr_max": -1.0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr_max"] = lr = max(group["lr"], group["lr_max"])
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in params_of(self):
                z = self.state[p].setdefault("z", p.clone(memory_format=torch.preserve_format))
                p.lerp_(z, share).add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1


class Sam(Made):
    """davda54/sam: its own state and groups, and an optimizer inside with the momentum, which it hands out nowhere."""

    def __init__(self, params: Any, *, shared: bool = False) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)
        if shared:  # pytorch_optimizer
            self.state = self.base_optimizer.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in params_of(self):
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for p in params_of(self):
            p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()


class SamThatLinks(Sam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class LookSam(Sam):
    """pytorch_optimizer.LookSAM: hands the inner optimizer out under a key."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base_optimizer": self.base_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.load_state_dict(state_dict["base_optimizer"])


class MixedPrecision(Made):
    """apex, Megatron: 16-bit parameters, 32-bit masters that an optimizer inside steps, a state of a form of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.masters = [p.detach().clone().float() for p in self.param_groups[0]["params"]]
        self.optimizer = AdamW(self.masters, lr=0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        pairs = list(zip(self.masters, self.param_groups[0]["params"], strict=True))
        for master, p in pairs:
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for master, p in pairs:
            p.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "fp32_from_fp16": [self.masters]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for master, saved in zip(self.masters, state_dict["fp32_from_fp16"][0], strict=True):
            master.copy_(saved)


class Scaled(Made):
    """transformer_engine.FusedAdam: moments in `.state` with a scale each in an attribute; handed out unscaled."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.05})
        self.dtype, self._scales = dtype, {}  # type: ignore[var-annotated]

    def get_unscaled_state(self, p: Any) -> Any:
        kept = self.state[p]["exp_avg"]
        return kept if kept.dtype is torch.float32 else kept.float() * self._scales[p]["exp_avg"]

    def set_scaled_state(self, p: Any, value: Any) -> None:
        if self.dtype is torch.float32:
            self.state[p]["exp_avg"] = value
            return
        scale = torch.ones(1) if self.dtype is torch.bfloat16 else value.abs().max().reshape(1) / 32752
        self._scales.setdefault(p, {})["exp_avg"] = scale
        self.state[p]["exp_avg"] = (value / torch.where(scale > 0, scale, 1)).to(self.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in params_of(self):
            if "exp_avg" not in self.state[p]:
                self.set_scaled_state(p, torch.zeros_like(p))
            moment = self.get_unscaled_state(p).lerp(p.grad, 0.1)
            self.set_scaled_state(p, moment)
            p.sub_(moment, alpha=0.05)

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        listed = [p for group in self.param_groups for p in group["params"]]
        said["state"] = {i: {"exp_avg": self.get_unscaled_state(listed[i])} for i in said["state"]}
        return said

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        listed = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            self.set_scaled_state(listed[index], saved["exp_avg"].float())


class EightBit(Made):
    """bitsandbytes: uint8 moments with a map that all parameters share, and a load that must not cast them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.name2qmap = {"dynamic": torch.linspace(-1, 1, 256)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in params_of(self):
            s = self.state[p]
            if not s:
                s.update(step=0, state1=torch.zeros_like(p, dtype=torch.uint8), qmap1=self.name2qmap["dynamic"],
                         absmax1=torch.ones(1))  # fmt: skip
            s["step"] += 1
            moment = (s["qmap1"][s["state1"].int()] * s["absmax1"]).lerp(p.grad, 0.2)
            s["absmax1"] = moment.abs().max().reshape(1)
            s["state1"] = ((moment / s["absmax1"] + 1) * 127.5).round().to(torch.uint8)
            p.sub_(moment, alpha=0.05)

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        listed = [p for group in self.param_groups for p in group["params"]]
        state = {listed[i]: dict(s) for i, s in state_dict["state"].items()}
        groups = [
            {**g, "params": mine["params"]}
            for g, mine in zip(state_dict["param_groups"], self.param_groups, strict=True)
        ]
        self.__setstate__({"state": {**self.state, **state}, "param_groups": groups})


class EightBitNested(EightBit):
    """bitsandbytes under FSDP: quantized state stands one level deeper in what is handed out."""

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        said["state"] = {i: {"step": s["step"], "quant": {k: v for k, v in s.items() if k != "step"}}
                         for i, s in said["state"].items()}  # fmt: skip
        return said

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        state = {i: {"step": s["step"], **s["quant"]} for i, s in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class Shampoo(Made):
    """Shampoo, SOAP, SPlus, LoRA-RITE: factors and eigenvectors, whose memory lies column by column."""

    def __init__(self, params: Any, *, listed: bool = False) -> None:
        super().__init__(params, {"lr": 0.05})
        self.listed = listed

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in params_of(self):
            s = self.state[p]
            grad = p.grad.reshape(len(p), -1)
            s.setdefault("factor", torch.eye(len(p))).lerp_(grad @ grad.T, 0.2)
            basis = torch.linalg.eigh(s["factor"]).eigenvectors
            if s.setdefault("step", 0) % 3 == 0:
                s["basis"] = [basis] if self.listed else basis
            s["step"] += 1
            used = s["basis"][0] if self.listed else s["basis"]
            p.sub_((used @ torch.tanh(used.T @ grad)).view_as(p), alpha=0.05)


class DistributedShampoo(Shampoo):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("Distributed Shampoo does not support state_dict(); use distributed_state_dict()")


class Foreign(Made):
    """Options and state of kinds that torch.save pickles."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.05, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                queue = s.setdefault("queue", deque(maxlen=3))
                queue.append(p.grad.clone())
                buffers = s.setdefault("buffers", {beta: torch.zeros_like(p) for beta in (0.0, 0.9, 0.99)})
                s["shape"] = p.shape
                for beta, buffer in buffers.items():
                    buffer.mul_(beta).add_(p.grad)
                p.sub_(sum(queue) + sum(buffers.values()), alpha=group["lr"] / 10)


class Norm(enum.Enum):
    SPECTRAL = 1


class Projector:
    """An object in the state: GaLore's."""


class Galore(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in params_of(self):
            self.state[p]["projector"] = Projector()
        return super().step(closure)


class Accelerated(Made):
    """accelerate.AcceleratedOptimizer: passes everything on and never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: Made) -> None:
        self.optimizer = optimizer
        self._is_overflow = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Several(Made):
    """Muon for matrices and AdamW for the rest, under one object: nobody can say which of them it stands for."""

    def __init__(self, *optimizers: Made) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        for each in self.optimizers:
            each.step(closure)


class Hollow(Made):
    """Never calls `Optimizer.__init__`, and holds nobody who does."""

    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params)}], {}


class OwnState(Accelerated):
    """torch_optimizer.Lookahead: a wrapper with slow weights in a `.state` of its own."""

    def __init__(self, optimizer: Made) -> None:
        super().__init__(optimizer)
        self.kept: dict[Any, Any] = {}

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.kept


class Averager:
    """Stands for torch's PeriodicModelAverager, which needs a process group."""

    def __init__(self) -> None:
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params: Any) -> None:
        self.step += 1
        if self.step % 4 == 0:
            for group in params:
                for p in group["params"]:
                    p.mul_(0.9)


def post_local(m: nn.Module) -> Made:
    return PostLocalSGDOptimizer(SGD(m.parameters(), lr=0.1, momentum=0.9), Averager())  # type: ignore[arg-type]


def both_hooks(m: nn.Module) -> Made:
    """State beside an optimizer that hooks of both directions carry."""
    optimizer: Any = SGD(m.parameters(), lr=0.1, momentum=0.9)
    optimizer.extra = 1.0
    optimizer.register_step_pre_hook(_decay)
    optimizer.register_state_dict_post_hook(lambda o, said: {**said, "extra": o.extra})
    optimizer.register_load_state_dict_pre_hook(_take_extra)
    return optimizer  # type: ignore[no-any-return]


def _decay(optimizer: Any, *_: Any) -> None:
    optimizer.extra *= 0.9
    optimizer.param_groups[0]["lr"] = 0.1 * optimizer.extra


def _take_extra(optimizer: Any, said: dict[str, Any]) -> None:
    optimizer.extra = said.pop("extra")


def flushing_hook(m: nn.Module) -> Made:
    """A pre-hook that brings `.state` up to date before it is read, and one that takes it back after a load."""
    optimizer: Any = AdamW(m.parameters(), lr=0.01)
    optimizer.pending = 0

    def flush(o: Any) -> None:
        for p in o.param_groups[0]["params"]:
            if p in o.state:
                o.state[p]["pending"] = o.pending

    def load(o: Any) -> None:
        o.pending = o.state[o.param_groups[0]["params"][0]]["pending"]

    def count(o: Any, *_: Any) -> None:
        o.pending += 1
        o.param_groups[0]["lr"] = 0.01 / o.pending

    optimizer.register_step_pre_hook(count)
    optimizer.register_state_dict_pre_hook(flush)
    optimizer.register_load_state_dict_post_hook(load)
    return optimizer  # type: ignore[no-any-return]


def casting_hook(m: nn.Module) -> Made:
    """Hands out copies of its moments on the CPU, in half the bytes: what is kept is what it has."""
    optimizer = AdamW(m.parameters(), lr=0.01)

    def cast(_: Any, said: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: v.bfloat16() if v.dim() else v.clone() for k, v in s.items()} for i, s in said["state"].items()}
        return {**said, "state": state}

    optimizer.register_state_dict_post_hook(cast)
    return optimizer


def unhooked(m: nn.Module) -> Made:
    """Its class got another `step` after it was made."""
    kind = type("Unhooked", (SGD,), {})
    optimizer = kind(m.parameters(), lr=0.1)
    kind.step = lambda *_: None  # type: ignore[attr-defined]
    return optimizer  # type: ignore[no-any-return]


def matrices(m: nn.Module) -> list[nn.Parameter]:
    return [p for p in m.parameters() if p.dim() == 2 and p.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module], Made]] = {
    "torch Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.01),
    "torch LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=4),
    "torch Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "torch ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "torch Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "torch NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "torch Adam maximize amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, maximize=True),
    "torch AdamW fused": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "torch Adam with a tensor as rate": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.01), foreach=False
    ),
    "torch AdamW with named parameters": lambda m: AdamW(m.named_parameters(), lr=0.01),
    "torch _NamedOptimizer": lambda m: _NamedOptimizer(dict(m.named_parameters()), AdamW, lr=0.01),  # type: ignore[arg-type]
    "torch PostLocalSGDOptimizer": post_local,
    "schedule-free": lambda m: ScheduleFree(m.parameters()),
    "a key in the state that is no parameter": lambda m: GlobalKey(m.parameters()),
    "state_dict of its own": lambda m: Lookahead(m.parameters()),
    "state_dict of its own, and momentum": lambda m: Lookahead(m.parameters(), momentum=0.9),
    "hooks of both directions": both_hooks,
    "a hook that flushes": flushing_hook,
    "a hook that hands out other bytes": casting_hook,
    "SAM": lambda m: Sam(m.parameters()),
    "SAM that shares its state": lambda m: Sam(m.parameters(), shared=True),
    "SAM that links at a load": lambda m: SamThatLinks(m.parameters()),
    "LookSAM": lambda m: LookSam(m.parameters()),
    "masters inside": lambda m: MixedPrecision(m.parameters()),
    "scaled moments in float32": lambda m: Scaled(m.parameters(), torch.float32),
    "scaled moments in bfloat16": lambda m: Scaled(m.parameters(), torch.bfloat16),
    "8 bit": lambda m: EightBit(m.parameters()),
    "8 bit, nested": lambda m: EightBitNested(m.parameters()),
    "eigenvectors": lambda m: Shampoo(m.parameters()),
    "a list of eigenvectors": lambda m: Shampoo(m.parameters(), listed=True),
    "deques, sizes, dtypes, keys of floats": lambda m: Foreign(
        m.parameters(), dtype=torch.bfloat16, device=torch.device("cpu"), spans={(0, 1): 0.5, None: 1.0}
    ),
    "accelerate": lambda m: Accelerated(AdamW(m.parameters(), lr=0.01)),
    "accelerate around another": lambda m: Accelerated(Accelerated(Lookahead(m.parameters()))),
    "accelerate around SAM": lambda m: Accelerated(Sam(m.parameters())),
}

# What is refused before training, and a part of the words.
REFUSED: dict[str, tuple[Callable[[nn.Module], Made], str]] = {
    "hands out, takes nothing": (lambda m: SaysOnly(m.parameters()), r"hands out k, and nothing takes it back \[optimizer\]"),
    "state_dict() that raises": (lambda m: DistributedShampoo(m.parameters()), r"use distributed_state_dict\(\) \[optimizer\]"),
    "a function as option": (lambda m: Foreign(m.parameters(), f=len), r"stored as a value \[optimizer.param_groups\[0\].f\]"),
    "an enumeration as option": (lambda m: Foreign(m.parameters(), n=Norm.SPECTRAL), r"Norm cannot .*param_groups\[0\].n\]"),
    "a wrapper of two": (
        lambda m: Several(SGD(matrices(m), lr=0.1), AdamW([p for p in m.parameters() if p.dim() == 1], lr=0.1)),
        r"Several never called Optimizer.__init__.*\[optimizer\]. Remedy: give what steps.*optimizers.0 and its .optimizers.1",
    ),
    "a step that calls no hooks": (unhooked, r"Unhooked has a step\(\) that calls no hooks"),
    "a wrapper without anything": (lambda m: Hollow(m.parameters()), r"let Hollow.__init__ call super\(\).__init__"),
    "a wrapper with its own state": (lambda m: OwnState(SGD(m.parameters(), lr=0.1)), r"OwnState.*\(its .optimizer\)"),
}  # fmt: skip
