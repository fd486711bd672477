"""Keeps what loaders of a validation have from one validation to the next one of another process.

A validation is made between two versions, so no place within it is needed. But workers that stay are made once, which draws a number,
and generators, datasets and samplers go on from one validation to the next. Called by `adapters.lightning.loops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.adapters.lightning.orders import generators_of
from holdfast.checkpoint.entries.rng import ProcessRandomness

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
        self._changed: dict[int, set[str]] = {}
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return whose workers stay and are made already, where generators are, and what datasets and samplers have counted."""
        if self._saved:  # no validation since
            return self._saved
        combined = self._loop._combined_loader
        loaders = combined.flattened if combined is not None else ()
        return {
            "stay": [_stays(loader) and loader._iterator is not None for loader in loaders],
            "generators": [generator.get_state() for generator in generators_of(combined)],
            "attributes": [each.state_dict() for each in self._attributes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next validation begins so."""
        self._saved = state

    @property
    def stay(self) -> bool:
        """Tell whether a loader has workers that stay."""
        combined = self._loop._combined_loader
        return combined is not None and any(map(_stays, combined.flattened))

    def begin(self) -> None:
        """Before each validation: in the first one of a run that goes on the loaders are as they were."""
        combined = self._loop._combined_loader
        if combined is not self._combined:
            self._combined = combined
            self._attributes = [
                DataAttributes(loader, self._changed.setdefault(number, set()), self._doubted)
                for number, loader in enumerate(combined.flattened)
            ]
        saved, self._saved = self._saved, {}
        if not saved:
            return
        now = ProcessRandomness().state_dict()
        for loader, stays in zip(combined.flattened, saved["stay"], strict=False):
            if stays and _stays(loader) and loader._iterator is None:
                iter(loader)
        for generator, state in zip(generators_of(combined), saved["generators"], strict=False):
            generator.set_state(state)
        for attributes, state in zip(self._attributes, saved.get("attributes", ()), strict=False):
            attributes.load_state_dict(state)
        ProcessRandomness().load_state_dict(now)


def _stays(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False))
