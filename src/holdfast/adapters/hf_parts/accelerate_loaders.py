"""Tells where loaders that Accelerate prepared are, so that a run that goes on reads the rows that an undisturbed one
would.

A script that goes on within an epoch skips the batches that were trained (`accelerator.skip_first_batches`). That gives the right
rows only if the epoch has the order that it had: the order is drawn when an epoch begins, from random numbers of that moment. So
these are noted in every sampler, at the first row of an epoch; a run that goes on within the epoch begins it with them, and
takes those of the version when the first row is drawn.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.data

from holdfast.adapters.hf_parts.samplers import Samplers
from holdfast.adapters.sampler_hook import hook
from holdfast.base import config as settings
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries import living_gradients
from holdfast.checkpoint.entries.rng import ProcessRandomness

logger = logging.getLogger(__name__)


class Loaders:
    """The loaders of an Accelerator, as an object with a state.

    Args:
        accelerator: after `prepare`.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._begun = [_Beginning(loader, accelerator.gradient_state) for loader in accelerator._dataloaders]
        if settings.is_restart():
            self._name_behind_others()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and place of every loader, random numbers, and the count of batches that are accumulated.

        Raises:
            UsageError: gradients are being added up that no version can have.
        """
        states = [begun.state() for begun in self._begun]
        parameters = [] if self._accelerator.sync_gradients else self._parameters()
        if living_gradients.there_are(parameters) and living_gradients.why_not(parameters):
            raise UsageError(
                "a step was reported within an accumulation, and its gradients cannot be saved: they are cut in another way, or "
                "have more than 64 MiB",
                remedy="report steps where accelerator.sync_gradients is true",
            )
        random = ProcessRandomness().state_dict()
        return {"loaders": states, "batches": self._accelerator.step, "random": random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each loader's next epoch is the one that the version was in, or that would have followed."""
        self._accelerator.step = state["batches"]
        if state.get("gradients"):
            logger.warning(
                "gradients were being added up when this version was saved by an older release, and are lost"
            )
        self._name_behind_others()
        for begun, of_one in zip(self._begun, state["loaders"], strict=False):
            begun.load(of_one, state["random"])

    def _parameters(self) -> list[torch.Tensor]:
        groups = (group for each in self._accelerator._optimizers for group in each.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def _name_behind_others(self) -> None:
        """Accelerate counts its own saves, and stops where the directory of a number exists; a new process would begin with 0."""
        project = self._accelerator.project_configuration
        if not (project.automatic_checkpoint_naming and self._accelerator.project_dir):
            return
        places = glob.glob(os.path.join(glob.escape(self._accelerator.project_dir), "checkpoints", "checkpoint_*"))
        numbers = [int(number) for place in places if (number := place.rpartition("_")[2]).isdecimal()]
        project.iteration = max([project.iteration, *(number + 1 for number in numbers)])


class _Beginning:
    """Holds how the epoch of a loader began.

    Args:
        loader: one that Accelerate prepared.
        gradients: Accelerate's `GradientState`, which knows the loader that is being read.
    """

    def __init__(self, loader: Any, gradients: Any) -> None:
        self._loader = loader
        self._gradients = gradients
        self._sampler = _sampler_of(loader)
        self._samplers = Samplers(loader)
        self._then: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._is_left = False  # who read it stopped before its end, of which Accelerate hears nothing
        if self._sampler is not None:
            hook(self._sampler, self.rows)
            if _has_begun(loader) and isinstance(self._sampler, torch.utils.data.RandomSampler):
                logger.warning(
                    "accelerator.prepare drew the order of the first epoch for the workers of a stateful loader: a run that goes on "
                    "within that epoch reads other rows; without workers, or with skip_first_batches instead, it reads the same"
                )

    def state(self) -> dict[str, Any]:
        """The place; within an epoch also how that began."""
        reading = self._reading()
        ended = reading is not None and bool(reading.end_of_dataloader)
        loader = self._loader if reading is None else reading
        state = {
            "iteration": getattr(loader, "iteration", 0) + ended,
            "within": reading is not None and not ended,
            "samplers": self._samplers.state_dict() if reading is None or ended else {},
            "begun": self._then if reading is not None and not ended else {},
        }
        if getattr(loader, "use_stateful_dataloader", False):
            state["position"] = loader.state_dict()
        return state

    def load(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """The next epoch is the one that was broken off, or the one behind it."""
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = state["iteration"]
        if "position" in state and (state["within"] or state["iteration"]):
            self._place(state["position"], within=state["within"])
        self._put(state)
        self._resumed = {**state["begun"], "now": random} if state["within"] else None

    def _place(self, position: dict[str, Any], *, within: bool) -> None:
        """Puts a stateful loader there; between two epochs the next one makes an iterator of its own, and that draws.

        The iterator that such a loader was made with is for its first epoch alone. Data that nobody lists may keep a place
        beyond an epoch, and takes it from an iterator at its end; the numbers that this one draws are put back. Data without
        a state (Accelerate's shard for several ranks hides one) would be read as far as its last batch instead, and left there:
        the next epoch would be empty. It begins an epoch as the script made it.
        """
        if within:
            self._loader.load_state_dict(position)
            return
        data = self._loader.dataset
        if isinstance(data, torch.utils.data.IterableDataset) and hasattr(data, "load_state_dict"):
            random = ProcessRandomness().state_dict()
            self._loader.load_state_dict(position)
            self._loader.base_dataloader.state_dict()
            ProcessRandomness().load_state_dict(random)
        self._loader.load_state_dict({})

    def rows(self, make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yield what the sampler draws, in an epoch that begins now or went on elsewhere."""
        resumed, self._resumed = self._resumed, None
        self._is_left = False
        if resumed is not None and "random" in resumed:
            ProcessRandomness().load_state_dict(resumed["random"])
            self._put(resumed)
        self._then = {"random": ProcessRandomness().state_dict(), "samplers": self._samplers.state_dict()}
        rows = iter(make())
        first = list(itertools.islice(rows, 1))  # data that nobody lists have None for every row
        if resumed is not None:
            ProcessRandomness().load_state_dict(resumed["now"])
        try:
            yield from first
            yield from rows
        except GeneratorExit:
            self._is_left = True
            raise
        reading = self._reading()
        if reading is not None and reading is not self._loader:  # one that skips, which counts for itself alone
            self._loader.iteration = reading.iteration + 1

    def _reading(self) -> Any:
        """This loader or one that skips batches of it, if it is being read now; several may be, side by side or in each other."""
        for each in () if self._is_left else reversed(self._gradients.dataloader_references):
            if each is not None and (each is self._loader or (self._sampler and _sampler_of(each) is self._sampler)):
                return each
        return None

    def _put(self, state: dict[str, Any]) -> None:
        """Gives the samplers what they had; versions of 0.1 say only the generator of the innermost one."""
        generator = getattr(self._sampler, "generator", None)
        if isinstance(generator, torch.Generator) and state.get("generator") is not None:
            generator.set_state(state["generator"])
        self._samplers.load_state_dict(state.get("samplers", {}))


def _has_begun(loader: Any) -> bool:
    """Return whether workers read the first epoch already: a stateful loader has an iterator from the beginning."""
    iterator = getattr(getattr(loader, "base_dataloader", None), "_iterator", None)
    return iterator is not None and getattr(loader, "num_workers", 0) > 0


def _sampler_of(loader: Any) -> Any:
    """Returns the sampler of single rows below whatever stands around it, or of batches that the script wrote; None for data without one."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if sampler is None:  # batches that a sampler in the place of one for rows makes
        sampler = getattr(loader, "sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    found = getattr(sampler, "sampler", None)
    if not isinstance(found, torch.utils.data.Sampler):
        found = sampler
    return found if isinstance(found, torch.utils.data.Sampler) else None
