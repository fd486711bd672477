"""Tells what a restart left frozen, or trained, that was otherwise in the run that saved.

A loop that thaws a layer at a step does so once. A restart behind that step has nothing to do there, and the layer stays as the
script makes it: training ends otherwise, and nothing failed. So a version has the names of the parameters that were frozen or thawed since the
script began. Behind a restore the first step of their optimizer shows whether the script has done so again; what it has not is told by name.

A parameter that went back to how it began is set again and again, by the number of the step, as where two halves of a model take turns. Nothing
is told of it.

Parameters count as they are at the steps of their optimizer: a loop over two models may freeze one while the other learns. Nothing is
changed: what wraps a model behind `restore()` asks what is trained, and a script may have decided by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.optim import Optimizer

from holdfast.base.terminal import some_of
from holdfast.checkpoint.entries.entries import Collector, Loading, TransientPart

logger = logging.getLogger(__name__)


class FrozenCheck(TransientPart):
    """Compares which parameters of all optimizers are trained; a checkpoint need not have it.

    Args:
        name: what its value is called.
        optimizers: returns those that make steps.
        began: what `began` of an earlier check of the same parameters was.

    Attributes:
        began: whether a parameter was trained when the script began, by the name of its entry.
    """

    def __init__(
        self, name: str, optimizers: Callable[[], Iterable[Optimizer]], began: Mapping[str, bool] | None
    ) -> None:
        super().__init__(name)
        self._optimizers, self._again = optimizers, began is not None
        self.began = dict(began or {})
        self._names: dict[int, str] = {}  # of parameters, by id
        self._seen: dict[int, list[bool]] = {}  # by optimizer, whether each parameter was trained at its last step
        self._trained: dict[str, bool] = {}  # the same by name
        self._changed: dict[str, bool | None] = {}  # of these, what is not as it began; None: it was, and went back
        self._offered: dict[str, bool | None] = {}  # what the version that is being restored says
        self._due: dict[str, bool] = {}  # how it has them that the restore found otherwise

    def build(self, out: Collector) -> None:
        """Looks at what the parameters are called, and how those are that were not there before."""
        parameters = self._parameters()
        self._names = {id(p): out.owners[id(p)].entry for p in parameters if id(p) in out.owners}
        for parameter in parameters:
            if name := self._names.get(id(parameter)):
                self.began.setdefault(name, parameter.requires_grad)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer made a step, with its parameters as they are."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p.requires_grad for p in parameters]
        if not self._due and trained == self._seen.get(id(optimizer)):
            return
        self._seen[id(optimizer)] = trained
        now = {name: each for p, each in zip(parameters, trained, strict=True) if (name := self._names.get(id(p)))}
        back = {name for name, each in now.items() if self._trained.get(name, each) != each == self.began.get(name)}
        turns = dict.fromkeys({*back, *(name for name, each in self._changed.items() if each is None)})
        self._trained.update(now)
        changed = {name: each for name, each in self._trained.items() if self.began.get(name, each) != each}
        self._changed = {**changed, **turns}
        due = {name: self._due.pop(name) for name in now.keys() & self._due.keys()}
        if missed := sorted(name for name, each in due.items() if now[name] != each):
            was, is_now = ("trained", "frozen") if due[missed[0]] else ("frozen", "trained")
            logger.warning(
                "%s: %s in the run that saved this version, %s since the restart, so training goes on otherwise. "
                "No version keeps what is frozen: say it at every step by its number, as in "
                "layer.requires_grad_(step >= 100). A loop that does it once, at step 100, does not do it again",
                some_of(missed, 5),
                was,
                is_now,
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
        saved: dict[str, bool | None] = {**began, **self._offered}
        now = {name: p.requires_grad for p in self._parameters() if (name := self._names.get(id(p)))}
        self._due = {name: each for name, each in saved.items() if each is not None and now.get(name, each) != each}
        self._again, self._seen = True, {}
        self._changed = dict(self._offered)
        self._trained = {name: each for name, each in self._offered.items() if each is not None}

    def _parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self._optimizers() for group in optimizer.param_groups for p in group["params"]]
