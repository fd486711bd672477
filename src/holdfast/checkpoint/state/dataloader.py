"""The place in the data of a plain `torch.utils.data.DataLoader`, which says nothing of it: `Checkpointer(..., loader=loader)`.

What its iterators hand out is counted, and what they began with is kept: the generators of random numbers of the process and of the sampler,
also as they drew their order, if others have drawn in between.
After a restart the first iterator begins with these again and goes on at its place: of a map-style dataset the sampler's order is
replayed and nothing is loaded that was had already; of an iterable one as many batches are loaded and dropped. Then the generators are as
they were before. That the order is the same is proven by a digest of the indices, or it is said.

Workers that stay are made once, and that draws a number. Where the run that saved had made them, a restart makes them before the generators
are as its next epoch found them.

What workers draw themselves is noted by them (`worker_draws`), unless what was had is loaded again (`loads_again`). Of several
iterators at one time the place is that of the newest.

Loaders may share a generator. What another one drew since it went on at its place, or for an epoch that it began since and is in, stays
when a place is taken up. Of an epoch that is over, or that has no order yet, only the script knows whether it has it again: what was drawn
for that is undone and told.

Nothing here may be part of a cycle of references with an iterator that has workers: it would be ended by the garbage collector, which
ends its queues first, and torch would wait five seconds for each worker.
"""

from __future__ import annotations

import itertools
import logging
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, sampler
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler, _SingleProcessDataLoaderIter

from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.loader_workers import worker_draws
from holdfast.checkpoint.state.optimizer_extras import same
from holdfast.checkpoint.state.stateful import Stateful

logger = logging.getLogger(__name__)

# Beside what a loader hands out of its place: the states of its generators.
_GENERATORS = "holdfast.generators"
# Under which attribute a loader keeps what knows its place.
_PLACE = "_holdfast_place"
# All places: their loaders may share generators.
_PLACES: weakref.WeakSet[LoaderPlace | OwnPlace] = weakref.WeakSet()
# In a loader that hands out its place: whether it has gone on at one since the restart.
_WENT_ON = "_holdfast_went_on"
# Who draws between two batches does so at the second one, or at one soon behind it.
_WATCHED = 64
_NO_ORDER = (
    "the loader goes on after %d batches, but its workers hand them out in no order (in_order=False): a part of this epoch may be had twice, "
    "and another part not at all"
)
_SHARED = (
    "a loader goes on at its place and shares its generator with another loader, which has begun an epoch since the restart: what that one drew "
    "is undone, so the orders of later epochs may not be those of the run that saved; give each loader a generator of its own"
)
# Samplers that draw everything before their first index.
_AT_ONCE = (
    sampler.SequentialSampler,
    sampler.RandomSampler,
    sampler.SubsetRandomSampler,
    sampler.WeightedRandomSampler,
    DistributedSampler,
    _InfiniteConstantSampler,
)


def is_plain(value: Any) -> bool:
    """Tell whether a value is a loader that hands out no state of its own, and makes iterators as torch's does."""
    return (
        isinstance(value, DataLoader)
        and not hasattr(value, "state_dict")
        and type(value).__iter__ is DataLoader.__iter__
        and hasattr(value, "_get_iterator")
    )


def draws_itself(value: Any) -> bool:
    """Tell whether a value is a loader that hands out its place (`StatefulDataLoader`) and has generators of its own."""
    is_loader = isinstance(value, DataLoader) and hasattr(value, "load_state_dict") and hasattr(value, "_get_iterator")
    return is_loader and bool(_generators_of(value))


class OwnPlace:
    """A loader that hands out its place, with its generators, as an object with a state.

    Such a loader goes on at its place by beginning the epoch again. Without workers its generators are then where the epoch began, and
    the next epoch would have another order. So they are put back behind the first iterator.
    """

    # Whether an iterator has begun since the restart that goes on at no place: this loader does not say.
    began_anew = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        _PLACES.add(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what the loader hands out, and the generators behind it: to ask may make an iterator, which draws."""
        state = dict(self._loader.state_dict())
        return {**state, _GENERATORS: [each.get_state() for each in _generators_of(self._loader)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on there. Versions of before say nothing of generators."""
        vars(self._loader).pop("_get_iterator", None)
        self._loader.load_state_dict({key: value for key, value in state.items() if key != _GENERATORS})
        states = state.get(_GENERATORS) or []
        make = self._loader._get_iterator
        vars(self._loader)[_WENT_ON] = False  # there, for a later restore in this process makes another one of these

        def made() -> Any:
            vars(self._loader).pop("_get_iterator", None)
            generators = _generators_of(self._loader)
            before = [generator.get_state() for generator in generators]
            iterator = make()
            for generator, of_one in zip(generators, states, strict=False):
                generator.set_state(of_one)
            _keep_draws_of_others(self._loader, generators, before, states)
            vars(self._loader)[_WENT_ON] = True
            return iterator

        if states:
            vars(self._loader)["_get_iterator"] = made

    def shares(self, generator: torch.Generator, other: object) -> bool:
        """Tell whether the loader draws from a generator, and is not `other`."""
        return self._loader is not other and any(each is generator for each in _generators_of(self._loader))

    def has_drawn_on(self) -> bool:
        """Tell whether all that the loader drew since the restart was drawn behind the save."""
        return bool(vars(self._loader).get(_WENT_ON))


def _generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader or its samplers have for themselves, each once."""
    parts = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _keep_draws_of_others(
    loader: DataLoader[Any], generators: list[torch.Generator], before: list[Any], saved: list[Any]
) -> None:
    """Leaves generators that another loader has drawn from as they were `before` this `loader` went on at its place."""
    for generator, here, then in zip(generators, before, saved, strict=False):
        others = [place for place in _places() if place.shares(generator, loader)]
        if any(place.has_drawn_on() for place in others):
            generator.set_state(here)
        elif any(place.began_anew for place in others) and not torch.equal(here, then):
            logger.warning(_SHARED)


def _places() -> list[LoaderPlace | OwnPlace]:
    while True:
        try:
            return list(_PLACES)
        except RuntimeError:  # another thread has made one meanwhile
            continue


def place_of(loader: DataLoader[Any]) -> LoaderPlace:
    """Returns what knows the place of a loader; from the first call on its iterators are counted."""
    known = vars(loader).get(_PLACE)
    if known is None:
        known = vars(loader)[_PLACE] = LoaderPlace(loader)
    assert isinstance(known, LoaderPlace)
    return known


class LoaderPlace:
    """The place in the newest iterator of one loader, as an object with a state.

    Args:
        loader: the loader; its iterators are made by us from now on.

    Attributes:
        loads_again: whether workers load again what was had, for what they draw by themselves.
        doubted: called with what is drawn between two batches, with random numbers that steps use too; None: nobody looks.
        more: an object with a state that the loader's order and items depend on besides; None: there is none.
        began_anew: whether an iterator has begun since the restart that goes on at no place.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self.loads_again = False
        self.doubted: Callable[[str], None] | None = None
        self.more: Stateful | None = None
        self._own_make = vars(loader).get("_get_iterator")
        vars(loader)["_get_iterator"] = self._iterator
        self._newest: weakref.ref[_Counted] | None = None
        self._had, self._order, self._began = 0, "", dict[str, Any]()
        self._ready: dict[str, Any] | None = (
            None  # all generators, once the newest iterator was made; None: it has drawn
        )
        self.began_anew = False
        self._went_on = False  # an iterator has begun at the place that was restored
        self._again = False  # the newest iterator is one that stays, and has begun another time
        self._stays = False  # there is one that stays, or was in the run that saved
        self._saved: dict[str, Any] = {}
        self._workers: dict[str, Any] | None = (
            None  # what those of the run that saved had drawn; None: nobody takes it over
        )
        self._drawn: dict[str, Any] | None = None  # by the workers of the newest iterator, when it was asked last
        self._told_left = False
        self._told = False  # of what workers keep and nobody notes
        _PLACES.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the loader has a place of its own."""
        return LoaderPlace, (self.loader,)

    @property
    def loader(self) -> DataLoader[Any]:
        """Return the loader, which whoever goes over it holds."""
        loader = self._loader()
        assert loader is not None
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Batches that were had of the newest iterator, what it began with, and the generators of the sampler now.

        No iterator, or one that has ended or that nobody holds any more: nothing was had.
        """
        if self._saved:  # restored, and no iterator was made since
            return self._saved
        newest = self._newest() if self._newest is not None else None
        if newest is None and self._newest is not None:  # a loop has left it for good: the next one begins anew
            self._had, self._order, self._began = 0, "", {}
        kept = [_Counted(self)]  # what holds it and a name, as where only the loader holds one whose workers stay
        alone = kept[0]
        if (
            self._had
            and newest is vars(self.loader).get("_iterator")
            and sys.getrefcount(newest) <= sys.getrefcount(alone)
        ):
            self._tell_left()
        place = {"had": self._had, "order": self._order, "began": self._began, "own": self._own()}
        if self._stays:
            place |= {"again": self._again, "stays": self._stays}
        if newest is not None:
            self._drawn = newest.workers()
            place["ahead"] = newest.ahead()
        workers = self._workers or self._drawn
        if workers is not None and (self._had or self._stays):
            place["workers"] = workers
            self._tell(workers["words"])
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on at this place."""
        self._newest = None
        vars(self.loader)["_iterator"] = None  # of workers that stay
        self._had, self._order, self._began, self._saved = 0, "", {}, {}
        self.began_anew, self._went_on = False, False
        self._again, self._stays = False, state.get("stays", False)
        self._workers, self._drawn = state.get("workers"), None
        self._set_own(state["own"])
        if state["had"]:
            self._saved = state

    def _is_newest(self, counted: _Counted) -> bool:
        return self._newest is not None and self._newest() is counted

    def let_go(self) -> None:
        """The loader is as it was: nothing is counted any more."""
        for name in ("_get_iterator", _PLACE):
            vars(self.loader).pop(name, None)

    def watched(self, items: Iterator[Any], what: str) -> Iterator[Any]:
        """Returns items, looked at for what is drawn between them if somebody asked for that."""
        return items if self.doubted is None else _Watched(items, partial(self.doubted, what))

    def behind(self) -> list[Any]:
        """Returns what the loader's generators, and what it depends on besides, are behind an iterator."""
        return self._own()

    def begin_behind(self, own: list[Any]) -> None:
        """The next iterator begins as behind that one."""
        self._set_own(own)

    def workers_behind(self) -> dict[str, Any] | None:
        """Returns what workers that stay have drawn behind an iterator; None: there are none, or they do not say so."""
        newest = self._newest() if self._newest is not None else None
        if not self._stays or self._workers is not None or newest is None:
            return self._workers
        if (found := newest.workers_behind()) is not None:
            self._tell(found["words"])
        return found

    def stay_behind(self, workers: dict[str, Any] | None) -> None:
        """The next iterator is one whose workers stay, and go on behind that one with what these had drawn."""
        vars(self.loader)["_iterator"] = None
        self._stays, self._workers = True, workers

    def draws(self, counted: _Counted) -> None:
        """The sampler is asked for the first indices, and draws its order now.

        Something else may have drawn since the iterator was made: that of another loader, `zip(labeled, unlabeled)`.
        """
        if self._is_newest(counted) and self._ready is not None:
            ready, self._ready = self._ready, None
            if not same(now := self._generators(), ready):
                self._began["drew"] = now

    def handed(self, counted: _Counted, indices: str) -> None:
        """One more batch was handed out; `indices` as text."""
        if self._is_newest(counted):
            self._had += 1
            self._order = xxhash.xxh3_64_hexdigest(f"{self._order}{indices}".encode())

    def ended(self, counted: _Counted) -> None:
        """The iterator has no more."""
        if self._is_newest(counted):
            self._had, self._order, self._began = 0, "", {}

    def begun(self, counted: _Counted, *, again: bool) -> None:
        """An iterator begins, for the first time or `again`, and draws its first numbers behind this."""
        self._newest, self.began_anew, self._again, self._ready = weakref.ref(counted), True, again, None
        self._stays = self.loader.num_workers > 0 and self.loader.persistent_workers
        self._had, self._order = 0, ""
        self._began = self._generators()

    def _iterator(self) -> Iterator[Any]:
        saved, self._saved = self._saved, {}
        counted = _Counted(self)
        again = saved.get("again", False) if saved else self._stays
        if not saved:
            self.begun(counted, again=again)
            counted.begin(self._made(counted, 0))
            if not counted.has_drawn:  # workers are asked for their first batches at once
                self._ready = self._generators()
            return counted
        process = ProcessRandomness()
        now, own = process.state_dict(), self._own()
        self._go_back(saved["began"])
        self.begun(counted, again=again)
        self.began_anew, self._went_on = False, True
        if "drew" in saved["began"]:
            self._began["drew"] = saved["began"]["drew"]
        had = saved["had"]
        is_iterable = isinstance(self.loader.dataset, IterableDataset)
        loads = is_iterable or (self.loads_again and self.loader.num_workers > 0)
        counted.begin(self._made(counted, 0 if loads else had))
        if "drew" in self._began:
            self._go_back(self._began["drew"])
        if loads:
            why = "the loader's dataset is iterable" if is_iterable else "the loader has workers, which may draw"
            logger.warning("%s: %d batches are loaded again and dropped", why, had)
            for _ in range(had):
                next(counted, None)
        else:
            counted.skip()
        if worker_draws.has_no_order(self.loader):
            logger.warning(_NO_ORDER, had)
        was_ahead, is_ahead = saved.get("ahead", ""), counted.ahead()
        is_same = self._order == saved["order"] and all(map(operator.eq, was_ahead, is_ahead))
        if self._had != had or not is_same:
            logger.warning(
                "the loader goes on after %d batches, but not with the order of the run that saved: the sampler, its seed or "
                "epoch, or the dataset is another",
                had,
            )
        process.load_state_dict(now)
        self._set_own(saved["own"])
        _keep_draws_of_others(self.loader, _generators_of(self.loader), own, saved["own"])
        return counted

    def shares(self, generator: torch.Generator, other: object) -> bool:
        """Tell whether the loader draws from a generator, and is not `other`."""
        loader = self._loader()
        return loader is not None and loader is not other and any(each is generator for each in _generators_of(loader))

    def has_drawn_on(self) -> bool:
        """Tell whether all that the loader drew since the restart was drawn behind the save."""
        newest = self._newest() if self._newest is not None else None
        return self._went_on or (self.began_anew and newest is not None and newest.has_drawn and bool(self._began))

    def _made(self, counted: _Counted, skipped: int) -> Iterator[Any]:
        """Returns an iterator of torch's whose sampler tells what it hands out."""
        name = "batch_sampler" if self.loader._auto_collation else "sampler"
        rows = vars(self.loader)[name]
        went_on = partial(self._go_back, self._began) if self._again else None
        vars(self.loader)[name] = _Told(self, rows, counted, skipped, went_on)
        workers, self._workers = self._workers, None
        try:
            return self._with_workers(workers, skipped)
        finally:
            vars(self.loader)[name] = rows

    def _with_workers(self, begun: dict[str, Any] | None, skipped: int) -> Iterator[Any]:
        """Returns an iterator of torch's, whose workers go on with what those of the run that saved had drawn."""
        loader = self.loader
        count = loader.num_workers
        if count and self._again and not self.loads_again and isinstance(loader.dataset, IterableDataset):
            logger.warning("what the loader's workers draw and count begins anew in them: its dataset is iterable")
        if self.loads_again or isinstance(loader.dataset, IterableDataset) or not (count or begun):
            return self._make(loader)
        why = unable = worker_draws.why_not(loader) if count else ""
        if begun is not None and len(begun["states"]) != count:
            why = why or f"they are {count}, and were {len(begun['states'])}"
        if begun is None and (skipped or self._again):
            why = why or "the version does not have them"
        if why and (skipped or self._again or begun is not None):
            logger.warning("random numbers that the loader's workers draw begin anew in them: %s", why)
        if not count or unable:
            return self._make(loader)
        begun = None if why else begun
        loader.check_worker_number_rationality()
        return worker_draws.NotedIterator(loader, begun, skipped % count)

    def _make(self, loader: DataLoader[Any]) -> Iterator[Any]:
        return type(loader)._get_iterator(loader) if self._own_make is None else self._own_make()

    def _tell(self, words: str) -> None:
        if words and not self._told:
            self._told = True
            logger.warning("of a loader's workers no version has %s: a restart within an epoch begins it anew", words)

    def _tell_left(self) -> None:
        if not self._told_left:
            self._told_left = True
            logger.warning(
                "a loop has left an epoch of a loader whose workers stay: a restart there is given the rest of it"
            )

    def _go_back(self, began: dict[str, Any]) -> None:
        """All generators are as they were when an iterator began."""
        ProcessRandomness().load_state_dict(began["process"])
        self._set_own(began["own"])

    def _generators(self) -> dict[str, Any]:
        return {"process": ProcessRandomness().state_dict(), "own": self._own()}

    def _own(self) -> list[Any]:
        states = [generator.get_state() for generator in _generators_of(self.loader)]
        return states if self.more is None else [*states, self.more.state_dict()]

    def _set_own(self, states: list[Any]) -> None:
        for generator, state in zip(_generators_of(self.loader), states, strict=False):
            generator.set_state(state)
        if self.more is not None and states and isinstance(states[-1], dict):
            self.more.load_state_dict(states[-1])


class _Counted:
    """An iterator whose batches are counted."""

    def __init__(self, place: LoaderPlace) -> None:
        self._place = place
        self._inner: Any = None
        self._items: Any = None
        self._sampler: _Skipping | None = None
        self.has_drawn = False
        self._indices: deque[str] = deque()

    def begin(self, inner: Iterator[Any]) -> None:
        """Hands out what `inner` has."""
        self._inner = self._items = inner
        if isinstance(inner, _SingleProcessDataLoaderIter) and inner._dataset_kind == _DatasetKind.Iterable:
            self._items = self._place.watched(inner, "the items of its dataset are")

    def told(self, indices: object) -> None:
        """The sampler handed out the indices of one more batch."""
        self._indices.append(repr(indices))

    def ahead(self) -> str:
        """Return a word for each batch that workers were asked for and that was not had yet."""
        return "".join(xxhash.xxh3_64_hexdigest(indices.encode()) for indices in self._indices)

    def draws(self) -> None:
        """The sampler is asked for indices."""
        if not self.has_drawn:
            self.has_drawn = True
            self._place.draws(self)

    def samples(self, sampler: _Skipping) -> None:
        """Note what asks the sampler of this iterator."""
        self._sampler = sampler

    def skip(self) -> None:
        """Skips now what was to be skipped; a loader with workers has done so."""
        if self._sampler is not None:
            self._sampler.skip()

    def workers(self) -> dict[str, Any] | None:
        """Return what the workers have drawn; None if they do not say so."""
        return self._inner.state() if isinstance(self._inner, worker_draws.NotedIterator) else None

    def workers_behind(self) -> dict[str, Any] | None:
        """Return what the workers have drawn when they are through; None if they do not say so."""
        return self._inner.state_behind() if isinstance(self._inner, worker_draws.NotedIterator) else None

    def had(self, indices: object) -> None:
        """A batch of these indices was had before."""
        self._place.handed(self, repr(indices))

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        before = getattr(self._inner, "_rcvd_idx", None)
        try:
            batch = next(self._items)
        except StopIteration:
            self._place.ended(self)
            raise
        except (
            Exception
        ):  # of the dataset: a loop that goes on is given the next batch; one that waited too long the same
            if self._indices and (before is None or self._inner._rcvd_idx > before):
                self._place.handed(self, self._indices.popleft())
            raise
        self._place.handed(self, self._indices.popleft() if self._indices else "None")
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        """Return what a script asks torch's iterator for: `_shutdown_workers`."""
        return getattr(vars(self).get("_inner"), name)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """A loader whose workers stay begins anew with the same iterator."""
        self._indices.clear()
        self._place.begun(self, again=True)
        self._inner._reset(loader, first_iter)


class _Told:
    """A sampler that tells what it hands out, and leaves out the first batches of the first iterator that is used.

    Args:
        counted: the iterator that it is for, which holds it.
        go_back: called once the workers are made and before anything is drawn for the order; None: nothing is to be done then.
    """

    def __init__(
        self, place: LoaderPlace, rows: Any, counted: _Counted, skipped: int, go_back: Callable[[], None] | None
    ) -> None:
        self._place, self._sampler, self._counted, self._skipped = place, rows, weakref.ref(counted), skipped
        self._steps = iter([None, go_back])  # the second iterator is made when the workers are

    def __iter__(self) -> Iterator[Any]:
        if (step := next(self._steps, None)) is not None:
            step()
        rows = iter(self._sampler)
        if not draws_at_once(self._sampler):
            rows = self._place.watched(rows, "the order of its batches is")
        counted = self._counted()
        assert counted is not None
        return _Skipping(rows, counted, self)

    def take(self) -> int:
        """Returns how many batches are left out, once: a loader with workers asks for two iterators, and uses the second."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def __len__(self) -> int:
        return len(self._sampler)


class _Skipping:
    """One iterator of a sampler. It skips with its first batch or before: numbers are drawn in the order of the first time."""

    def __init__(self, inner: Iterator[Any], counted: _Counted, told: _Told) -> None:
        self._inner, self._counted, self._told = inner, weakref.ref(counted), told
        counted.samples(self)

    def skip(self) -> None:
        """Asks for what is left out."""
        counted = self._counted()
        for indices in itertools.islice(self._inner, self._told.take()):
            if counted is not None:
                counted.had(indices)

    def __iter__(self) -> _Skipping:
        return self

    def __next__(self) -> Any:
        self.skip()
        counted = self._counted()
        if counted is None:  # nobody takes what it hands out any more
            return next(self._inner)
        counted.draws()
        indices = next(self._inner)
        counted.told(indices)
        return indices


def draws_at_once(rows: Any) -> bool:
    """Tell whether a sampler, or the one that its batches are made of, draws all it needs before the first index."""
    if type(rows) is sampler.BatchSampler:
        rows = rows.sampler
    if type(rows) is sampler.RandomSampler and rows.generator is not None:
        # With a generator of its own, which the steps may use too, some of its indices are drawn later.
        return not rows.replacement and rows.num_samples <= len(rows.data_source)
    return type(rows) in _AT_ONCE


class _Watched:
    """An iterator that tells once if any but its first item is made with random numbers of the process.

    Args:
        tell: called once.
    """

    def __init__(self, items: Iterator[Any], tell: Callable[[], None]) -> None:
        self._items, self._tell, self._number = items, tell, 0

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self._number += 1
        if not 1 < self._number <= _WATCHED:
            return next(self._items)
        before = ProcessRandomness().state_dict()
        item = next(self._items)
        if not same(ProcessRandomness().state_dict(), before):
            self._number = _WATCHED
            self._tell()
        return item
