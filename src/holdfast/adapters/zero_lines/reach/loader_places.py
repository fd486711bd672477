"""Takes up iterators of data loaders that a script holds and asks by itself: `batches = iter(loader)`, then `next(batches)` in its loop.

Such an iterator is a place in an order. The order is drawn when the first batch is asked for, so the random numbers of that moment and
the number of batches that were taken tell all. A restart draws the order again in the iterator that the script has just made, and
leaves out what was taken without loading it. So it is without workers, over a dataset with items, in order or shuffled by torch.

A generator that hands out the batches of one loader again and again, and does nothing else, has the place of the iterator that is in it:
`while True: for batch in loader: yield batch`. One that has not begun is begun by a restart, which loads nothing either. One that has begun at a restart,
and had not in the run that saved, is put at the end of its order, from where it goes on in the same way.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import operator
import textwrap
import threading
import tokenize
from types import CodeType, GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader, MapDataPipe, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter
from torch.utils.data.sampler import BatchSampler

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.usage.user_frames import own

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
    """Tell whether a value is an iterator of a data loader whose place is known, or a generator with one in it."""
    if type(value) is GeneratorType:
        loader, inner = _turn(value)
        if inner is not None:
            return has_place(inner)
        return loader is not None and torch.get_default_device().type == "cpu" and _order(loader) is not None
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


def parts(value: Any) -> dict[str, Any]:
    """Returns what an iterator, or a generator with one in it, takes its batches from, by name."""
    if type(value) is GeneratorType:
        return {"loader": _turn(value)[0]}
    return {"dataset": value._dataset, "collate_fn": value._collate_fn, "sampler": value._index_sampler}


class Source:
    """Names where an iterator takes its batches from, and how it hands them out: equal if both are the same, and the same text in every process.

    Args:
        value: the iterator, or a generator with one in it.
    """

    def __init__(self, value: Any) -> None:
        loader = _turn(value)[0] if type(value) is GeneratorType else None
        self._form = (type(value).__name__, 0 if loader is None else _cycled(value.gi_code)[1])
        given = (value._dataset, value._collate_fn) if loader is None else (loader.dataset, loader.collate_fn)
        self._parts = ((value if loader is None else loader)._index_sampler, *given)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Source)
            and self._form == other._form
            and all(map(operator.is_, self._parts, other._parts))
        )

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._parts)))

    def __repr__(self) -> str:
        return f"batches of a DataLoader, by {self._form}"


def place(value: Any) -> list[Any]:
    """Returns how many batches were taken, and the random numbers that their order was drawn from; -1 of a generator before it begins."""
    inner = _turn(value)[1] if type(value) is GeneratorType else value
    if inner is None:
        return [-1, b""]
    taken, _, numbers, _ = _place(inner)
    return [taken, numbers]


def put(value: Any, saved: list[Any]) -> None:
    """Has an iterator, or a generator with one in it, go on at a place; no random numbers are drawn.

    Raises:
        KeyError: it has fewer batches.
    """
    taken, numbers = saved
    held = torch.get_rng_state()
    try:
        if type(value) is GeneratorType:
            value = _begun(value, taken)
        if value is None:
            return
        if taken < 0:  # at its end a generator goes on as one that has not begun
            vars(value)[_KEY] = [taken, -1, b"", ()]
            value._sampler_iter, value._num_yielded = iter(()), 0
            return
        vars(value).pop(_KEY, None)
        value._sampler_iter, value._num_yielded = iter(value._index_sampler), taken
        if numbers:
            torch.set_rng_state(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
        for _ in range(taken):
            value._next_index()
    except StopIteration:
        raise KeyError("a place in the batches of a DataLoader") from None
    finally:
        torch.set_rng_state(held)


def _begun(generator: GeneratorType[Any, Any, Any], taken: int) -> Any:
    """Returns the iterator in a generator, which is begun without loading anything; None if it has not begun, and had not in the run that saved."""
    loader, inner = _turn(generator)
    if taken < 0 or inner is not None:
        return inner
    thread, num_names = threading.get_ident(), _cycled(generator.gi_code)[1]
    numbers = loader.generator.get_state() if loader.generator is not None else None
    fetched: Any = _SingleProcessDataLoaderIter._next_data

    def nothing(iterator: Any) -> Any:
        return (None,) * num_names if threading.get_ident() == thread else fetched(iterator)

    _SingleProcessDataLoaderIter._next_data = nothing  # type: ignore[method-assign]
    try:
        next(generator)
    finally:
        _SingleProcessDataLoaderIter._next_data = fetched  # type: ignore[method-assign]
        if numbers is not None:
            loader.generator.set_state(numbers)
    return _turn(generator)[1]


def _turn(generator: GeneratorType[Any, Any, Any]) -> tuple[Any, Any]:
    """Returns the loader whose batches a generator hands out again and again, and the iterator that it asks now; None for each that is not known."""
    frame, name = generator.gi_frame, _cycled(generator.gi_code)[0]
    loader = {**frame.f_globals, **own(frame)}.get(name) if frame is not None and name else None
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__ or loader.num_workers:
        return None, None
    if inspect.getgeneratorstate(generator) == inspect.GEN_CREATED:
        return loader, None
    held = [generator.gi_yieldfrom] if generator.gi_yieldfrom is not None else gc.get_referents(generator, frame)
    inner = next((each for each in held if type(each) is _SingleProcessDataLoaderIter), None)
    if inner is None or inner._index_sampler is not loader._index_sampler:  # its name may be another loader's by now
        return None, None
    is_same = inner._dataset is loader.dataset and inner._collate_fn is loader.collate_fn
    return (loader, inner) if is_same else (None, None)


@functools.lru_cache(maxsize=256)
def _cycled(code: CodeType) -> tuple[str, int]:
    """Returns the name of the loader that a generator goes over again and again, and how many names it has for an item, 0 for one.

    The name is empty if its text says anything else, or is not what runs.
    """
    try:
        module = ast.parse(textwrap.dedent(inspect.getsource(code)))
        made = compile(module, code.co_filename, "exec").co_consts
        ran = next((each for each in made if isinstance(each, CodeType) and each.co_name == code.co_name), None)
    except (OSError, SyntaxError, ValueError, tokenize.TokenError) as error:
        pass_on(error)
        return "", 0
    match module.body:
        case [ast.FunctionDef(body=[*told, ast.While(test=ast.Constant(value=True | 1), body=[turn], orelse=[])])]:
            is_told = all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in told)
            if not is_told or ran is None or _said(ran) != _said(code):
                return "", 0
        case _:
            return "", 0
    match turn:
        case ast.Expr(value=ast.YieldFrom(value=ast.Name(id=name))):
            return name, 0
        case ast.For(target=target, iter=ast.Name(id=name), body=[ast.Expr(value=ast.Yield(value=item))], orelse=[]):
            names = _names(target)
            if names and names == _names(item) and name not in names and len({*names}) == len(names):
                return name, 0 if isinstance(target, ast.Name) else len(names)
    return "", 0


def _said(code: CodeType) -> tuple[Any, ...]:
    """Returns what code does, and with which names."""
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars


def _names(item: ast.expr | None) -> list[str]:
    """Returns the names that an item is given, or handed out by; empty if there is more to it."""
    parts = item.elts if isinstance(item, ast.Tuple) else [item]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return names if len(names) == len(parts) else []


def rules(sampler: Any) -> tuple[Any, ...]:
    """Returns what a sampler cuts its order into batches by, as these are asked for: a script may set another size in between."""
    rows = getattr(sampler, "sampler", None) if isinstance(sampler, BatchSampler) else sampler
    settings = ((sampler, "batch_size"), (sampler, "drop_last"), (rows, "replacement"), (rows, "_num_samples"))
    return (id(rows), *(getattr(thing, name, None) for thing, name in settings))


def _order(value: Any) -> Any:
    """Returns what draws the order, of an iterator or a loader, if it draws all of it from torch's own random numbers, as it begins.

    None if that is not sure.
    """
    dataset = value.dataset if isinstance(value, DataLoader) else value._dataset
    if value._dataset_kind != _DatasetKind.Map or isinstance(dataset, MapDataPipe):
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
