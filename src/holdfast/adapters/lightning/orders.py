"""Draws the order of an epoch again, where a loader with a position reads rows by a sampler without one.

A `StatefulDataLoader` finds its place behind batches that it passes over, in the order that the sampler gives it then. A
sampler that draws (`WeightedRandomSampler`, or a shuffled one that Lightning shares out among ranks) would give another order. So the
random numbers of an epoch's first row are noted, and are there again when it is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.data

from holdfast.adapters.sampler_hook import hook
from holdfast.checkpoint.entries.rng import ProcessRandomness


class Order:
    """Tells how the order of an epoch was drawn.

    Args:
        sampler: of rows; its class becomes one that tells when it begins.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn: dict[str, Any] = {}
        self.again: dict[str, Any] | None = None  # how orders are to be drawn now; a loader on its way may draw twice
        hook(sampler, self._rows)

    def _rows(self, make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        again = self.again
        now, generator = ProcessRandomness().state_dict(), getattr(self._sampler, "generator", None)
        if again:
            ProcessRandomness().load_state_dict(again["random"])
            if generator is not None and again["generator"] is not None:
                generator.set_state(again["generator"])
        state = None if generator is None else generator.get_state()
        self.drawn = {"random": ProcessRandomness().state_dict(), "generator": state}
        rows = iter(make())
        first = list(itertools.islice(rows, 1))
        if again:
            ProcessRandomness().load_state_dict(now)
        yield from first
        yield from rows


def orders_of(loaders: Iterable[Any]) -> list[Order]:
    """Returns the orders of loaders that have a position, but samplers that have none."""
    samplers = [shared_out(loader) or _own(loader) for loader in loaders if hasattr(loader, "load_state_dict")]
    return [Order(sampler) for sampler in samplers if sampler is not None]


def shared_out(loader: Any) -> Any:
    """Returns the sampler that Lightning shares out among ranks; None if there is none."""
    for sampler in samplers_of(loader):
        if any(kind.__name__ == "DistributedSamplerWrapper" for kind in type(sampler).__mro__):
            return getattr(sampler.dataset, "_sampler", None)
    return None


def _own(loader: Any) -> Any:
    for sampler in samplers_of(loader):
        if isinstance(sampler, torch.utils.data.Sampler):
            has_place = hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata.")
            return None if has_place else sampler
    return None


def samplers_of(loader: Any) -> tuple[Any, Any, Any]:
    """Returns what gives the rows, the nearest to them first; None where there is nothing."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None), batches, getattr(loader, "sampler", None)


def generators_of(combined: Any) -> list[torch.Generator]:
    """Returns the generators that loaders, or their samplers, have for themselves; each once.

    Args:
        combined: Lightning's `CombinedLoader` of them; None if it is not made.
    """
    found: dict[int, torch.Generator] = {}
    for loader in combined.flattened if combined is not None else ():
        for owner in (loader, *samplers_of(loader), shared_out(loader)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
