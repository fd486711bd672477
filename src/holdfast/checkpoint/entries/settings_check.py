"""Tells what a restart left otherwise than the run that saved had it: frozen parameters, evaluation modes, rates of dropout.

A loop that thaws a layer at a step does so once. A restart behind that step has nothing to do there, and the layer stays as the
script makes it: training ends otherwise, and nothing failed. So a version has the names of what was set otherwise since the
script began. Behind a restore the first step of their optimizer shows whether the script has done so again; what it has not is told by name.

What went back to how it began is set again and again, by the number of the step, as where two halves of a model take turns. Nothing
is told of it.

Settings count as they are at the steps of an optimizer: a loop over two models may freeze one while the other learns, and an evaluation is
over by then. Nothing is changed: what wraps a model behind `restore()` asks what is trained, and a script may have decided by itself.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from holdfast.base.terminal import some_of
from holdfast.checkpoint.entries.entries import Collector, Loading, TransientPart

logger = logging.getLogger(__name__)

# A module, and an attribute of it.
_Setting: TypeAlias = tuple[nn.Module, str]
_TRAINING = "training"
# A rate that is learned, or computed as a tensor.
_NO_NUMBER = -1.0


class SettingsCheck(TransientPart, ABC):
    """Compares one setting of what optimizers train; a checkpoint need not have it.

    Args:
        name: what its value is called.
        optimizers: returns those that make steps.
        began: what `began` of an earlier check of the same objects was.

    Attributes:
        began: the setting as the script began, by name of what has it.
        remedy: what keeps it, for a warning.
    """

    remedy: str

    def __init__(
        self, name: str, optimizers: Callable[[], Iterable[Optimizer]], began: Mapping[str, float] | None
    ) -> None:
        super().__init__(name)
        self.optimizers, self._again = optimizers, began is not None
        self.began: dict[str, float] = dict(began or {})
        # By optimizer, what it was at its last step, and how often it had changed then.
        self._seen: dict[int, tuple[list[float], int]] = {}
        self._changes = 0
        self._now: dict[str, float] = {}  # the same by name
        self._changed: dict[str, float | None] = {}  # of these, what is not as it began; None: it was, and went back
        self._offered: dict[str, float | None] = {}  # what the version that is being restored says
        self._due: dict[str, tuple[float, float]] = {}  # how it has what the restore found otherwise, and how that was

    @abstractmethod
    def of(self, optimizer: Optimizer) -> Sequence[Any]:
        """Returns what has the setting, and is trained by an optimizer."""

    @abstractmethod
    def settings(self, things: Sequence[Any]) -> list[float]:
        """Returns the setting of each."""

    @abstractmethod
    def called(self, thing: Any) -> str:
        """Returns the name of what has it; empty if there is none."""

    @abstractmethod
    def word(self, setting: float) -> str:
        """Returns what a setting is called."""

    def build(self, out: Collector) -> None:  # noqa: ARG002
        """Looks how that is set which was not there before."""
        for name, setting in self._all().items():
            self.began.setdefault(name, setting)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer made a step, with its settings as they are."""
        things = self.of(optimizer)
        settings = self.settings(things)
        if not self._due and self._seen.get(id(optimizer)) == (settings, self._changes):
            return
        now = {name: each for thing, each in zip(things, settings, strict=True) if (name := self.called(thing))}
        back = {name for name, each in now.items() if self._now.get(name, each) != each == self.began.get(name)}
        turns = dict.fromkeys({*back, *(name for name, each in self._changed.items() if each is None)})
        if now.items() - self._now.items():
            self._changes += 1  # another optimizer may have found it otherwise
        self._seen[id(optimizer)] = settings, self._changes
        self._now.update(now)
        changed = {name: each for name, each in self._now.items() if self.began.get(name, each) != each}
        self._changed = {**changed, **turns}
        due = {name: self._due.pop(name) for name in now.keys() & self._due.keys()}
        missed: dict[tuple[str, str], list[str]] = {}
        for name, (was, found) in due.items():
            if now[name] == found:  # nobody has set it since
                missed.setdefault((self.word(was), self.word(found)), []).append(name)
        for (was_then, is_now), names in missed.items():
            logger.warning(
                "%s: %s in the run that saved this version, %s since the restart. "
                "Training goes on otherwise, unless this changes at this very step. %s",
                some_of(sorted(names), 5),
                was_then,
                is_now,
                self.remedy,
            )

    def report(self, out: Collector) -> None:
        """Adds what is not as it was when the script began."""
        if self._changed:
            out.value(self.name, dict(self._changed))

    def plan(self, loading: Loading) -> None:
        """Claims it if it is there; of another number of ranks, what all of them had."""
        self._offered = {}
        if loading.layouts.resolve(self.name)[0] in loading.values:
            self._offered = dict(loading.claim_value(self.name, kind=dict) or {})
        for state in loading.states_of_ranks(self.name) or ():
            self._offered.update(state)

    def apply(self, loading: Loading) -> None:  # noqa: ARG002
        """Notes what is not as the version has it: the loop may do it again before the next step."""
        began = self.began if self._again else {}  # of this process, which may have changed more than the version knows
        saved = {name: each for name, each in {**began, **self._offered}.items() if each is not None}
        now = self._all()
        self._due = {name: (each, now[name]) for name, each in saved.items() if now.get(name, each) != each}
        self._again, self._seen = True, {}
        self._changed = dict(self._offered)
        self._now = {name: each for name, each in self._offered.items() if each is not None}

    def _all(self) -> dict[str, float]:
        things = [thing for optimizer in self.optimizers() for thing in self.of(optimizer)]
        named = zip(map(self.called, things), self.settings(things), strict=True)
        return {name: setting for name, setting in named if name}


class FrozenCheck(SettingsCheck):
    """Compares which parameters are trained: `requires_grad`."""

    remedy = (
        "No version keeps what is frozen: say it at every step by its number, as in layer.requires_grad_(step >= 100). "
        "A loop that does it once, at step 100, does not do it again"
    )
    _names: Mapping[int, str] = {}

    def build(self, out: Collector) -> None:
        """Looks at what the parameters are called too."""
        parameters = [p for optimizer in self.optimizers() for p in self.of(optimizer)]
        self._names = {id(p): out.owners[id(p)].entry for p in parameters if id(p) in out.owners}
        super().build(out)

    def of(self, optimizer: Optimizer) -> Sequence[torch.Tensor]:
        """Returns its parameters."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def settings(self, things: Sequence[torch.Tensor]) -> list[float]:
        """Returns whether each is trained."""
        return [p.requires_grad for p in things]

    def called(self, thing: torch.Tensor) -> str:
        """Returns the name of its entry."""
        return self._names.get(id(thing), "")

    def word(self, setting: float) -> str:
        return "trained" if setting else "frozen"


class ModesCheck(SettingsCheck):
    """Compares which modules are in evaluation mode, and how much of them dropout drops.

    Args:
        name: what its value is called.
        optimizers: returns those that make steps.
        began: what `began` of an earlier check of the same objects was.
        models: returns the modules of each model, by name.
    """

    remedy = (
        "No version keeps modes and rates of dropout: say them at every step by its number, as in layer.train(step < 100). "
        "A loop that does it once, at step 100, does not do it again; nor does one that lacks train() behind an evaluation"
    )

    def __init__(
        self,
        name: str,
        optimizers: Callable[[], Iterable[Optimizer]],
        began: Mapping[str, float] | None,
        models: Callable[[], Iterable[Mapping[str, nn.Module]]],
    ) -> None:
        super().__init__(name, optimizers, began)
        self._models = models
        self._names: dict[int, str] = {}
        # By optimizer, those of the models of which it trains parameters.
        self._of: dict[int, list[_Setting]] = {}

    def build(self, out: Collector) -> None:
        """Looks at which modules there are too."""
        models = list(self._models())
        self._names = {id(module): name for model in models for name, module in model.items()}
        owners = [{id(p) for module in model.values() for p in module.parameters(recurse=False)} for model in models]
        self._of = {
            id(optimizer): [
                setting
                for model, owned in zip(models, owners, strict=True)
                if any(id(p) in owned for group in optimizer.param_groups for p in group["params"])
                for module in model.values()
                for setting in _settings_of(module)
            ]
            for optimizer in self.optimizers()
        }
        super().build(out)

    def of(self, optimizer: Optimizer) -> Sequence[_Setting]:
        """Returns the settings of the models that it trains."""
        return self._of.get(id(optimizer), [])

    def settings(self, things: Sequence[_Setting]) -> list[float]:
        """Returns whether a module is in training mode, and the share that a dropout drops."""
        return [  # whatever class a module is
            getattr(module, name, True) if name is _TRAINING else _number(getattr(module, name, None))
            for module, name in things
        ]

    def called(self, thing: _Setting) -> str:
        """Returns the name of the module, and of the rate."""
        module, name = thing
        return self._names[id(module)] + ("" if name == _TRAINING else f".{name}")

    def word(self, setting: float) -> str:
        if isinstance(setting, bool):
            return "in training mode" if setting else "in evaluation mode"
        return "no plain number" if setting == _NO_NUMBER else f"{setting:g}"


def _number(value: object) -> float:
    """Returns a rate as a version can have it; of a tensor nothing is known, which may be on a device and is not waited for."""
    return float(value) if isinstance(value, Real) else _NO_NUMBER


def _settings_of(module: nn.Module) -> Iterator[_Setting]:
    yield module, _TRAINING
    if isinstance(module, _DropoutNd):
        yield module, "p"
