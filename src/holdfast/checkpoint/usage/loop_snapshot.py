"""Tells what one look at the names of a loop finds that may be in no version: each with a token that is equal as long
as it is.

Pure but for what it is asked to look at; what of it is told is the observer's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.base.handler_errors import forgive, pass_on
from holdfast.checkpoint.containers import items_of, length_of, parts_of
from holdfast.checkpoint.entries.rng import random_state
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.state import unsaved_state
from holdfast.checkpoint.state.stateful import Stateful
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.given_objects import Given
from holdfast.checkpoint.usage.in_place import kept_by, left_in, parsed
from holdfast.checkpoint.usage.loop_analysis import Around, around

# What a script makes anew in the middle of a training, and no version says which one it was.
_MADE = (nn.Module, Optimizer, LRScheduler, DataLoader, Dataset, Sampler)
# Entries of a container that is looked at as `restore()` is called.
MAX_EARLY = 1000
# Elements of an array by which it is seen that it changes.
MAX_ELEMENTS = 16
# Items of a container that are looked into.
MAX_ITEMS = 20
# Tensors by which it is seen that a module changes, or that an optimizer steps.
MAX_WITNESSES = 32

_BY_INDEX = "work it out from the index, or set it by the number of the step"
_COUNTED = {
    "__iter__": "set it before each epoch, by the number of the epoch",
    "__getitem__": _BY_INDEX,
    "__getitems__": _BY_INDEX,
}

# What classes of the user's were found to leave in their objects.
_LEFT_IN: WeakKeyDictionary[type, Mapping[str, int] | None] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that may be in no version.

    Attributes:
        name: how the script calls it.
        what: what it is, where, and the remedy if that is not `carry`.
        token: equal as long as it is; True: there is no need to see it change.
        carried: whether `carry` keeps it.
    """

    name: str
    what: str
    token: object
    carried: bool = False


@dataclass(frozen=True, slots=True)
class Early:
    """Says what there was as `restore()` was called.

    Attributes:
        iterators: those that names meant.
        tokens: of plain values, by the names and attributes that had them.
        code: of the function that called; None if that is not the user's.
    """

    iterators: Sequence[object] = ()
    tokens: Mapping[str, object] = field(default_factory=dict)
    code: CodeType | None = None


def look(found: Around, names: Mapping[str, Any], given: Given, early: Sequence[object]) -> Iterator[Finding]:
    """Yields everything that may be in no version.

    Args:
        found: the loops.
        names: what names mean there.
        given: what is saved.
        early: iterators that were there before `restore()`.
    """
    for name, line in found.lives.items():
        value = names.get(name)
        kind = "" if name not in names or given.has(value) else kind_of(value)
        if kind:
            has_changed = name in found.begins and _is_another(value, found.begins[name])
            text = f"{kind} that lives from one step to the next, set in line {line}"
            yield _carried(name, value, text, has_changed=has_changed)
        elif isinstance(value, _MADE) and not given.has(value) and name not in found.numbered:
            is_certain = isinstance(value, DataLoader)
            text = f"is another one since line {line}, and no version knows of it: set it in every turn, by the number of the step"
            yield Finding(name, text, is_certain or id(value))
    held = dict(_held(found, names))
    items = set(map(id, held.values()))  # a loop may give one a name of its own
    yield from _of_changes(found, names, held, given)
    yield from _of_things(found, {name: value for name, value in names.items() if id(value) not in items}, given, early)
    for line, over in found.goes_over.items():
        for name in over:
            value = names.get(name)
            if isinstance(value, DataLoader) and not given.has(value):
                yield Finding(
                    name,
                    f"the loader that line {line} goes over, which begins anew: Checkpointer(..., loader={name})",
                    True,
                )
    yield from _of_cells(found, names)
    yield from _of_epochs(found, names, given)
    yield from _of_turns(found, names, given)


def _of_turns(found: Around, names: Mapping[str, Any], given: Given) -> Iterator[Finding]:
    """Yields what a restart does not do again, as it goes on with the next turn of the loop."""
    for path, (line, is_passed) in found.late.items():
        value = meant(path, names)
        if is_passed or (given.has(value) and isinstance(value, Optimizer | LRScheduler | GradScaler | nn.Module)):
            text = f"is changed in line {line}, behind step(), and a restart does not do that again: call step() last in the loop"
            yield Finding(path, text, True)
    for path, line in found.placed.items():
        value = meant(path, names)
        if _is_data(meant(path.rpartition(".")[0], names)) and (kind := kind_of(value)):
            yield _carried(
                path, value, f"{kind} that the data of a loader hands out in the next turn, set in line {line}"
            )
    if found.frozen is not None:
        text = f"is set in line {found.frozen} in one turn alone, and is in no version: set it in every turn, by the number of the step"
        yield Finding("requires_grad", text, True)


def meant(path: str, names: Mapping[str, Any]) -> Any:
    """Returns what a path means; None if it cannot be told."""
    root, *rest = path.split(".")
    value = names.get(root)
    for word in rest:
        value = _attributes(value).get(word)
    return value


def _attributes(value: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object, the modules of a module among them."""
    held = vars(value) if _has_attributes(value) else {}
    return {**held, **value._modules} if isinstance(value, nn.Module) else held


def _of_data(name: str, loader: DataLoader[Any], given: Given) -> Iterator[Finding]:
    """Yields the generators of random numbers that the data of a loader draws from, and counts of its own, which no version has."""
    parts = {"dataset": loader.dataset, "sampler": loader.sampler, "batch_sampler": loader.batch_sampler}
    for word, part in parts.items():
        if type(part).__module__.startswith("torch.") or hasattr(type(part), "state_dict"):
            continue
        for key, value in _attributes(part).items():
            state = None if isinstance(value, torch.Generator) and key == "generator" else random_state(value)
            if state is not None and value is not torch.default_generator and not given.is_named(value):
                text = "a generator of random numbers that was used; of a loader its place is kept: Checkpointer(..., generator=...)"
                yield Finding(f"{name}.{word}.{key}", text, repr(state[0]()))
        for key, remedy in _counts(type(part)).items():
            if key in _attributes(part):
                text = f"a count of its own, and of a loader its place is kept: {remedy}"
                yield Finding(f"{name}.{word}.{key}", text, _token(_attributes(part)[key]))


def _counts(kind: type) -> dict[str, str]:
    """Returns the attributes that samplers, streams and datasets of a class count as they hand out, each with the remedy.

    None that `__iter__` counts where the script can set the epoch.
    """
    try:
        tree = parsed(inspect.getsource(kind))
    except (OSError, TypeError, SyntaxError) as error:
        pass_on(error)
        return {}
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    can_be_set = any(method.name == "set_epoch" for method in methods)
    return {
        node.target.attr: _COUNTED[method.name]
        for method in methods
        if method.name in _COUNTED and not (can_be_set and method.name == "__iter__")
        for node in ast.walk(method)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
    }


def _of_epochs(found: Around, names: Mapping[str, Any], given: Given) -> Iterator[Finding]:
    """Yields what goes wrong within, or right behind, an epoch of a loader that was given."""

    def loader(over: Iterable[str]) -> str:
        return next((name for name in over if isinstance(names.get(name), DataLoader) and given.has(names[name])), "")

    for name, (line, over) in found.counts.items():
        if of := loader(over):
            yield Finding(
                name,
                f"counts the batches of {of}, and line {line} decides by it. It begins with 0 again where a restart goes on within an "
                "epoch: count in a name that is carried, or decide by the number of the step",
                True,
            )
    if found.epoch and any(map(loader, found.goes_over.values())):
        yield Finding(
            found.epoch,
            "counted from the number of restore(). A version behind the last batch of an epoch goes on with nothing of that epoch, and "
            "what follows it: begin with max(start - 1, 0) // ..., or carry it",
            True,
        )
    for name, (line, over) in found.ends.items():
        if of := loader(over):
            yield Finding(
                name,
                f"is read behind the loop of line {line}. A version behind the last batch of {of} goes on with nothing of that epoch, so it "
                f'has no value there: {name} = {found.caller}.carry("{name}", None) behind restore(), and pass it to step()',
                True,
            )
    for line, over in found.skips.items():
        if of := loader(over):
            text = f"goes on at its place by itself, and islice() in line {line} leaves out as many batches again: go over {of} alone"
            yield Finding(of, text, True)
    for line, over in found.cycles.items():
        if of := loader(over):
            yield Finding(
                of,
                f"is gone over by cycle() in line {line}, which keeps the batches of its first pass; no version has them",
                True,
            )


def _held(found: Around, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields path and object of those in containers that the loops read, if the user wrote their class: callbacks in a list."""
    for name, value in list(_things(found, names)):
        is_looked_into = isinstance(value, list | tuple | dict) and length_of(value) <= MAX_ITEMS
        for key, item in items_of(value) if is_looked_into else ():
            if isinstance(key, str | int | Enum) and _has_attributes(item) and _left_in(type(item)) is not None:
                yield f"{name}[{_written(key)}]", item


def _written(key: object) -> str:
    """Returns a key as a script writes it: those of classes with values of their own are shown as they cannot be written."""
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key.name}"
    return str.__repr__(key) if isinstance(key, str) else repr(key)


def _is_passed(path: str, name: str, item: object, found: Around, names: Mapping[str, Any]) -> bool:
    """Tell whether `step` is passed an attribute of an object in a container: by its path, as a whole, or by a name of its own."""
    written = f"{path}.{name}"
    return f".{name.rpartition('.')[2]}" in found.passed or any(
        f"{written}.".startswith((f"{each}.", f"{each}["))
        or meant(each, names) is item
        or (each.endswith(f".{name}") and meant(each.removesuffix(f".{name}"), names) is item)
        for each in found.passed
    )


def _has_attributes(value: object) -> bool:
    """Tell whether a value has a dict of attributes; one that does not want to be asked has none."""
    with forgive(Exception):
        return hasattr(value, "__dict__")
    return False  # of the user's objects


def _of_changes(found: Around, names: Mapping[str, Any], held: Mapping[str, Any], given: Given) -> Iterator[Finding]:
    """Yields what the loops change in place: of their names, and of `held` objects, which they may give a name of their own."""
    items = set(map(id, held.values()))
    by_class: dict[type, dict[str, int]] = {type(item): dict(_left_in(type(item)) or {}) for item in held.values()}
    for path, line in found.changed.items():
        root, *rest = path.split(".")
        value = names.get(root)
        if id(value) in items:
            by_class[type(value)].setdefault(".".join(rest), line)
        elif root in found.inner:  # behind restore() it means nothing yet
            for each in _of_changed(path, rest, line, value, given):
                yield replace(each, what=f"{each.what}; carry it by the name of what holds it", carried=False)
        else:
            yield from _of_changed(path, rest, line, value, given)
    for path, item in held.items():
        for name, line in by_class[type(item)].items():
            if line and not _is_passed(path, name, item, found, names):
                yield from _of_changed(f"{path}.{name}", name.split("."), line, item, given)
        for name, part in _attributes(item).items() if not isinstance(item, nn.Module) else ():
            token, what = _judge(part, given)
            if token is not None:
                yield Finding(f"{path}.{name}", what, token)


def _of_things(found: Around, names: Mapping[str, Any], given: Given, early: Sequence[object]) -> Iterator[Finding]:
    """Yields what the loops read that has a state of its own."""
    for name, value in _things(found, names):
        token, what = _judge(value, given)
        if isinstance(value, DataLoader):
            yield from _of_data(name, value, given)
        if _is_iterator(value) and not isinstance(value, Stateful) and not given.has(value):
            token, what = _of_iterator(value, given, early) if name.rpartition(".")[2] in found.drawn else (None, "")
        if token is not None:
            yield Finding(name, what, token)


def _left_in(kind: type) -> Mapping[str, int] | None:
    """Returns what methods of a class leave to their next calls, with 0 for what they set anew; None if the user did not write it."""
    if type(kind).__hash__ is not type.__hash__:
        return None  # a class of classes may forbid it
    if kind not in _LEFT_IN:
        found: dict[str, int] = {}
        is_users = False
        for each in kind.__mro__:
            try:
                file = inspect.getsourcefile(each)
                if file is None or not user_frames.is_users_file(file):
                    continue
                lines, first = inspect.getsourcelines(each)
                found = {**left_in("".join(lines), first), **found}
            except (OSError, TypeError, SyntaxError) as error:  # no text, or that of a file that was changed since
                pass_on(error)
                continue
            is_users = True
        _LEFT_IN[kind] = found if is_users else None
    return _LEFT_IN[kind]


def _of_changed(path: str, words: Sequence[str], line: int, value: Any, given: Given) -> Iterator[Finding]:
    """Yields a value that is changed in place: `value` itself, or what its attributes of these names lead to."""
    owner = None
    for word in words:
        if not word:
            return  # a loop gave an item a name, and changes the item itself
        owner, value = value, _attributes(value).get(word)
        if isinstance(owner, Optimizer | LRScheduler) or type(owner).__module__.partition(".")[0] == "holdfast":
            return  # the one is looked at elsewhere, the other is ours
        if given.has(owner) and not isinstance(owner, nn.Module) and not _is_data(owner):
            return  # it hands out what it has
    parts = parts_of(value) if isinstance(value, list | tuple) else [value]
    if (given.has(value) and not _is_data(owner)) or all(isinstance(t, torch.Tensor) and given.saves(t) for t in parts):
        return
    if isinstance(value, deque):
        text = f"a deque that is changed from one step to the next, in line {line}; carry keeps it as a list"
        yield Finding(path, text, _token(value))
    elif kind := kind_of(value):
        yield _carried(path, value, f"{kind} that is changed from one step to the next, in line {line}")


def _of_cells(found: Around, names: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the functions that keep a value for their next call, which is no name of the loop."""
    for called in sorted(found.reads & names.keys()):
        function = names[called]
        if not isinstance(function, FunctionType) or not function.__closure__:
            continue
        cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
        for name, line in _kept_by(function.__code__).items():
            try:
                value = cells[name].cell_contents
            except ValueError:  # not set yet
                continue
            if name not in names and (kind := kind_of(value)):
                text = f"keeps {name}, {kind} that is changed from one step to the next, in line {line}: make it a name of the loop"
                yield Finding(called, text, _token(value))


@functools.lru_cache(maxsize=64)
def _kept_by(code: CodeType) -> Mapping[str, int]:
    """Returns what a function of the user's keeps of the one around it."""
    with forgive(OSError, SyntaxError):
        lines, first = inspect.getsourcelines(code)
        return kept_by("".join(lines), first) if user_frames.is_users_file(code.co_filename) else {}
    return {}  # a lambda's text may be a part of a line


def _is_another(value: Any, begins: object) -> bool:
    """Tell whether a value is surely not the number, or the None, that it began with."""
    if begins is None or value is None:
        return value is not begins
    return isinstance(value, int | float) and isinstance(begins, int | float) and value != begins


def _carried(name: str, value: Any, text: str, *, has_changed: bool = False) -> Finding:
    """Returns what is found of a value that `carry` keeps, if it is no class of its own, or holds none."""
    kinds = {_kept_as(kind) for kind in _classes(value)}
    if kinds:
        text += f"; carry keeps it as a {', '.join(sorted(kinds))}"
    return Finding(name, text, has_changed or _token(value), carried=not kinds)


def _kept_as(kind: type) -> str:
    """Returns what `carry` keeps instead of a class that it refuses."""
    name = kind.__mro__[-2].__name__
    return {"ndarray": "tensor", "generic": "number"}.get(name, name)


def _classes(value: Any) -> Iterator[type]:
    """Yields the classes in a value that `carry` refuses: `defaultdict`, those of `namedtuple`, of NumPy."""
    if _is_numpys(value):
        yield type(value)
    if isinstance(value, dict | list | tuple) and not isinstance(value, torch.Size):
        if type(value) not in (dict, list, tuple, OrderedDict, Counter):
            yield type(value)
        for part in parts_of(value):
            yield from _classes(part)


def _is_data(value: object) -> bool:
    """Tell whether this is a part of a loader, of which only the place is kept."""
    return isinstance(value, Sampler | Dataset) and not isinstance(value, Stateful)


def look_early(frame: FrameType | None, objects: Mapping[str, Any]) -> Early:
    """Returns what there is as `restore()` is called. torchdata's loaders, among the objects that the Checkpointer was
    given, keep the iterator that they made last.
    """
    user = user_frames.users(frame)
    names = user_frames.names(user) if user is not None else {}
    held = [
        *names.values(),
        *(getattr(value, "_iterator", None) for value in objects.values() if isinstance(value, DataLoader)),
    ]
    try:
        tokens = dict(_plain_tokens(names))
    except Exception as error:  # noqa: BLE001 - objects of the user's may raise whatever they like; then the first step is looked at first
        pass_on(error)
        tokens = {}
    return Early([value for value in held if _is_iterator(value)], tokens, user.f_code if user is not None else None)


def _plain_tokens(names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields path and token of the plain values of names, and of attributes of objects."""
    for name, value in names.items():
        parts = {} if isinstance(value, type | ModuleType) else _attributes(value)
        for path, part in ((name, value), *((f"{name}.{key}", part) for key, part in parts.items())):
            is_large = isinstance(part, dict | list | tuple) and length_of(part) > MAX_EARLY
            if not is_large and kind_of(part):
                yield path, _token(part)


def _is_iterator(value: object) -> bool:
    """Tell whether a value has a next item. Its class is asked: a `__getattr__` of the user's may raise whatever it likes."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def kind_of(value: Any) -> str:
    """Returns what a plain value is called; empty for all else."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if value is None or isinstance(value, bool | int | float | complex):
        return "a number"
    if isinstance(value, str | bytes):
        return "a text"
    if _is_numpys(value):
        return "an array of NumPy"
    has_parts = isinstance(value, dict | list | tuple) and length_of(value) > 0
    return f"a {type(value).__name__}" if has_parts and all(map(kind_of, parts_of(value))) else ""


def _is_numpys(value: Any) -> bool:
    """Tell whether this is an array or a number of NumPy's that is none of Python's too."""
    return type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in tuple("biufc")


def _things(found: Around, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields path and value of what the loops read, and of what an object of the user's holds."""
    for name in sorted(found.reads & names.keys()):
        value = names[name]
        yield name, value
        if _has_attributes(value) and not isinstance(value, nn.Module | Optimizer | type | ModuleType):
            yield from ((f"{name}.{key}", part) for key, part in vars(value).items())


def _judge(value: Any, given: Given) -> tuple[object, str]:
    """Returns token and text of a thing that has a state of its own and was not given; None for all else."""
    token: object = None
    if given.has(value):
        return None, ""
    if isinstance(value, Optimizer):
        token = _of_tensors([p for group in value.param_groups for p in group["params"]], given)
        return token, "an optimizer that steps and was not given: Checkpointer(..., optimizer=[...])"
    if isinstance(value, nn.Module):
        token = _of_tensors([*value.parameters(), *value.buffers()], given)
        return token, "a module that changes and was not given: Checkpointer(..., model=[...])"
    if isinstance(value, LRScheduler | GradScaler):
        kind = "scaler" if isinstance(value, GradScaler) else "scheduler"
        return repr(value.state_dict()), f"a {kind} that changes and was not given: Checkpointer(..., {kind}=...)"
    state = random_state(value) if value is not torch.default_generator else None
    token = repr(state[0]()) if state is not None else None
    return token, "a generator of random numbers that was used and not given: Checkpointer(..., generator=...)"


def _of_iterator(value: Any, given: Given, early: Sequence[object]) -> tuple[object, str]:
    """Returns token and text of an iterator that the loop draws from; None for one whose place is known, or that has none."""
    if isinstance(value, itertools.cycle):
        return True, "an iterator that keeps the batches of its first pass, which no version has"
    place = _place(value)
    if place is not None and any(value is thing for thing in early):
        return True, "an iterator that was made before restore(), and begins anew after a restart: make it behind"
    if given.feeds(value):
        return None, ""
    return place, "an iterator, whose place is in no version: make it behind restore(), of a loader that is given"


def _of_tensors(tensors: list[torch.Tensor], given: Given) -> object:
    own = [tensor for tensor in tensors[:MAX_WITNESSES] if not given.saves(tensor)]
    return repr([(tensor._version, unsaved_state.token(tensor)) for tensor in own]) if own else None


def _token(value: Any) -> object:
    if isinstance(value, torch.Tensor) and local_of(value).device.type != "cpu":
        return id(value), value._version
    if _is_numpys(value):
        return repr((value.shape, [value.flat[at] for at in range(0, value.size, max(1, value.size // MAX_ELEMENTS))]))
    return "none" if value is None else unsaved_state.token(value)


def _place(value: Any) -> object:
    """Returns the token of the place of an iterator; None if it keeps none: a generator that only draws random numbers."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None or not user_frames.is_users(frame):
            return None
        found = around(user_frames.text(frame), frame.f_lineno, told=False)
        if found is None or found.goes_over:
            return None if found is None else True
        now = user_frames.own(frame)
        return repr({name: unsaved_state.token(now.get(name)) for name in found.lives}) if found.lives else None
    if type(value).__module__ in ("itertools", "builtins") or type(value).__module__.startswith("torch.utils.data"):
        return True
    return unsaved_state.token(vars(value)) if hasattr(value, "__dict__") else None
