"""Keeps what loaders of a validation have from one validation to the next one of another process.

A validation is made between two versions, so no place within it is needed. But workers that stay are made once, which draws a number,
and go on with what they draw. Generators, datasets and samplers go on from one validation to the next too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.adapters.lightning.orders import generators_of
from holdfast.adapters.lightning.plain_loaders import draws_anew, notes_draws, stays
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.state.dataloader import LoaderPlace, place_of

STAYING = "workers of a validation that stay (persistent_workers)"


class ValidationLoaders:
    """The loaders of the validation of a fit, as an object with a state.

    Args:
        loop: Lightning's loop of the validation.
        doubted: called with the name of what a dataset or a sampler changes, and cannot be kept.
    """

    def __init__(self, loop: Any, doubted: Callable[[str], None]) -> None:
        self._loop, self._doubted = loop, doubted
        self._combined: Any = None
        self._attributes: list[DataAttributes] = []
        self._places: list[LoaderPlace | None] = []  # of those whose workers stay and note what they draw
        self._changed: dict[int, set[str]] = {}
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return whose workers stay and are made already, what these have drawn, where generators are, and what datasets and samplers have counted."""
        if self._saved:  # no validation since
            return self._saved
        combined = self._loop._combined_loader
        loaders = combined.flattened if combined is not None else ()
        return {
            "stay": [stays(loader) and loader._iterator is not None for loader in loaders],
            "workers": [place and place.workers_behind() for place in self._places],
            "generators": [generator.get_state() for generator in generators_of(combined)],
            "attributes": [each.state_dict() for each in self._attributes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next validation begins so."""
        self._saved = state

    @property
    def begin_anew(self) -> bool:
        """Tell whether a loader has workers that stay and do not note what they draw."""
        combined = self._loop._combined_loader
        return combined is not None and any(map(draws_anew, combined.flattened))

    def begin(self, *, anew: bool = False) -> None:
        """Before each validation: in the first one of a run that goes on the loaders are as they were.

        Args:
            anew: whether an undisturbed run has made them anew by now.
        """
        combined = self._loop._combined_loader
        if combined is not self._combined:
            self.let_go()
            self._combined = combined
            self._places = [place_of(loader) if notes_draws(loader) else None for loader in combined.flattened]
            self._attributes = [
                DataAttributes(loader, self._changed.setdefault(number, set()), self._doubted)
                for number, loader in enumerate(combined.flattened)
            ]
        saved, self._saved = self._saved, {}
        if not saved or anew:
            return
        now = ProcessRandomness().state_dict()
        workers = saved.get("workers") or [None] * len(saved["stay"])
        for loader, place, stayed, drawn in zip(combined.flattened, self._places, saved["stay"], workers, strict=False):
            if stayed and stays(loader) and loader._iterator is None:
                iter(loader) if place is None else place.stay_behind(drawn)
        for generator, state in zip(generators_of(combined), saved["generators"], strict=False):
            generator.set_state(state)
        for attributes, state in zip(self._attributes, saved.get("attributes", ()), strict=False):
            attributes.load_state_dict(state)
        ProcessRandomness().load_state_dict(now)

    def let_go(self) -> None:
        """The loaders are as they were."""
        for place in filter(None, self._places):
            place.let_go()
        self._places = []
