"""Takes up iterators of data loaders that a script holds and asks by itself: `batches = iter(loader)`, then `next(batches)` in its loop.

Such an iterator is a place in an order. The order is drawn when the first batch is asked for, so the random numbers of that moment and
the number of batches that were taken tell all. A restart draws the order again in the iterator that the script has just made, and
leaves out what was taken without loading it. So it is without workers, over a dataset with items, in order or shuffled by torch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils.data import MapDataPipe, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter
from torch.utils.data.sampler import BatchSampler

_KEY = "_holdfast_place"


class LoaderPlaces:
    """Counts the batches that iterators of data loaders hand out, while it has begun."""

    def begin(self) -> None:
        """Counts from here on."""
        _SingleProcessDataLoaderIter._next_index = _next_index  # type: ignore[method-assign]

    def end(self) -> None:
        """Counts no more; calling it again does nothing."""
        if vars(_SingleProcessDataLoaderIter).get("_next_index") is _next_index:
            del _SingleProcessDataLoaderIter._next_index


def has_place(value: Any) -> bool:
    """Tell whether a value is an iterator of a data loader whose place is known."""
    if type(value) is not _SingleProcessDataLoaderIter or _order(value) is None:
        return False
    if torch.get_default_device().type != "cpu":  # its numbers come from there
        return False
    _, size, numbers, cut = _place(value)
    return (
        size in (-1, _size(value))
        and cut in ((), rules(value._index_sampler))
        and (bool(numbers) or value._num_yielded == 0)
    )


class Source:
    """Names where an iterator takes its batches from: equal if that is the same, and the same text in every process.

    Args:
        value: the iterator.
    """

    def __init__(self, value: Any) -> None:
        self._parts = (value._index_sampler, value._dataset, value._collate_fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and all(map(operator.is_, self._parts, other._parts))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._parts)))

    def __repr__(self) -> str:
        return "batches of a DataLoader"


def place(value: Any) -> list[Any]:
    """Returns how many batches were taken, and the random numbers that their order was drawn from."""
    taken, _, numbers, _ = _place(value)
    return [taken, numbers]


def put(value: Any, saved: list[Any]) -> None:
    """Has an iterator go on at a place; no random numbers are drawn.

    Raises:
        KeyError: it has fewer batches.
    """
    taken, numbers = saved
    held = torch.get_rng_state()
    vars(value).pop(_KEY, None)
    value._sampler_iter, value._num_yielded = iter(value._index_sampler), taken
    try:
        if numbers:
            torch.set_rng_state(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
        for _ in range(taken):
            value._next_index()
    except StopIteration:
        raise KeyError("a place in the batches of a DataLoader") from None
    finally:
        torch.set_rng_state(held)


def rules(sampler: Any) -> tuple[Any, ...]:
    """Returns what a sampler cuts its order into batches by, as these are asked for: a script may set another size in between."""
    rows = getattr(sampler, "sampler", None) if isinstance(sampler, BatchSampler) else sampler
    settings = ((sampler, "batch_size"), (sampler, "drop_last"), (rows, "replacement"), (rows, "_num_samples"))
    return (id(rows), *(getattr(thing, name, None) for thing, name in settings))


def _order(value: Any) -> Any:
    """Returns what draws the order, if it draws all of it from torch's own random numbers, as it begins; None if that is not sure."""
    if value._dataset_kind != _DatasetKind.Map or isinstance(value._dataset, MapDataPipe):
        return None
    rows = value._index_sampler.sampler if type(value._index_sampler) is BatchSampler else value._index_sampler
    known = type(rows) is SequentialSampler or (type(rows) is RandomSampler and rows.generator is None)
    return rows if known else None


def _size(value: Any) -> int:
    return len(_order(value).data_source)


def _place(value: Any) -> list[Any]:
    found: list[Any] = vars(value).get(_KEY, [0, -1, b"", ()])
    return found


def _next_index(iterator: Any) -> Any:
    known = _order(iterator) is not None
    if _KEY not in vars(iterator) and known:
        numbers = torch.get_rng_state().numpy().tobytes()
        vars(iterator)[_KEY] = [0, _size(iterator), numbers, rules(iterator._index_sampler)]
    index = next(iterator._sampler_iter)
    if (found := vars(iterator).get(_KEY)) is not None:
        found[0] += 1
        if not known or found[3] != rules(iterator._index_sampler):
            found[3] = None  # its batches follow no one rule
    return index
