"""Keeps which parameters are trained, which modules train, and how much dropout drops, where a loop changes that on the way.

A loop that thaws a layer at a step, or puts one into evaluation mode for good, does so once. A restart behind that step has nothing
to do there, and the layer would stay as the script makes it. So a version says what is not as it was when the run began, and a
restart changes it again where the script begins as that run did. Where it begins otherwise, it has decided by itself.

Modes are taken as they were at the last step of an optimizer: an evaluation may come between, and goes back to training before the
next step. All else is taken as it is at the save. A version of a run that changed nothing says nothing.

Loops without a line and frameworks with callbacks keep this themselves (`KEEPS_THEM`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import xxhash
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from holdfast.checkpoint.entries.entries import Collector, Loading, NotedPart

logger = logging.getLogger(__name__)

# An attribute of classes of objects that keep this themselves.
KEEPS_THEM = "holdfast_keeps_modes"
# What names have of wrappers, which may be others in the next run.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")

# Which parameters are trained and which modules train, a byte for each; the probabilities of dropout; and whose they are.
Modes: TypeAlias = dict[str, Any]


class ModesPart(NotedPart):
    """The modes of all modules of one rank; a checkpoint need not have them.

    Args:
        name: what its value is called.
        modules: by the names that they were given under.
        began: what `began` of an earlier part for the same modules was.

    Attributes:
        began: of each module, how it was when the run began.
    """

    def __init__(self, name: str, modules: Mapping[str, nn.Module], began: Mapping[str, Modes] | None) -> None:
        super().__init__(name)
        self._modules = {key: _Module(module) for key, module in modules.items()}
        self._again = began is not None
        self.began: dict[str, Modes] = {**{key: each.now() for key, each in self._modules.items()}, **(began or {})}

    def stepped(self) -> None:
        """An optimizer made a step, with the modules as they are."""
        for each in self._modules.values():
            each.stepped()

    def build(self, out: Collector) -> None:  # noqa: ARG002
        """Looks at what the modules hold now."""
        for each in self._modules.values():
            each.look()

    def report(self, out: Collector) -> None:
        """Adds what is not as it was when the run began."""
        now = {key: each.now() for key, each in self._modules.items()}
        changed = {key: {"began": self.began[key], "now": told} for key, told in now.items() if told != self.began[key]}
        if changed:
            out.value(self.name, changed)

    def plan(self, loading: Loading) -> None:
        """Claims it if it is there; of another number of ranks, what the first of them had."""
        self.restored = {}
        if loading.layouts.resolve(self.name)[0] in loading.values:
            self.restored = loading.claim_value(self.name, kind=dict) or {}
        elif states := loading.states_of_ranks(self.name):
            self.restored = states[0]

    def apply(self, loading: Loading) -> None:  # noqa: ARG002
        """Makes all modules what they were, where this run began as the one that saved."""
        for key, module in self._modules.items():
            own, saved = self.began[key], self.restored.get(key)
            if self._again:  # of this process, which may have changed more than the version knows
                module.put(own)
            if saved is None:
                continue
            began, now = saved["began"], saved["now"]
            changed = {each for each in now if now[each] != began.get(each)}
            if (
                began["of"] != own["of"]
                or any(began[each] != own[each] for each in changed)
                or not module.put(now, changed)
            ):
                logger.warning(
                    "before this version parameters of %s were frozen or thawed, or modules of it put into another mode; "
                    "this script makes it otherwise than the run that saved, so they stay as the script made them",
                    key,
                )
        self._again = True


class _Module:
    """One module, and all in it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._training: bytes | None = None
        self.look()

    def look(self) -> None:
        """Finds out what it holds."""
        parameters, modules = list(self._module.named_parameters()), list(self._module.named_modules())
        names = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._inner = [inner for name, inner in modules if name.rpartition(".")[2] not in _WRAPPERS]
        self._dropouts = [inner for inner in self._inner if isinstance(inner, _DropoutNd)]
        of = xxhash.xxh3_64_hexdigest("\n".join([*names, f"{len(self._inner)} {len(self._dropouts)}"]).encode())
        if vars(self).get("_of") != of:
            self._training = None
        self._of = of

    def stepped(self) -> None:
        """An optimizer made a step."""
        self._training = bytes([inner.training for inner in self._inner])

    def now(self) -> Modes:
        """Return its modes."""
        training = bytes([inner.training for inner in self._inner]) if self._training is None else self._training
        trained = bytes([parameter.requires_grad for parameter in self._parameters])
        return {
            "of": self._of,
            "trained": trained,
            "training": training,
            "dropout": [each.p for each in self._dropouts],
        }

    def put(self, modes: Modes, which: Collection[str] = ("trained", "training", "dropout")) -> bool:
        """Sets those of its modes that are named; tells whether they are those of such a module."""
        if modes["of"] != self._of:
            return False
        if "trained" in which:
            for parameter, trained in zip(self._parameters, modes["trained"], strict=True):
                if parameter.requires_grad is not bool(trained):
                    parameter.requires_grad_(bool(trained))
        if "training" in which:
            self._training = None
            for inner, training in zip(self._inner, modes["training"], strict=True):
                if inner.training is not bool(training):
                    inner.training = bool(training)
        if "dropout" in which:
            for each, probability in zip(self._dropouts, modes["dropout"], strict=True):
                each.p = probability
        return True
