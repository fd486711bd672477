"""Notes what the workers of a plain data loader draw and count, behind each batch, and gives it to those of a restart.

A worker has random numbers of its own, and loads ahead of the loop. So it writes the state of its generators behind each batch into
memory that it shares with its main process, which reads there what stood behind the last batch that the loop has had of it.
A restart makes workers with the same seed, gives each the state of its forerunner, and hands the next batch to the worker whose
turn it was. Nothing is loaded again.

The generators are those of the process, and those that lie in the dataset and in the collate function, in their classes, or in names that
their functions use. Numbers there to which their class adds (`self.seen += 1`) are noted too, unless a cache or a file beside them
changes with them: of these a restart has nothing. What else a worker keeps is not noted. Called by `checkpoint.state.dataloader`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import mmap
import multiprocessing
import os
import struct
import sys
import textwrap
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, MapDataPipe, dataloader
from torch.utils.data._utils import worker

from holdfast.base.installed import is_installed
from holdfast.checkpoint.entries.rng import process_generators, random_state
from holdfast.tiers.format import values as value_codec

# Bytes for what a worker says behind one batch; a page costs memory when it is written.
_ROOM = 1 << 16
_HEAD = struct.Struct("<QQQ")  # how many batches it has loaded; lengths of states and of words
# Batches of a worker behind which its dataset is looked at for generators that were not there before; then at powers of two.
_LOOKED_AT = 4
# How far a dataset is looked into.
_DEEP, _WIDE, _MANY = 8, 128, 4096
_LEFT = (str, bytes, int, float, torch.Tensor, type, types.ModuleType)
_LISTS = (list, tuple, deque)
_HOLDERS = (*_LISTS, dict, set)

# What was read of classes. Nothing here holds one: a script that runs again in its process has others.
_COUNTS: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()

# By path: how something is read, and how it is set.
Kept = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
# A number of a class or of a module: path, where it lies, by which name, and what it was.
_Number = tuple[str, Mapping[str, Any], str, Any]


def why_not(loader: DataLoader[Any]) -> str:
    """Returns why the workers of a loader cannot say what they draw; empty if they can."""
    iterator = dataloader._MultiProcessingDataLoaderIter
    known = (
        (iterator._reset, "_worker_queue_idx_cycle"),
        (iterator._try_put_index, "_next_index"),
        (worker._worker_loop, "create_fetcher"),
    )
    if any(name not in function.__code__.co_names for function, name in known):
        return "this torch has workers otherwise than is known"
    if not is_forked(loader):
        return "they are not forked"
    if type(loader)._get_iterator is not DataLoader._get_iterator or isinstance(loader.dataset, MapDataPipe):
        return "the loader makes them in a way of its own"
    return "" if getattr(loader, "in_order", True) else "they hand out batches in no order"


def is_forked(loader: DataLoader[Any]) -> bool:
    """Tell whether the workers of a loader are children that are forked."""
    context = loader.multiprocessing_context or torch.multiprocessing
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and getattr(loader, "worker_method", "multiprocessing") == "multiprocessing"


class NotedIterator(dataloader._MultiProcessingDataLoaderIter):
    """An iterator over a loader whose workers note what they draw.

    Args:
        loader: of a dataset with items.
        begun: what `state` returned in the run that saved; None: the workers begin as torch has it.
        first: the number of the worker that loads the first batch.
    """

    def __init__(self, loader: DataLoader[Any], begun: dict[str, Any] | None, first: int) -> None:
        count = loader.num_workers
        self._begun: Sequence[bytes] = begun["states"] if begun is not None else [b""] * count
        self._given = begun["seed"] if begun is not None else None
        self._notes = _Notes(count, (loader.prefetch_factor or 1) + 2)
        self._loaded = [0] * count  # by each worker, before the loader was last gone over
        self._first = self._to_pass = first
        init = loader.worker_init_fn
        with contextlib.suppress(Exception):  # classes are read here, once for all workers, which say what fails
            kept_in(_things(loader.dataset, loader.collate_fn))
        vars(loader)["worker_init_fn"] = _Noting(init, self._notes, self._begun)
        try:
            super().__init__(loader)
        finally:
            vars(loader)["worker_init_fn"] = init

    @property
    def _base_seed(self) -> int:
        """Return the seed of the workers: the one that was given, though another was drawn."""
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed: int = drawn if self._given is None else self._given

    def state(self) -> dict[str, Any]:
        """Return the seed of the workers, and what each has drawn up to the last batch that was had of it."""
        found = [
            self._notes.read(number, loaded) if loaded else (self._begun[number], "")
            for number, loaded in enumerate(self._loaded_of(self._rcvd_idx))
        ]
        return {
            "seed": self._seed,
            "states": [states for states, _ in found],
            "words": next(filter(None, (words for _, words in found)), ""),
        }

    def _loaded_of(self, num_batches: int) -> list[int]:
        """Returns how many batches each worker has loaded when so many were since the loader was last gone over."""
        count = len(self._loaded)
        return [
            before + len(range((number - self._first) % count, num_batches, count))
            for number, before in enumerate(self._loaded)
        ]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._loaded, self._first = self._loaded_of(self._send_idx), 0
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        while self._to_pass:
            next(self._worker_queue_idx_cycle)
            self._to_pass -= 1
        return super()._next_index()  # type: ignore[no-untyped-call]


# The script sees what torch would have made.
NotedIterator.__name__ = NotedIterator.__qualname__ = dataloader._MultiProcessingDataLoaderIter.__name__


class _Notes:
    """Memory that workers share with their main process: for each of them the last few things that it said.

    Args:
        count: of workers.
        kept: so many of each are kept: a worker loads no further ahead.
    """

    def __init__(self, count: int, kept: int) -> None:
        self._kept = kept
        self._memory = mmap.mmap(-1, count * kept * _ROOM)

    def write(self, number: int, loaded: int, states: bytes, words: str) -> None:
        """Says what a worker has drawn, behind so many batches."""
        said = words.encode()[:1024]
        if len(states) + len(said) + _HEAD.size > _ROOM:
            states, said = b"", b"random numbers of its workers, which are too many to be kept"
        at = self._at(number, loaded)
        head = _HEAD.pack(loaded, len(states), len(said))
        self._memory[at : at + len(head) + len(states) + len(said)] = head + states + said

    def read(self, number: int, loaded: int) -> tuple[bytes, str]:
        """Returns what a worker had drawn behind so many batches, and what cannot be kept."""
        at = self._at(number, loaded)
        found, num_states, num_words = _HEAD.unpack(self._memory[at : at + _HEAD.size])
        if found != loaded:
            return b"", "random numbers of its workers, which say nothing of them"
        at += _HEAD.size
        words = self._memory[at + num_states : at + num_states + num_words]
        return self._memory[at : at + num_states], words.decode(errors="replace")

    def _at(self, number: int, loaded: int) -> int:
        return (number * self._kept + loaded % self._kept) * _ROOM


class _Noting:
    """Stands for the `worker_init_fn` of a loader: calls it in the worker, and has the worker note what it draws from there on.

    Args:
        init: the loader's own; None if it has none.
        notes: where it writes.
        begun: what each worker begins with; nothing: with its seed.
    """

    def __init__(self, init: Callable[[int], Any] | None, notes: _Notes, begun: Sequence[bytes]) -> None:
        self._init, self._notes, self._begun = init, notes, begun
        self._number, self._loaded = 0, 0
        self._kept: Kept = {}
        self._dataset: Any = None
        self._beside: list[_Beside] = []
        self._numbers: list[_Number] = []
        self._seeded: dict[str, Any] = {}
        self._drawn: tuple[dict[str, Any], bytes] = ({}, b"")
        self._words = ""

    def __call__(self, number: int) -> None:
        """Begins a worker."""
        if self._init is not None:
            self._init(number)
        self._number, original = number, dataloader._DatasetKind.create_fetcher

        def create_fetcher(kind: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> Any:
            fetcher = original(kind, dataset, auto_collation, collate_fn, drop_last)  # type: ignore[no-untyped-call]
            things, fetch = _things(dataset, collate_fn), fetcher.fetch
            if not self._kept:
                self._begins(things)
            elif dataset is not self._dataset:  # a loader that the dataset goes over in the worker
                return fetcher
            self._dataset = dataset

            def fetched(index: Any) -> Any:
                try:
                    return fetch(index)
                finally:
                    self._ends(things)

            fetcher.fetch = fetched
            return fetcher

        setattr(dataloader._DatasetKind, "create_fetcher", staticmethod(create_fetcher))  # noqa: B010 - of this process alone

    def _begins(self, things: dict[str, Any]) -> None:
        """Takes over what was noted of a forerunner, before the first batch."""
        self._kept = process_generators() | self.found(things)
        self._seeded = self._states()
        begun = self._begun[self._number]
        for path, state in (value_codec.decode(begun) if begun else {}).items():
            try:
                self._kept[path][1](state)
            except Exception:  # noqa: BLE001 - it is not there, or is one of another kind
                self._words = f"{path!r}, which was there when they were saved"

    def found(self, things: dict[str, Any]) -> Kept:
        """Returns what can be noted of a dataset and a collate function."""
        try:
            looked = _Look(things)
            if not self._kept:
                self._beside, self._numbers, self._words = looked.beside, looked.numbers, looked.words
            return looked.found
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the worker has to go on
            self._words = f"what cannot be looked at: {type(error).__name__}: {error}"
            return {}

    def _ends(self, things: dict[str, Any]) -> None:
        """Notes what has been drawn, behind a batch."""
        self._loaded += 1
        try:
            self._look_again(things)
            drawn = {name: state for name, state in self._states().items() if state != self._seeded[name]}
            if drawn != self._drawn[0]:
                self._drawn = (drawn, value_codec.encode(drawn))
        except Exception as error:  # noqa: BLE001 - the batch was loaded, and is handed out
            self._drawn, self._words = ({}, b""), f"what its workers draw: {type(error).__name__}: {error}"
        self._notes.write(self._number, self._loaded, self._drawn[1], self._words)

    def _look_again(self, things: dict[str, Any]) -> None:
        """Finds what changed in a way that nobody can note."""
        if (self._loaded <= _LOOKED_AT or not self._loaded & (self._loaded - 1)) and not self._words:
            for path, (read, _) in self.found(things).items():
                if path not in self._kept or read() != self._kept[path][0]():  # another one took its place
                    self._words = f"{path!r}, which a worker makes"
        for each in self._beside:
            self._leave_out(each)
        if not self._words:
            now = ((path, held.get(name), was) for path, held, name, was in self._numbers)
            changed = (
                path
                for path, number, was in now
                if number is not was and (type(number) is not type(was) or number != was)
            )
            self._words = next((f"{path!r}, which a worker changes" for path in changed), "")

    def _leave_out(self, beside: _Beside) -> None:
        """Keeps counts no more beside which something changed that nobody keeps."""
        if (changed := beside.changed()) and (not self._words or beside.counts & self._kept.keys()):
            self._words = f"{beside.path + changed!r}, which a worker changes"
            for path in beside.counts:
                self._kept.pop(path, None)

    def _states(self) -> dict[str, Any]:
        found = {}
        for name, (read, _) in list(self._kept.items()):
            try:
                found[name] = read()
            except Exception:  # noqa: BLE001 - it is of another kind now, or cannot be asked in a worker
                del self._kept[name]
                self._words = f"{name!r}, which cannot be read"
        return found


def _things(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    return {"dataset": dataset, "collate_fn": collate_fn}


def kept_in(things: dict[str, Any]) -> Kept:
    """Returns the generators of random numbers that lie in objects, and the numbers there that are counts, by path."""
    return _Look(things).found


class _Look:
    """Looks into objects, by name.

    Attributes:
        found: generators of random numbers, and numbers that are counts, by path.
        beside: objects that hold one of these, with what else they hold.
        numbers: those of classes and modules that functions of the user's use.
        words: what lies in something that is too long to be looked into; empty if nothing was seen.
    """

    def __init__(self, things: dict[str, Any]) -> None:
        self.found: Kept = {}
        self.beside: list[_Beside] = []
        self.numbers: list[_Number] = []
        self.words = ""
        seen: set[int] = set()
        stack = [(name, value, 0) for name, value in reversed(things.items())]
        while stack and len(seen) < _MANY:
            path, value, depth = stack.pop()
            if value is None or isinstance(value, _LEFT) or id(value) in seen:
                continue
            seen.add(id(value))
            if value is not torch.default_generator and (state := random_state(value)) is not None:
                self.found[path + "'" * (path in self.found)] = state
                continue
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and not isinstance(value, types.FunctionType):
                self._holds(path, type(value), held)
            if depth < _DEEP:
                for base, where, names in _meant(path, value):
                    meant = {name: where[name] for name in names if name in where}
                    stack += [(f"{base}.{name}", part, depth + 1) for name, part in meant.items()]
                    numbers = [name for name, part in meant.items() if type(part) in (int, float)]
                    self.numbers += [(f"{base}.{name}", where, name, where[name]) for name in numbers]
                stack += [(f"{path}{name}", part, depth + 1) for name, part in _parts(value, held)]
            if isinstance(value, (*_LISTS, dict)) and len(value) > _WIDE:
                self._is_long(path, value)

    def _holds(self, path: str, kind: type, held: dict[str, Any]) -> None:
        numbers = {name for name, value in held.items() if type(value) in (int, float)}
        counts = counts_of(kind) & numbers if numbers else frozenset[str]()
        for name in counts:
            self.found[f"{path}.{name}"] = (functools.partial(_number, held, name), functools.partial(_put, held, name))
        if counts or any(random_state(value) is not None for value in list(held.values())[:_WIDE]):
            self.beside.append(_Beside(path, held, counts))

    def _is_long(self, path: str, value: Any) -> None:
        """Tells if there are generators in it: these are not kept."""
        first = itertools.islice(value.values() if isinstance(value, dict) else value, 4)
        if any(random_state(part) is not None or random_in(part) for part in first):
            self.words = f"{path!r}, which has too many generators of random numbers"


class _Beside:
    """An object that holds generators or counts, and what else it holds.

    Args:
        path: of the object.
        held: its attributes.
        counts: which of them are counts.
    """

    def __init__(self, path: str, held: dict[str, Any], counts: frozenset[str]) -> None:
        self.path = path + "."
        self.counts = frozenset(self.path + name for name in counts)
        self._held = held
        self._was = {name: _mark(value) for name, value in held.items() if name not in counts}

    def changed(self) -> str:
        """Returns the name of what is not as it was, and on which the others may depend; empty: there is none.

        Beside a generator that is a mark that it was seeded. Beside a count it is also a cache, or a file that was opened.
        """
        for name, (was, length) in self._was.items():
            value = self._held.get(name)
            if value is was and (length is None or len(value) == length):
                continue
            if (isinstance(was, bool) or was is None) and isinstance(value, bool | int | str):
                return name
            is_plain = (
                isinstance(value, int | float | str | bytes)
                or hasattr(value, "dtype")
                or random_state(value) is not None
            )
            if self.counts and not is_plain:
                return name
        return ""


def _mark(value: Any) -> tuple[Any, int | None]:
    return value, len(value) if isinstance(value, _HOLDERS) else None


def _number(held: dict[str, Any], name: str) -> Any:
    value = held[name]
    if type(value) not in (int, float) and not (
        hasattr(value, "item") and type(value).__module__ == "numpy" and not value.ndim
    ):
        raise TypeError(name)
    return value


def _put(held: dict[str, Any], name: str, value: Any) -> None:
    held[name] = value


def random_in(value: Any) -> bool:
    """Tell whether an object has a generator of random numbers as an attribute."""
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and any(random_state(part) is not None for part in list(held.values())[:_WIDE])


def _parts(value: Any, held: Any) -> Iterator[tuple[str, Any]]:
    """Yields what lies in a value that is not too wide, with what is added to its path."""
    if isinstance(value, _LISTS) and len(value) <= _WIDE:
        yield from ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, dict) and len(value) <= _WIDE:
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(held, dict) and not isinstance(value, types.FunctionType):
        yield from ((f".{name}", part) for name, part in held.items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield f".{name}", getattr(value, name, None)


def _meant(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any], Iterable[str]]]:
    """Yields names that an object reaches beside what lies in it, through its class and functions of the user's: path, place, names."""
    functions = [value] if isinstance(value, types.FunctionType) else []
    for kind in type(value).__mro__:
        if _is_of_users(kind.__module__):
            functions += [part for each in vars(kind).values() if isinstance(part := _bare(each), types.FunctionType)]
            yield path, vars(kind), list(vars(kind))
    for function in functions:
        if not is_installed(function.__code__.co_filename):
            yield function.__module__, function.__globals__, _names_in(function.__code__)
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            held = {name: found[0] for name, cell in cells if (found := _contents(cell))}
            yield path, held, held


def _bare(part: Any) -> Any:
    return getattr(part, "__func__", getattr(part, "fget", part))


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@functools.lru_cache(maxsize=1024)
def _is_of_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(os.path.abspath(file)))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function and those within it use."""
    within = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_in(part)]
    return tuple(dict.fromkeys([*code.co_names, *within]))


def counts_of(kind: type) -> frozenset[str]:
    """Returns the attributes to which the methods of a class add: `self.seen += 1`, `self.seen = self.seen + 1`."""
    if kind not in _COUNTS:
        _COUNTS[kind] = _read_counts(kind)
    return _COUNTS[kind]


def _read_counts(kind: type) -> frozenset[str]:
    if kind.__module__.partition(".")[0] in ("torch", "torchvision", "numpy", "builtins"):
        return frozenset()
    found = set[str]()
    for each in kind.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each))) if each is not object else ast.Module([], [])
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign):
                found |= _own([node.target])
            elif isinstance(node, ast.Assign):
                found |= _own(node.targets) & _own(list(ast.walk(node.value)))
    return frozenset(found)


def _own(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the attributes of `self` among nodes."""
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
