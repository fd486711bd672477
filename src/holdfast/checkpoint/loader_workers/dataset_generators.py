"""Finds generators of random numbers and counts that lie in the dataset of a data loader and in its collate function.

They lie in these objects, in their classes, or in names that their functions use. A count is a number to which its class adds
(`self.seen += 1`). It counts no more if a cache or a file beside it changes with it: of these a restart has nothing.
What was found once is asked for what changed since. Called in a worker by `worker_draws`, and before it is forked.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import random
import sys
import textwrap
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.base.handler_errors import pass_on
from holdfast.base.installed import is_installed
from holdfast.checkpoint.containers import dict_of, items_of, length_of, parts_of, slots_of
from holdfast.checkpoint.entries.rng import random_state

# How far a dataset is looked into.
_DEEP, _WIDE, _MANY = 24, 128, 4096
_LEFT = (str, bytes, int, float, torch.Tensor, types.ModuleType)
_LISTS = (list, tuple, deque)
_FEW = 4  # parts of what is too wide that are looked into
_HOLDERS = (*_LISTS, dict, set)

# So long a list of counts is compared.
_LONG = 1 << 20

# What was read of classes: their counts, and their lists of counts. Nothing here holds one: a script that runs again in its process has others.
_COUNTS: weakref.WeakKeyDictionary[type, tuple[frozenset[str], frozenset[str]]] = weakref.WeakKeyDictionary()

# By path: how something is read, and how it is set.
Kept = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
# A number of a class or of a module: path, where it lies, by which name, and what it was.
Number = tuple[str, Mapping[str, Any], str, Any]


def kept_in(things: dict[str, Any]) -> Kept:
    """Returns the generators of random numbers that lie in objects, and the numbers there that are counts, by path."""
    return Look(things).found


class Look:
    """Looks into objects, by name.

    Attributes:
        found: generators of random numbers, and numbers that are counts, by path.
        beside: objects that hold one of these, with what else they hold.
        numbers: those of classes and modules that functions of the user's use.
        lists: what lies in lists, dicts and arrays of counts, by path.
        words: what lies in something that is too long to be looked into; empty if nothing was seen.
    """

    def __init__(self, things: dict[str, Any]) -> None:
        self.found: Kept = {}
        self.beside: list[Beside] = []
        self.numbers: list[Number] = []
        self.lists: dict[str, Any] = {}
        self.words = ""
        seen, long = set[int](), list[str]()
        left = deque((name, value, 0) for name, value in things.items())
        while left and len(seen) < _MANY:  # what lies deep, or behind much else, comes last
            path, value, depth = left.popleft()
            if value is None or isinstance(value, _LEFT) or id(value) in seen:
                continue
            if isinstance(value, type) and not _is_of_users(value.__module__):
                continue
            seen.add(id(value))
            held = dict_of(value)
            if held is not None and not isinstance(value, types.FunctionType):
                self._holds(path, type(value), held)
            if value is not torch.default_generator and (state := random_state(value)) is not None:
                self.found[path + "'" * (path in self.found)] = state
                continue
            if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                self.words = f"{path!r}, a generator with a state of its own kind"
            if depth < _DEEP:
                for base, where, names in _meant(path, value):
                    meant = {name: where[name] for name in names if name in where}
                    left += [(f"{base}.{name}", part, depth + 1) for name, part in meant.items()]
                    numbers = [name for name, part in meant.items() if type(part) in (int, float)]
                    self.numbers += [(f"{base}.{name}", where, name, where[name]) for name in numbers]
                left += [(f"{path}{name}", part, depth + 1) for name, part in _parts(value, held)]
            if isinstance(value, (*_LISTS, dict)) and length_of(value) > _WIDE:
                long.append(path)
        for path in long:
            self._is_long(path + "[")

    def _holds(self, path: str, kind: type, held: dict[str, Any]) -> None:
        numbers = {name for name, value in held.items() if type(value) in (int, float)}
        counts, lists = (
            counts_of(kind) if numbers or _is_of_users(kind.__module__) else (frozenset[str](), frozenset[str]())
        )
        counts, lists = counts & numbers, lists & held.keys()
        self.lists |= {f"{path}.{name}": each for name in lists if (each := _in_list(held[name])) is not None}
        for name in counts:
            self.found[f"{path}.{name}"] = (functools.partial(_number, held, name), functools.partial(_put, held, name))
        if counts or any(random_state(value) is not None for value in list(held.values())[:_WIDE]):
            self.beside.append(Beside(path, held, counts))

    def _is_long(self, path: str) -> None:
        """Tells if there are generators in it, and not the same one in all parts: these are not kept."""
        counts = frozenset[str]().union(*(each.counts for each in self.beside))
        within = {each[len(path) :].partition("]")[0] for each in self.found.keys() - counts if each.startswith(path)}
        if len(within) > 1:
            self.words = f"{path[:-1]!r}, which has too many generators of random numbers"


class Beside:
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
            if value is was and (length is None or length_of(value) == length):
                continue
            if (isinstance(was, bool) or was is None) and isinstance(value, bool | int | str):
                return name
            is_plain = (
                isinstance(value, int | float | str | bytes)
                or hasattr(type(value), "dtype")
                or random_state(value) is not None
            )
            if self.counts and not is_plain:
                return name
        return ""


def _mark(value: Any) -> tuple[Any, int | None]:
    return value, length_of(value) if isinstance(value, _HOLDERS) else None


def _number(held: dict[str, Any], name: str) -> Any:
    value = held[name]
    if type(value) not in (int, float) and not (
        type(value).__module__ == "numpy" and hasattr(value, "item") and not value.ndim
    ):
        raise TypeError(name)
    return value


def _put(held: dict[str, Any], name: str, value: Any) -> None:
    held[name] = value


def _first(value: Any) -> Iterator[tuple[Any, Any]]:
    length = length_of(value)
    return itertools.islice(items_of(value), length if length <= _WIDE else _FEW)


def _parts(value: Any, held: Any) -> Iterator[tuple[str, Any]]:
    """Yields what lies in a value that is not too wide, with what is added to its path."""
    if isinstance(value, (*_LISTS, dict)):
        yield from ((f"[{key!r}]", part) for key, part in _first(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif held is not None and not isinstance(value, types.FunctionType):
        yield from ((f".{name}", part) for name, part in held.items())
    yield from ((f".{name}", part) for name, part in slots_of(value))


def _meant(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any], Iterable[str]]]:
    """Yields names that an object reaches beside what lies in it, through its class and functions of the user's: path, place, names."""
    functions = [value] if isinstance(value, types.FunctionType) else []
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        if _is_of_users(kind.__module__):
            functions += [part for each in vars(kind).values() if isinstance(part := _bare(each), types.FunctionType)]
            yield path, vars(kind), list(vars(kind))
    for function in functions:
        code = function.__code__
        if not is_installed(code.co_filename):
            names = _names_in(code)
            places: list[tuple[str, dict[str, Any]]] = [(function.__module__, function.__globals__)]
            for base, where in places:  # and modules that are named there: `transforms.blur`
                yield base, where, names
                parts = [part for name in names if isinstance(part := where.get(name), types.ModuleType)]
                for part in parts:
                    if _is_of_users(part.__name__) and all(vars(part) is not known for _, known in places):
                        places.append((part.__name__, vars(part)))
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            held = {name: found[0] for name, cell in cells if (found := _contents(cell))}
            preset = function.__defaults__ or ()
            held |= zip(code.co_varnames[code.co_argcount - len(preset) : code.co_argcount], preset, strict=True)
            held |= function.__kwdefaults__ or {}
            yield path, held, held


def _bare(part: Any) -> Any:
    if isinstance(part, property):
        return part.fget
    return part.__func__ if isinstance(part, staticmethod | classmethod | types.MethodType) else part


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@functools.lru_cache(maxsize=1024)
def _is_of_users(module: str) -> bool:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    return module == "__main__" or (file is not None and not is_installed(os.path.abspath(file)))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that a function and those within it use."""
    within = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_in(part)]
    return tuple(dict.fromkeys([*code.co_names, *within]))


def _in_list(value: Any) -> Any:
    """Returns the numbers in a list, a dict, an array or a tensor, to be compared; None: they are none, or too many."""
    if isinstance(value, torch.Tensor):
        try:
            value = value.detach().numpy()
        except (TypeError, RuntimeError) as error:  # of a device, or of a dtype that NumPy does not have
            pass_on(error)
            return None
    if hasattr(type(value), "tobytes") and hasattr(type(value), "nbytes"):
        return xxhash.xxh3_64_intdigest(value.tobytes()) if value.nbytes <= 8 * _LONG else None
    if not isinstance(value, (*_LISTS, dict)) or length_of(value) > _LONG:
        return None
    numbers = list(parts_of(value))
    return numbers if all(type(each) in (int, float) for each in numbers) else None


def counts_of(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the attributes to which the methods of a class add, and those to parts of which they do nothing but add.

    The first are of the kind `self.seen += 1` or `self.seen = self.seen + 1`, the second `self.seen[index] += 1`. What they also set or clear,
    but where the object begins, may be meant for one item alone.
    """
    if kind not in _COUNTS:
        _COUNTS[kind] = _read_counts(kind)
    return _COUNTS[kind]


def _read_counts(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    if kind.__module__.partition(".")[0] in ("torch", "torchvision", "numpy", "builtins"):
        return frozenset(), frozenset()
    found, lists, others = set[str](), set[str](), set[str]()
    for each in kind.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each))) if each is not object else ast.Module([], [])
        except (OSError, TypeError, SyntaxError, ValueError) as error:
            pass_on(error)
            continue
        for method in _methods(tree):
            _call_self(method)
        begins = {
            node
            for method in ast.walk(tree)
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__setstate__")
            for node in ast.walk(method)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign):
                found |= _own([node.target])
                lists |= _own(_whole([node.target])) - _own([node.target])
            elif isinstance(node, ast.Assign):
                found |= _own(node.targets) & _own(list(ast.walk(node.value)))
            if node not in begins:
                others |= _own(_whole(_written(node)))
    return frozenset(found), frozenset(lists - others)


def _methods(tree: ast.AST) -> list[ast.FunctionDef]:
    """Returns the functions of classes that are called with an object of theirs."""
    functions = [each for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for each in kind.body]
    return [each for each in functions if isinstance(each, ast.FunctionDef) and not _has_no_object(each)]


def _has_no_object(function: ast.FunctionDef) -> bool:
    named = {each.id for each in function.decorator_list if isinstance(each, ast.Name)}
    return not named.isdisjoint({"staticmethod", "classmethod"})


def _call_self(method: ast.FunctionDef) -> None:
    """Gives the object that a method is called with the name `self`, whatever the method calls it: its first parameter."""
    first = next((each.arg for each in (*method.args.posonlyargs, *method.args.args)), "self")
    for node in ast.walk(method) if first != "self" else ():
        if isinstance(node, ast.Name) and node.id in (first, "self"):
            node.id = "self" if node.id == first else ""


def _written(node: ast.AST) -> list[ast.AST]:
    """Returns what a statement may set or clear: `self.seen[0] = 0`, `self.seen.clear()`, `add(a, b, out=self.seen)`."""
    if isinstance(node, ast.Assign | ast.Delete):
        return list(node.targets)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        return [*node.value.args, *([called.value] if isinstance(called, ast.Attribute) else [])]
    return [each.value for each in node.keywords if each.arg == "out"] if isinstance(node, ast.Call) else []


def _whole(nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """Returns what nodes are parts of, `self.seen` for `self.seen[0][1]`; of a tuple that of each."""
    found: list[ast.AST] = []
    for node in nodes:
        while isinstance(node, ast.Subscript):
            node = node.value
        found += _whole(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]
    return found


def _own(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the attributes of `self` among nodes."""
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
