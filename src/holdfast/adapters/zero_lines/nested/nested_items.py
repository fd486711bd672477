"""Takes up what a loop goes over where it was, without loading what is skipped where that is known to be right.

    items = Items(loader)       # also enumerate(loader), zip(...), tqdm(loader), a range, a list, a generator of the script
    items.skip(17)              # as if 17 had been taken, with the generators of random numbers as they were at the first
    next(items)

Counted by index: ranges, lists, and `itertools.count`. A `DataLoader` over a dataset with items draws the order anew and leaves
out the batches; with workers, or over a stream, it loads what is skipped, since items may depend on what came before. All else
is counted by taking items. What is drawn between two items comes from generators of random numbers that the loop's body
uses too, so it would differ: `doubt` tells when that was seen.
"""

from __future__ import annotations

import ast
import collections
import functools
import gc
import inspect
import itertools
import linecache
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset, dataloader

from holdfast.adapters.zero_lines.reach.attributes import has_place_in_data
from holdfast.adapters.zero_lines.reach.loader_places import rules
from holdfast.adapters.zero_lines.reach.plain_values import CLOCK
from holdfast.adapters.zero_lines.reach.walk import workers_stay
from holdfast.base.handler_errors import pass_on
from holdfast.base.installed import is_installed
from holdfast.checkpoint.containers import items_of, length_of
from holdfast.checkpoint.loader_workers.worker_draws import has_no_order
from holdfast.checkpoint.state.dataloader import draws_at_once
from holdfast.checkpoint.state.stateful import is_stateful
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.clock_names import clock_names

_NONE: dict[int, int] = {}
_SEQUENCES = (list, tuple, str, bytes, dict, type(_NONE.keys()), type(_NONE.values()), type(_NONE.items()))
_EMPTY: tuple[Iterable[Any], ...] = ([], (), range(0), "", b"", _NONE, _NONE.values(), _NONE.items())
_PLAIN_ITERATORS = tuple(type(iter(each)) for each in _EMPTY)
_MAX_DEPTH, _MAX_PARTS = 6, 64
_NO_ORDER = "its workers hand out batches in no order"
_NUMBERS = {bool, int, float}


class Items:
    """The items of one loop.

    Args:
        iterable: what the script goes over.
        is_of_user: tells whether the class of an object is the user's.
        why_not_staying: tells why the workers of a data loader that stay cannot be taken up; empty if they can.

    Attributes:
        size: how many there are; None if nobody knows.
        may_end: whether there may be fewer, for something that is not torch's own tells how many.
        shape: what has to be alike at a restart; plain values.
        told: how items are skipped, where it costs something; empty if it does not.
        doubt: why a restart would take other items; empty as long as nothing says so.
        refused: why these items cannot be taken up again; empty if they can.
        begun: whether something was drawn for them already.
        is_taken: whether an iterator of the script is taken item by item.
        staying: iterators of data loaders whose workers stay, and how often these were gone over then.
        loaders: such loaders.
        cuts: samplers of data loaders, and what they cut their order into batches by as it was begun.
    """

    def __init__(
        self,
        iterable: Any,
        is_of_user: Callable[[Any], bool] = lambda _: True,
        why_not_staying: Callable[[DataLoader[Any]], str] = workers_stay,
    ) -> None:
        self.is_of_user, self.why_not_staying = is_of_user, why_not_staying
        self.is_taken = self.may_end = False
        self.staying: list[tuple[Any, int]] = []
        self.loaders: list[DataLoader[Any]] = []
        self.cuts: list[tuple[Any, tuple[Any, ...]]] = []
        self.doubt = self.refused = ""
        self.begun = _has_begun(iterable)
        self.told = ""
        self._iterator: Iterator[Any] | None = None
        self._digested: Any = None
        self._watching: Iterator[Any] | None = None
        self._left, self._moves = "", False
        self._way: _Way = _way_of(iterable, self)
        self.size, self.shape = self._way.size, self._way.shape

    def skip(self, number: int) -> None:
        """Goes on behind so many items."""
        if number:
            self._iterator = self._way.behind(number)

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._way.begin()
        if not self.doubt and any(rules(sampler) != cut for sampler, cut in self.cuts):
            self.doubt = "a sampler's settings change while its batches are taken"
        return next(self._iterator)

    def digest(self) -> str:
        """Returns a token of where a generator of the script stands: equal where it would go on alike."""
        return digest_of(self._digested) if self._digested is not None else ""

    def counted(self) -> set[int]:
        """Returns the generators that come to where they are by items being taken, by their `id`."""
        return {id(each) for each in _within(self._digested)} if self._digested is not None else set()

    def follows(self) -> bool:
        """Tell whether the steps change objects that a generator of the script reads, and its own code does not: a meter that it prints."""
        return (
            self._watching is not None and not self._moves and _read_by(self._watching, self.is_of_user) != self._left
        )

    def taking(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yields what an iterator yields, and sees whether its own code changes objects that it reads."""
        self._watching = iterator
        while True:
            before = _read_by(iterator, self.is_of_user) if not self._moves else ""
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._left = _read_by(iterator, self.is_of_user) if not self._moves else ""
            self._moves = self._moves or before != self._left
            yield item

    def digests(self, thing: Any) -> None:
        """This is what `digest` looks at."""
        self._digested = thing


class _Way:
    """Begins one kind of iterable, and takes it up.

    Args:
        shape: what has to be alike at a restart.
        size: number of items.
        begin: the iterator from the first item on.
        behind: the iterator behind so many items.
    """

    def __init__(
        self,
        shape: list[Any],
        size: int | None,
        begin: Callable[[], Iterator[Any]],
        behind: Callable[[int], Iterator[Any]],
    ) -> None:
        self.shape, self.size, self.begin, self.behind = shape, size, begin, behind


def _way_of(value: Any, items: Items, depth: int = 0) -> _Way:
    if depth > _MAX_DEPTH:
        items.refused = "it lies in too many others"
    if type(value) is range:
        return _Way(["range", value.start, value.step], len(value), lambda: iter(value), lambda n: iter(value[n:]))
    if isinstance(value, set | frozenset):
        items.refused = "it is a set, whose order does not come back"
    if type(value) in _SEQUENCES:
        shape = [type(value).__qualname__, len(value)]
        return _Way(shape, len(value), lambda: iter(value), lambda n: itertools.islice(value, n, None))
    if type(value) is enumerate:
        return _enumerated(value, items, depth)
    if type(value) is zip:
        return _zipped(value, items, depth)
    if type(value) is itertools.count:
        return _counted(value)
    bar = _bar_of(value)
    if bar is not None:
        return _barred(value, bar, items, depth)
    if isinstance(value, DataLoader):
        return _loader(value, items)
    if isinstance(value, dataloader._BaseDataLoaderIter):
        return _loader_iterator(value, items)
    if type(value) in _PLAIN_ITERATORS:
        hint = value.__length_hint__()
        return _Way([type(value).__qualname__, hint], hint, lambda: value, lambda n: itertools.islice(value, n, None))
    return _taken(value, items)


def _has_begun(value: Any, depth: int = 0) -> bool:
    """Tell whether what a loop goes over may have drawn random numbers before it is asked for its first item."""
    if isinstance(value, enumerate | zip) and depth <= _MAX_DEPTH:
        parts = value.__reduce__()[1]
        return any(_has_begun(part, depth + 1) for part in (parts[:1] if isinstance(value, enumerate) else parts))
    drawing = isinstance(value, dataloader._BaseDataLoaderIter)
    return drawing or (depth > 0 and type(value) not in _PLAIN_ITERATORS and type(value) is not itertools.count)


def _enumerated(value: Any, items: Items, depth: int) -> _Way:
    inner, count = value.__reduce__()[1]
    way = _way_of(inner, items, depth + 1)
    return _Way(
        ["enumerate", count, *way.shape],
        way.size,
        lambda: enumerate(way.begin(), count),
        lambda n: enumerate(way.behind(n), count + n),
    )


def _zipped(value: Any, items: Items, depth: int) -> _Way:
    _, parts, *state = value.__reduce__()
    strict = bool(state and state[0])
    ways = [_way_of(part, items, depth + 1) for part in parts]
    sizes = [way.size for way in ways]
    endless = [way for way in ways if way.shape[:1] == ["count"]]
    known = [size for size in sizes if size is not None]
    size = min(known) if known and len(known) + len(endless) == len(ways) else None
    return _Way(
        ["zip", *(part for way in ways for part in way.shape)],
        size,
        lambda: zip(*(way.begin() for way in ways), strict=strict),
        lambda n: zip(*(way.behind(n) for way in ways), strict=strict),
    )


def _counted(value: Any) -> _Way:
    text = repr(value)[len("count(") : -1].split(", ")
    if not all(part.lstrip("-").isdigit() for part in text):
        text = []
    start, step = (int(text[0]), int(text[1]) if len(text) > 1 else 1) if text else (0, 0)
    behind: Callable[[int], Iterator[Any]] = (
        (lambda n: itertools.count(start + n * step, step)) if text else (lambda n: itertools.islice(value, n, None))
    )
    return _Way(["count", start, step], None, lambda: value, behind)


def _bar_of(value: Any) -> Any:
    """Returns the progress bar of tqdm that this is, or that its iterator belongs to; None for all else."""
    if isinstance(value, GeneratorType) and "tqdm" in value.gi_code.co_filename:
        if inspect.getgeneratorstate(value) != inspect.GEN_CREATED or value.gi_frame is None:
            return None
        value = user_frames.own(value.gi_frame).get("self")
    is_bar = any(part.__module__.partition(".")[0] == "tqdm" for part in type(value).__mro__)
    return value if is_bar and getattr(value, "iterable", None) is not None else None


def _barred(value: Any, bar: Any, items: Items, depth: int) -> _Way:
    way = _way_of(bar.iterable, items, depth + 1)

    def begin() -> Iterator[Any]:
        bar.iterable = way.begin()
        return iter(value)

    def behind(number: int) -> Iterator[Any]:
        bar.iterable = way.behind(number)
        for name in ("n", "initial", "last_print_n"):
            if hasattr(bar, name):
                setattr(bar, name, getattr(bar, name) + number)
        return iter(value)

    return _Way(["tqdm", *way.shape], way.size, begin, behind)


def _size_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _loader(value: DataLoader[Any], items: Items) -> _Way:
    if type(value).__iter__ is not DataLoader.__iter__:
        return _taken(value, items)
    size = _size_of(value) if value._dataset_kind == dataloader._DatasetKind.Map else None
    items.may_end = items.may_end or type(value).__len__ is not DataLoader.__len__
    stays = bool(value.num_workers and value.persistent_workers)
    if stays:
        items.refused = items.refused or items.why_not_staying(value)
    if has_no_order(value):
        items.refused = items.refused or _NO_ORDER
    made: list[_Way] = []

    def way() -> _Way:
        made.append(_loader_iterator(iter(value), items))
        return made[-1]

    shape = ["loader", size, "workers stay"] if stays else ["loader", size]
    return _Way(shape, size, lambda: way().begin(), lambda n: way().behind(n))


def _loader_iterator(value: Any, items: Items) -> _Way:
    is_map = value._dataset_kind == dataloader._DatasetKind.Map
    size = _size_of(value) if is_map else None
    indices = value._sampler_iter
    items.cuts.append((value._index_sampler, rules(value._index_sampler)))
    if value._persistent_workers:
        loader = value.loader() if hasattr(value, "loader") else None
        if loader is None:
            items.refused = items.refused or "its workers stay, and were made where nobody looked"
        else:
            items.refused = items.refused or items.why_not_staying(loader)
            items.loaders.append(loader)
            items.staying.append((value, value.begins))
    if value._num_workers > 1 and not getattr(value, "_in_order", True):
        items.refused = items.refused or _NO_ORDER
    known = draws_at_once(value._index_sampler)
    if not known:
        items.may_end = True
        items.digests(indices)
        value._sampler_iter = _watched(indices, items, "the order of its batches is")
    if isinstance(value, dataloader._SingleProcessDataLoaderIter) and is_map:

        def behind(number: int) -> Iterator[Any]:
            for _ in range(number):
                value._next_index()  # type: ignore[no-untyped-call]
            value._num_yielded += number
            return value

        return _Way(["loader", size], size, lambda: value, behind)
    items.told = "what is skipped is loaded again: a loader with workers, or over a stream"
    watch = (
        value
        if isinstance(value, dataloader._MultiProcessingDataLoaderIter)
        else _watched(value, items, "its items are")
    )
    return _Way(["loader", size], size, lambda: watch, lambda n: _advanced(watch, n))


def _taken(value: Any, items: Items) -> _Way:
    """All else: what is skipped is taken, one by one."""
    if isinstance(value, torch.Tensor):
        return _Way(
            ["tensor", *value.shape], len(value), lambda: iter(value), lambda n: itertools.islice(iter(value), n, None)
        )
    items.is_taken = items.may_end = True
    items.told = f"what is skipped of {type(value).__qualname__!r} is taken again, one by one"
    kind = type(value)
    size = _size_of(value) if not hasattr(value, "__next__") else None
    places = (each for each in (value, *_sources(value)) if is_stateful(each) and not isinstance(each, nn.Module))
    if not all(has_place_in_data(each, items.is_of_user) for each in places):
        items.refused = "it has a place of its own, which it hands out"

    def begin() -> Iterator[Any]:
        iterator = iter(value)
        items.digests(iterator)
        if isinstance(iterator, GeneratorType):
            return _watched(items.taking(iterator), items, "its items are")
        return _watched(iterator, items, "its items are")

    return _Way([kind.__qualname__], size, begin, lambda n: _advanced(begin(), n))


def _sources(value: Any) -> Iterator[Any]:
    """Yields what an iterator may go over: what its generator is the `__iter__` of, or what it has as an attribute."""
    if type(value) is not GeneratorType:
        held = getattr(value, "__dict__", None) or {}
        yield from (each for each in held.values() if hasattr(type(each), "__iter__"))
    elif value.gi_frame is not None:
        for each in user_frames.own(value.gi_frame).values():
            if getattr(getattr(type(each), "__iter__", None), "__code__", None) is value.gi_code:
                yield each


def _advanced(iterator: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        next(iterator)
    return iterator


def _watched(iterator: Iterable[Any], items: Items, what: str) -> Iterator[Any]:
    """Yields items, and sees whether any but the first is made with random numbers of the process."""
    first = True
    iterator = iter(iterator)
    while True:
        before = "" if first or items.doubt else _drawn()
        try:
            item = next(iterator)
        except StopIteration:
            return
        if before and _drawn() != before:
            items.doubt = f"{what} drawn step by step, with random numbers that the step uses too"
        first = False
        yield item


def _drawn() -> str:
    """Returns a token of the generators of random numbers of the process."""
    token = xxhash.xxh3_128(torch.get_rng_state().numpy())  # type: ignore[arg-type]  # an array has a buffer
    token.update(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "random" in vars(numpy):
        state = numpy.random.get_state(legacy=False)
        token.update(state["state"]["key"].tobytes() + str(state["state"]["pos"]).encode())
    return token.hexdigest()


def digest_of(value: Any, depth: int = 0) -> str:
    """Returns a token of an iterator: of a generator's names and line, of an object's attributes."""
    token = xxhash.xxh3_128(type(value).__qualname__.encode())
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is not None:
            token.update(str(frame.f_lineno).encode())
            for part in gc.get_referents(value):
                if depth < _MAX_DEPTH and hasattr(part, "__next__"):
                    token.update(digest_of(part, depth + 1).encode())
            timed = _timed(frame.f_code.co_filename)
            _mapping(token, {name: part for name, part in user_frames.own(frame).items() if name not in timed}, depth)
    elif isinstance(value, dataloader._BaseDataLoaderIter):
        token.update(str(value._num_yielded).encode())
    elif type(value) in _PLAIN_ITERATORS:
        token.update(str(value.__length_hint__()).encode())
        _mapping(token, {str(i): part for i, part in enumerate(value.__reduce__()[1])}, depth)
    elif isinstance(getattr(value, "__dict__", None), dict):
        _mapping(token, vars(value), depth)
    else:  # `enumerate`, `zip` and their like
        for part in gc.get_referents(value):
            if hasattr(part, "__next__") and depth < _MAX_DEPTH:
                token.update(digest_of(part, depth + 1).encode())
    return token.hexdigest()


def _read_by(value: Any, is_of_user: Callable[[Any], bool]) -> str:
    """Returns a token of the user's objects that a generator was given; what they hold of data and models is left out."""
    token = xxhash.xxh3_128()
    frame = value.gi_frame if isinstance(value, GeneratorType) else None
    if frame is not None:
        code, names = frame.f_code, user_frames.own(frame)
        for name in (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars):
            if name in names and is_of_user(names[name]):
                _state(token, name, names[name], is_of_user)
    return token.hexdigest()


def _state(token: Any, name: str, value: Any, is_of_user: Callable[[Any], bool], depth: int = 0) -> None:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        token.update(f"{name}={value!r}".encode())
    elif isinstance(value, (dict, list, tuple, collections.deque)) and depth < _MAX_DEPTH:
        token.update(f"{name}:{length_of(value)}".encode())
        for key, part in itertools.islice(items_of(value), _MAX_PARTS):
            _state(token, str(key), part, is_of_user, depth + 1)
    elif depth < _MAX_DEPTH and is_of_user(value) and not isinstance(value, (nn.Module, Dataset, DataLoader, type)):
        for key, part in sorted(getattr(value, "__dict__", {}).items()):
            _state(token, f"{name}.{key}", part, is_of_user, depth + 1)


@functools.lru_cache(maxsize=64)
def _timed(file: str) -> frozenset[str]:
    """Returns the names of a file of the user's that may hold what a clock told: they differ from run to run."""
    try:
        return (
            clock_names(ast.parse("".join(linecache.getlines(file))), meters=True)
            if not is_installed(file)
            else frozenset()
        )
    except (SyntaxError, ValueError) as error:
        pass_on(error)
        return frozenset()


def _within(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the generators that an iterator takes its items from."""
    for part in gc.get_referents(value) if depth < _MAX_DEPTH else ():
        if hasattr(part, "__next__"):
            if type(part) is GeneratorType:
                yield part
            yield from _within(part, depth + 1)


def _mapping(token: Any, values: Mapping[str, Any], depth: int) -> None:
    for name, value in sorted(values.items(), key=lambda pair: str(pair[0])):
        if isinstance(value, float) and value >= CLOCK:
            continue  # a time, which is another one in every run
        if isinstance(value, bool | int | float | str | bytes | type(None)):
            token.update(f"{name}={value!r}".encode())
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
            token.update(f"{name}={tuple(value.shape)}{value.dtype}".encode())
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else b""
            token.update(data)
        elif isinstance(value, range):
            token.update(f"{name}={value!r}".encode())
        elif type(value) in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
            token.update(f"{name}={len(value)} {hash(tuple(value))}".encode())  # numbers: alike in every process
        elif isinstance(value, list | tuple | dict) and depth < _MAX_DEPTH:
            if length_of(value) <= 1 << 16:
                _mapping(token, {str(key): part for key, part in items_of(value)}, depth + 1)
        elif hasattr(value, "__next__") and depth < _MAX_DEPTH:
            token.update(digest_of(value, depth + 1).encode())
