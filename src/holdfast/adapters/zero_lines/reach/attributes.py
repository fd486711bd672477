"""Attributes of objects, how they are set in place, and the names that code reads."""

from __future__ import annotations

import csv
import dis
import gc
import io
import multiprocessing.process
import os
import stat
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from holdfast.base.handler_errors import forgive, pass_on
from holdfast.checkpoint.state.stateful import is_stateful

# What Python has of a class that is made by it, and of a reference.
_HEAP_TYPE, _POINTER = 1 << 9, 8
# Modules around modules: the attributes that these name themselves follow the steps, and are made anew by a restart.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo")
# Modules of what writes event files.
_WRITERS = ("torch.utils.tensorboard.", "tensorboard.summary.", "tensorboardX.")
_CSV_WRITER = type(csv.writer(io.StringIO()))


def is_progress_bar(value: Any) -> bool:
    """Tell whether this only shows how far a loop is."""
    return any(part.__module__.partition(".")[0] == "tqdm" for part in type(value).__mro__)


def is_output(value: Any) -> bool:
    """Tell whether this only takes what it is told, and nothing of it comes back into a step.

    That is a progress bar, a writer of TensorBoard's, a file that is open for writing alone and whose class is Python's own, or a
    writer of `csv` to such a file, of which it has the method `write` and no more.
    """
    if type(value) is _CSV_WRITER:
        return all(map(is_output, _files_of(value)))
    home = type(value).__module__
    if isinstance(value, io.IOBase) and home.partition(".")[0] in sys.stdlib_module_names:
        return not value.closed and value.writable() and not value.readable()
    return is_progress_bar(value) or home.startswith(_WRITERS)


def _files_of(writer: Any) -> list[Any]:
    """Lists the file that a writer of `csv` writes to; None if what it calls is no method of one."""
    parts = [part for part in gc.get_referents(writer) if isinstance(part, types.BuiltinMethodType)]
    return [part.__self__ for part in parts] or [None]


def has_a_reader(value: Any) -> bool:
    """Tell whether what is written to a file may be read by a program, this one too: in memory, or at the other end of a pipe or a socket."""
    if type(value) is _CSV_WRITER:
        return any(map(has_a_reader, _files_of(value)))
    if not isinstance(value, io.IOBase):
        return False
    try:
        where = os.fstat(value.fileno())
    except (OSError, ValueError, AttributeError) as error:
        pass_on(error)
        return True
    if not (stat.S_ISFIFO(where.st_mode) or stat.S_ISSOCK(where.st_mode)):
        return False
    for stream in (1, 2):
        with forgive(OSError):
            if os.path.samestat(where, os.fstat(stream)):
                return False
    return True


def silence_writers() -> None:
    """Has writers of TensorBoard drop what they are told, in a forked child: the thread that empties their queue is not there, and a full one would hold it up."""
    for name in ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer"):
        kind: Any = getattr(sys.modules.get(name), "EventFileWriter", None)
        if kind is not None:
            kind.add_event = kind.flush = lambda *_, **__: None


def added_to(value: Any) -> dict[str, Any]:
    """Returns the attributes that no method of an object's own classes names: a script has put them there. None of a bar, which a restart moves on."""
    if is_progress_bar(value):
        return {}
    methods = (part for kind in type(value).__mro__ for part in vars(kind).values())
    own = set[str]().union(*(global_names(part.__code__) for part in methods if isinstance(part, types.FunctionType)))
    return {key: part for key, part in attributes_of(value).items() if key not in own}


def is_iterator(value: Any) -> bool:
    """Tell whether a value has a next item; a `__getattr__` that answers to every name, or raises, makes no iterator."""
    try:
        return hasattr(type(value), "__next__") or callable(getattr(value, "__next__", None))
    except Exception as error:  # noqa: BLE001 - it is the user's own
        pass_on(error)
        return False


def is_attributes(value: Any) -> bool:
    """Tell whether an object of a library is nothing but its attributes: it is looked into, and goes on by nobody else."""
    alone = not is_iterator(value) and not isinstance(
        value, threading.Thread | io.IOBase | multiprocessing.process.BaseProcess | subprocess.Popen
    )
    return alone and not isinstance(value, type) and is_of_python(type(value))


def has_place_in_data(value: Any, is_of_user: Callable[[Any], bool]) -> bool:
    """Tell whether an object of an installed package hands out a state and is gone over: that state says where its data are.

    Who loads such a state tells the object to go on there, as torchtext's iterators do. That is right before its next epoch begins,
    and wrong in the middle of one that was begun again. So its attributes are looked at, as those of any other object.
    """
    return hasattr(type(value), "__iter__") and is_stateful(value) and is_attributes(value) and not is_of_user(value)


def is_of_python(kind: type) -> bool:
    """Tell whether all that an object of a class keeps are attributes: no class that it is made from is one of C."""
    slots = sum(len(vars(part).get("__slots__", ())) for part in kind.__mro__)
    places = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    size = object.__basicsize__ + places * _POINTER
    return kind.__flags__ & _HEAP_TYPE != 0 and kind.__basicsize__ <= size


def attributes_of(thing: Any) -> dict[str, Any]:
    """Returns the attributes of an object, those of `__slots__` too, without those that its class makes up."""
    shown = dict(getattr(thing, "__dict__", {}))
    for name in (name for part in type(thing).__mro__ for name in slots_of(part)):
        if hasattr(thing, name):
            shown[name] = getattr(thing, name)
    return shown


def put_attribute(thing: Any, key: str, new: Any) -> None:
    """Sets an attribute in the object's own dict where it has one, so that no `__setattr__` of the user's runs."""
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict) and not any(key in slots_of(part) for part in type(thing).__mro__):
        own[key] = new
    else:
        setattr(thing, key, new)


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names of a class's own `__slots__`, as Python calls them."""
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    private = f"_{kind.__name__.lstrip('_')}"  # how Python calls `__count` of a class
    return tuple(f"{private}{name}" if name.startswith("__") else name for name in names if not name.endswith("__"))


def names_of_wrappers(kind: type) -> frozenset[str]:
    """Returns the attributes that modules around modules name in their own methods."""
    found: set[str] = set()
    for part in kind.__mro__:
        if part.__module__.startswith(_WRAPPERS):
            codes = (value.__code__ for value in vars(part).values() if isinstance(value, types.FunctionType))
            found.update(*map(global_names, codes))
    return frozenset(found)


def global_names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in a function and in those within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return found


def loaded_names(code: types.CodeType) -> set[str]:
    """Returns the names of the module that a function reads or sets, without those of attributes."""
    found = {
        str(each.argval)
        for each in dis.get_instructions(code)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= loaded_names(constant)
    return found
