"""Keeps the places of plain data loaders of a fit, which say none themselves, and tells what cannot be right.

Each loader is counted by `checkpoint.state.dataloader`: behind a restart within an epoch its order is drawn again with the random numbers
that the epoch began with, and what was had is left out. Lightning goes over several loaders at one time, and
over some again within an epoch; what of that has no place is told at the start. Workers that stay note what they draw, within an epoch
and behind it; others load again what was had.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.adapters.lightning.data_attributes import DataAttributes
from holdfast.checkpoint.loader_workers.worker_draws import has_no_order, why_not
from holdfast.checkpoint.state.dataloader import LoaderPlace, is_plain, place_of
from holdfast.checkpoint.state.stateful import is_stateful

logger = logging.getLogger(__name__)

_STEP_BY_STEP = (
    "%s drawn step by step, with random numbers that steps use too: a restart within an epoch trains on other batches; "
    "a generator of its own keeps them"
)
CHANGES = "the loader's %s changes and is not kept, so a restart may train on other batches"
_ANEW = "a restart within an epoch begins its data anew, and trains on other batches"


class PlainLoaders:
    """The places of the plain ones among the loaders of a fit, in their order.

    Args:
        tells: whether this process speaks for the job.
    """

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells
        self._places: list[LoaderPlace] = []
        self._told: set[str] = set()
        self._changed: dict[int, set[str]] = {}
        self._others: list[DataAttributes] = []

    def count(self, loaders: Sequence[Any]) -> None:
        """These are the loaders, of all kinds, of which no iterator was made; from now on those of plain ones are counted."""
        self.let_go()
        self._places = [place_of(loader) for loader in loaders if is_plain(loader)]
        for number, place in enumerate(self._places):
            place.loads_again = not notes_draws(place.loader)
            place.doubted = functools.partial(self.tell, _STEP_BY_STEP)
            changed = self._changed.setdefault(number, set())
            place.more = DataAttributes(place.loader, changed, functools.partial(self.tell, CHANGES))
        self._others = [
            DataAttributes(loader, set(), functools.partial(self.tell, CHANGES), keeps=False)
            for loader in loaders
            if is_stateful(loader)
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return where they are within an epoch."""
        for each in self._others:
            each.state_dict()  # tells of what changes
        return [place.state_dict() for place in self._places]

    def behind(self) -> list[list[Any]]:
        """Return what they depend on between two epochs."""
        return [place.behind() for place in self._places]

    def begin_behind(self, states: Sequence[list[Any]]) -> None:
        """The next iterator of each begins as behind the epoch before."""
        for place, state in zip(self._places, states, strict=False):
            place.begin_behind(state)

    def workers_behind(self) -> list[dict[str, Any] | None]:
        """Return what workers that stay have drawn between two epochs."""
        return [place.workers_behind() for place in self._places]

    def stay_behind(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Workers that stay go on behind the epoch before with what these had drawn."""
        for number, place in enumerate(self._places):
            if notes_draws(place.loader):
                place.stay_behind(states[number] if number < len(states) else None)

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """The next iterator of each goes on there."""
        if len(states) != len(self._places):
            logger.warning("%s: the version has the places of %d loaders, of %d", _ANEW, len(states), len(self._places))
            return
        for place, state in zip(self._places, states, strict=True):
            place.load_state_dict(state)

    def let_go(self) -> None:
        """Count no more: another training of the script is not to go on with these places."""
        for place in self._places:
            place.let_go()
        self._places, self._others = [], []

    def tell(self, why: str, what: str) -> None:
        """Warn of one thing, once."""
        if self._tells and what not in self._told:
            self._told.add(what)
            logger.warning(why, what)


def stays(loader: Any) -> bool:
    """Tell whether a loader has workers that stay."""
    return bool(getattr(loader, "num_workers", 0) and getattr(loader, "persistent_workers", False))


def notes_draws(loader: Any) -> bool:
    """Tell whether a loader has workers that stay and can note what they draw."""
    return (
        stays(loader) and is_plain(loader) and not isinstance(loader.dataset, IterableDataset) and not why_not(loader)
    )


def draws_anew(loader: Any) -> bool:
    """Tell whether a loader has workers that stay, and what they draw by themselves begins anew behind a restart."""
    return stays(loader) and not notes_draws(loader)


def doubts_of(loaders: Sequence[Any], mode: str, *, has_length: bool, takes_itself: bool) -> list[str]:
    """Returns why a restart within an epoch could take other batches than a run that was never interrupted; each once.

    Args:
        loaders: of a fit.
        mode: how Lightning goes over several.
        has_length: whether it is known how many batches an epoch has.
        takes_itself: whether the training step takes batches from the iterator itself.
    """
    found = [
        f"{_ANEW}: a {type(loader).__name__} says no place; torchdata.stateful_dataloader.StatefulDataLoader does"
        for loader in loaders
        if not is_stateful(loader) and not is_plain(loader)
    ]
    at_one_time = "a restart within an epoch may train on other batches"
    if len(loaders) > 1 and mode == "max_size":
        found.append(f"{at_one_time}, once the shortest of the loaders has ended: the mode is max_size")
    elif len(loaders) > 1 and mode == "max_size_cycle" and not has_length:
        found.append(f"{at_one_time}, once the shortest of the loaders has ended: nobody knows how long they are")
    if len({id(loader) for loader in loaders}) < len(loaders):
        found.append(f"{at_one_time}: one loader is given twice")
    if takes_itself:
        found.append(f"{at_one_time}, if the training step takes batches ahead from its dataloader_iter")
    if any(is_plain(each) and has_no_order(each) for each in loaders):
        found.append(f"{at_one_time}: workers hand out batches in no order (in_order=False), some of them twice then")
    if any(isinstance(each, DataLoader) and draws_anew(each) for each in loaders):
        found.append("what workers that stay (persistent_workers) draw by themselves is drawn anew behind a restart")
    return list(dict.fromkeys(found))
