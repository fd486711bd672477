"""Values that live from step to step in a loop's own names: `step(number, batch=batch)` keeps them, `carry` gives them back.

They are nobody's state: a batch that was fetched already, the best loss so far, a running mean. What a step was given is part of every
version of that step; a restart asks for each by its name, behind `restore()`. A version without them fits all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import UsageError
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.entries.entries import Collector, Loading, NotedPart
from holdfast.checkpoint.entries.pytree import flatten, with_parts
from holdfast.tiers.format import values as value_codec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DEVICES = ":devices"  # no name: on which device each tensor was that was not in host memory


class CarriedPart(NotedPart):
    """The values of one rank, which are its own.

    Args:
        name: what their entries begin with.

    Attributes:
        asked: names that were asked for since.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: set[str] = set()
        self._value: dict[str, Any] = {}
        self._step = -1
        self._writes: list[tuple[torch.Tensor, int]] = []

    def begin(self) -> None:
        """A run begins, or goes back: everything is asked for again."""
        self.asked, self._value, self._writes, self._step = set(), {}, [], -1

    def take(self, name: str, value: Any) -> Any:
        """Returns what was restored under a name, on the devices where `value` is; `value` itself if there is nothing.

        Raises:
            UsageError: no identifier, asked for already, or a value that cannot be saved.
        """
        if not _NAME.match(name) or name in ("self", "step"):
            raise UsageError(
                f"a value cannot be called {name!r}", remedy="choose an identifier other than step and self"
            )
        if name in self.asked:
            raise UsageError("the value was asked for already", where=name, remedy="give every value its own name")
        value_codec.encode(flatten({name: value}, self.name, lambda path, _: value_codec.TensorRef(path)))
        self.asked.add(name)
        return _like(self.restored[name], value) if name in self.restored else value

    def keep(self) -> None:
        """Hand what was restored to the next save, if no step has told anything else."""
        self._value = self._value or dict(self.restored)

    def give(self, step: int, given: Mapping[str, Any]) -> None:
        """Notes the values after `step`.

        Raises:
            UsageError: other names than those that were asked for.
        """
        if given.keys() != self.asked:
            self._refuse(given)
        self._value, self._step = dict(given), step
        self._writes = []
        if given:
            flatten(self._value, self.name, self._note)

    def require(self, step: int, start: int) -> None:
        """A save of `step` begins. `start` is the first one behind the restore: the values of the step before are those
        that were restored.

        Raises:
            UsageError: the values after that step were not told.
        """
        if not self.asked or self._step == step:
            return
        if self._step == -1 and step == start - 1 and self.asked <= self.restored.keys():
            self.keep()
        else:
            names = ", ".join(sorted(self.asked))
            raise UsageError(
                f"step {step} is saved without the values that live on: {names}",
                remedy="call step() with them before save(), at the same step",
            )

    def why_changed(self) -> str:
        """Returns why the values after the last step are not there any more; empty if they are."""
        written = any(tensor._version != version for tensor, version in self._writes)
        return "a tensor that was passed to step() was written" if written else ""

    @property
    def forgotten(self) -> list[str]:
        """Lists the names that were restored and not asked for."""
        return sorted(self.restored.keys() - self.asked)

    def report(self, out: Collector) -> None:
        """Adds the values, with their tensors."""
        if not self._value:
            return
        devices: dict[str, str] = {}

        def note(path: str, tensor: torch.Tensor) -> None:
            if tensor.device.type != "cpu" and not isinstance(tensor, DTensor):
                devices[path] = accelerator.name_of(tensor.device)

        flatten(self._value, self.name, note)
        out.transient(self.name, {**self._value, **({_DEVICES: devices} if devices else {})})

    def plan(self, loading: Loading) -> None:
        """Claims them if they are there: in another layout they may be those of other ranks, and are left."""
        if self.offered(loading) is not None:
            loading.claim_value(self.name, kind=dict)

    def apply(self, loading: Loading) -> None:
        """Notes it, with its tensors on the devices on which they were."""
        super().apply(loading)
        devices = self.restored.pop(_DEVICES, {})
        self.restored = {name: _put(value, f"{self.name}.{name}", devices) for name, value in self.restored.items()}

    def _note(self, _: str, tensor: torch.Tensor) -> None:
        if not tensor.is_inference():
            self._writes.append((tensor, tensor._version))

    def _refuse(self, given: Mapping[str, Any]) -> None:
        lost, unasked = sorted(self.asked - given.keys()), sorted(given.keys() - self.asked)
        if unasked:
            name = unasked[0]
            raise UsageError(
                f"step() keeps {name!r}, and nobody asks for it after a restart",
                remedy=f"put {name} = checkpointer.carry({name!r}, {name}) behind restore()",
            )
        name = lost[0]
        raise UsageError(
            f"{name!r} was asked for by carry(), and step() does not keep it",
            remedy=f"pass it to every step: checkpointer.step(step, {name}={name})",
        )


def _put(saved: Any, path: str, devices: Mapping[str, str]) -> Any:
    """Returns what was saved under a path, with its tensors on `devices`, by their paths, as far as this process has such."""
    if isinstance(saved, torch.Tensor):
        there = devices.get(path, "cpu")
        return saved.to(there) if accelerator.offered(there.partition(":")[0]) is not None else saved
    return with_parts(saved, lambda key, part: _put(part, f"{path}.{key}", devices))


def _like(saved: Any, value: Any) -> Any:
    """Returns what was saved, with its tensors on the devices of what stands there now."""
    if isinstance(saved, torch.Tensor):
        return saved.to(value.device) if isinstance(value, torch.Tensor) else saved
    if isinstance(saved, list | tuple):
        now = dict(enumerate(value)) if isinstance(value, list | tuple) and len(value) == len(saved) else {}
    else:
        now = value if isinstance(value, dict) else {}
    return with_parts(saved, lambda key, part: _like(part, now.get(key)))
