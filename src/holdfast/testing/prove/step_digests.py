"""Digests of what a step of an optimizer left: parameters, all that it keeps, buffers of its modules; nothing is changed.

Names are for people: they are found in the modules that are alive when the optimizer steps first. What a script keeps elsewhere
(a tensor in a global, the position of a loader) is not looked at: it shows as soon as a parameter depends on it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.entries.sharding import local_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class OptimizerParts:
    """The parts of one optimizer; neither it nor its modules are kept alive.

    Args:
        optimizer: one that has just stepped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = [id(parameter) for parameter in _parameters(optimizer)]
        found = _roots(set(self._parameters))
        self._roots = [weakref.ref(root) for root in found]
        self._names: dict[int, str] = {}
        for root in found:
            for name, parameter in root.named_parameters():
                self._names.setdefault(id(parameter), name)
        self.label = f"{type(optimizer).__name__} with {len(self._parameters)} parameters"

    def fits(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer still has the parameters that it had."""
        return self._parameters == [id(parameter) for parameter in _parameters(optimizer)]

    @torch.no_grad()
    def look(self, optimizer: Optimizer) -> list[tuple[str, bytes]]:
        """Returns name and digest of each part, in an order that is the same in every run."""
        found: list[tuple[str, bytes]] = []
        for number, parameter in enumerate(_parameters(optimizer)):
            name = self._names.get(id(parameter), f"parameter {number}")
            found.append((name, digest(parameter)))
            state = optimizer.state.get(parameter, {})
            if isinstance(state, dict):
                found += [(f"{key} of {name}", digest(state[key])) for key in sorted(state, key=str)]
            else:
                found.append((f"the state of {name}", digest(state)))
        for number, group in enumerate(optimizer.param_groups):
            rest = {key: value for key, value in group.items() if key != "params"}
            found.append((f"settings of group {number} ({', '.join(sorted(map(str, rest))[:4])}, ...)", digest(rest)))
        roots = [root for ref in self._roots if (root := ref()) is not None]
        for root in roots:
            found += [(f"buffer {name}", digest(buffer)) for name, buffer in root.named_buffers()]
        return found


def digest(value: Any) -> bytes:
    """Returns 8 bytes of a value: tensors by their bytes, numbers and texts as they are; of other objects the class alone."""
    hasher = xxhash.xxh3_64()
    for part in _bytes(value):
        hasher.update(part)
    return hasher.digest()


def random_digest() -> bytes:
    """Returns 8 bytes of PyTorch's generator of random numbers of the processor: of others nobody knows who draws from them."""
    return digest(torch.get_rng_state())


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _roots(parameters: set[int]) -> list[nn.Module]:
    """Returns the modules that have any of these parameters and lie in no other module, in the order in which they were made."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_modules" in vars(thing)]
    having = [module for module in modules if any(id(parameter) in parameters for parameter in module.parameters())]
    inside = {id(child) for module in having for child in module.children()}
    return [module for module in having if id(module) not in inside]


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield _of_tensor(value)
    elif isinstance(value, _PLAIN):
        yield f"{type(value).__name__}{value!r}".encode()
    elif isinstance(value, dict):
        yield b"{"
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _bytes(value[key])
    elif isinstance(value, list | tuple):
        yield b"["
        for part in value:
            yield from _bytes(part)
    else:
        yield type(value).__qualname__.encode()


def _of_tensor(tensor: torch.Tensor) -> bytes:
    try:
        local = local_of(tensor).detach()
        if local.layout is not torch.strided:
            local = local.to_dense()
        data = local.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return data.numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError) as error:  # a class of its own, or without memory
        return type(error).__name__.encode()
