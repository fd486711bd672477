"""Looks at what loops that lie inside each other can reach, at the places where that matters.

Where the outermost loop begins everything is as a script that was started again has it. Where an inner loop begins, there is
besides what the statements between the loops made; a restart makes that again. So a step is compared with both: what was there
at the outermost loop must be as it was, or be carried; what was made between must be as it was when the inner loop began.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.nested.nested_items import Items, digest_of
from holdfast.adapters.zero_lines.nested.nested_script import Nest, Site
from holdfast.adapters.zero_lines.reach.loader_places import has_place
from holdfast.adapters.zero_lines.reach.look import Look, Owner
from holdfast.adapters.zero_lines.reach.plain_values import has_set, is_plain
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.adapters.zero_lines.reach.walk import workers_stay
from holdfast.checkpoint.entries.carried_tensors import is_carried, stays
from holdfast.checkpoint.usage.user_frames import own

_WORD = re.compile(r"\w+")


class Lost:
    """Stands for a value that cannot be brought back; whoever uses it is told."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def _tell(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"holdfast: {self._name!r} is read, and what it was before the restart is in no version; set it in every turn of "
            f"the loop before it is read, or keep it with holdfast.Checkpointer.carry"
        )

    __bool__ = __len__ = __iter__ = __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = _tell
    __rmul__ = __truediv__ = __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __neg__ = _tell
    __reduce_ex__ = __copy__ = __deepcopy__ = __repr__ = __float__ = __int__ = __index__ = __str__ = __format__ = (
        __contains__
    ) = __setitem__ = _tell
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return self._tell(name)


@dataclass(slots=True)
class Entry:
    """A loop that runs.

    Attributes:
        frame: where it stands.
        items: what it goes over; set when it begins.
        taken: of an outer loop the items that are done, of the innermost those that were taken.
        inner: loops that began in this item.
        before: what a step, or the start of an item, is compared with.
        changes: the comparison.
        made: path -> token of what the statements before it made and that cannot be carried.
        start: of an outer loop, what was when its item began.
        tensors: of an outer loop, names of tensors that live from turn to turn -> their tokens as its item began.
        began: what the names that live from turn to turn held when it began.
        drawn: token of the generators of random numbers when it began.
        generators: of the outermost loop, the same of each.
    """

    site: Site
    frame: FrameType
    before: Look
    changes: Changes
    items: Items | None = None
    taken: int = 0
    inner: int = 0
    made: dict[str, str] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, object] = field(default_factory=dict)
    began: dict[str, Any] = field(default_factory=dict)
    drawn: str = ""
    generators: dict[str, str] = field(default_factory=dict)

    def let_go(self) -> None:
        """Ends the circle of what was looked at, and so of what the function that it stands in has: its workers end with it, at once."""
        del self.changes, self.before, self.items, self.began

    def names(self) -> dict[str, Any]:
        """Returns what names mean where it stands."""
        main = self.frame.f_globals
        return {**main, **own(self.frame)} if is_function(self.frame) else dict(main)


class Untouched:
    """Sees whether modules that are kept are used between two loops: a restart has them there as a later step left them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = {id(part): part for module in modules for part in module.modules()}
        self._handle: RemovableHandle | None = None
        self._save: Any = None
        self._used = ""

    def begin(self) -> None:
        """Looks from here on; what was seen before is forgotten."""
        self.end()
        self._handle = register_module_forward_pre_hook(self._forward)
        self._save = original = torch.save

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            self._used = self._used or "a file is written by torch.save"
            return original(*args, **kwargs)

        torch.save = save

    def end(self) -> str:
        """Looks no more; returns what was seen, empty if nothing was."""
        used, self._used = self._used, ""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            torch.save = self._save
        return used

    def _forward(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._parts and not self._used:
            self._used = f"a {type(module).__qualname__} that trains is evaluated"


class Looker:
    """Looks at everything below the names of a script.

    Args:
        kept: objects that hand out their state.
        frame: where the outermost loop stands.
        modules: names of the script's own modules, if the loops stand in one of these.
        why_not_staying: tells why the workers of a data loader that stay cannot be taken up; empty if they can.
    """

    def __init__(
        self,
        nest: Nest,
        kept: Sequence[Any],
        frame: FrameType,
        modules: frozenset[str] = frozenset(),
        why_not_staying: Callable[[DataLoader[Any]], str] = workers_stay,
    ) -> None:
        self._nest, self._modules = nest, modules
        self._lines = dict(nest.lines)
        self._main: dict[str, Any] = vars(sys.modules["__main__"]) if modules else frame.f_globals
        self._home = frame.f_globals["__name__"] if modules else ""
        self._around = _frames(frame, self._main, modules)
        named: dict[int, str] = {}
        for scope in (*(own(each) for each in self._around), self._main):
            for name, value in scope.items():
                named[id(value)] = name
        self._reach = Reach(
            used=nest.used, kept=kept, members=nest.members, pops=nest.pops, named=named
        )  # the same walk at all places
        self._reach.why_not_staying = why_not_staying

    def look(self, entries: Sequence[Entry], last: tuple[Site, FrameType] | None = None) -> Look:
        """Returns what is there now.

        Args:
            entries: the loops that run.
            last: one that is about to begin.
        """
        stack = [*((entry.site, entry.frame) for entry in entries), *([last] if last else [])]
        dead: dict[int, set[str]] = {}
        for site, frame in stack:
            dead.setdefault(_key(frame), set()).update(site.dead)
            names = own(frame) if is_function(frame) else frame.f_globals
            dead[_key(frame)].update(
                name
                for name in site.lives
                if name in names
                and not is_plain(names[name])
                and (name in site.loose or is_carried(names[name], is_plain))
            )
        site, frame = stack[-1]
        here = own(frame) if is_function(frame) else frame.f_globals
        dead[_key(frame)] |= site.sets - set(site.lives) if site.outer else site.sets
        dead[_key(frame)] -= {name for name in site.lives if has_place(here.get(name))}  # it is looked at, and stays
        hidden = dead.get(0, set())
        frames = _frames(frame, self._main, self._modules)
        inner = [each for each in frames if each not in self._around][::-1]
        local: dict[str, Any] = {}
        carried: dict[str, Any] = {}
        for each, where in stack:
            mine = own(where) if is_function(where) else where.f_globals
            names = mine if each.outer else {**where.f_globals, **mine}
            lives = {name: names[name] for name in each.lives if name in names and type(names[name]) is not Lost}
            # Of an outer loop plain values, and names of the script that a function sets, are looked at where they are.
            carried |= {name: value for name, value in lives.items() if not each.outer or not is_plain(value)}

        def scope(each: FrameType) -> Mapping[str, Any]:
            found = own(each)
            without = dead.get(id(each), set())
            local.update({name: value for name, value in found.items() if name in without})
            return {name: v for name, v in found.items() if name not in without and type(v) is not Lost}

        around = list(zip(_named(self._around), map(scope, self._around), strict=True))
        within = list(zip(_named(inner, {path for path, _ in around}), map(scope, inner), strict=True))
        lost = {name for name, value in self._main.items() if type(value) is Lost}
        self._reach.counted = {each for entry in entries if entry.items for each in entry.items.counted()}
        self._reach.may_begin = len(stack) > 1 and (last is not None or entries[-1].items is None)
        found = self._reach.look(
            self._main,
            around,
            inner=within,
            hidden=frozenset(hidden | lost),
            local=local,
            carried=carried,
            home=self._home,
        )
        found.local.update({path: ("generator", digest_of(each)) for path, each in found.begins.items()})
        found.begins.clear()  # who drops one ends it
        return found

    def enter(self, entries: Sequence[Entry], site: Site, frame: FrameType) -> Entry:
        """Returns a loop that is about to begin inside of the others, with what was made for it."""
        now = self.look(entries, (site, frame))
        outermost = entries[0].before if entries else now
        around = entries[-1].before if entries else now
        before = Look(
            leaves=outermost.leaves,
            # A value that was made before the loop has its place there, also where nothing else holds it: a mode of a module.
            owners={**{leaf.owner: _NO_OWNER for leaf in now.leaves.values()}, **now.owners, **around.owners},
            fixed={**now.fixed, **around.fixed},
            unsure=outermost.unsure,
            unknown=now.unknown,
            orders={**now.orders, **around.orders},
            shared=now.shared,
            data=outermost.data,
            kinds=outermost.kinds,
        )
        always = {
            path
            for path, leaf in now.leaves.items()
            if path in outermost.leaves and outermost.leaves[path].token != leaf.token
        } | self._texts_of_start(outermost)
        entry = Entry(site, frame, before, self._changes((), before, always))
        entry.changes = self._changes([*entries, entry], before, always)
        entry.changes.local = now.local
        names = entry.names()
        entry.began = {name: names[name] for name in site.lives if name in names and stays(names[name])}
        entry.made = {
            path: xxhash.xxh3_64_hexdigest(repr(token).encode())
            for path, token in now.fixed.items()
            if entries and path not in outermost.fixed
        }
        for path, (kind, token) in now.local.items() if entries else ():
            timed = kind in ("float", "int", "str") and path.rpartition(".")[2] in self._nest.clocked
            if outermost.local.get(path) != (kind, token) and not timed:
                entry.made[path] = xxhash.xxh3_64_hexdigest(token.encode())
        if entries:
            entry.made |= self._values_made(now, outermost)
        return entry

    def _values_made(self, now: Look, outermost: Look) -> dict[str, str]:
        """Returns tokens of values that can be carried and are not as they were where the outermost loop began: an order that weights tell.

        A restart makes them again, and then sets them as the version has them. What was made of them by then is not set.
        """
        timed = self._nest.clocked | self._nest.started
        found: dict[str, str] = {}
        for path, leaf in now.leaves.items():
            was = outermost.leaves.get(path)
            if (was is not None and was.token == leaf.token) or leaf.lasts or path in now.fixed:
                continue
            if timed.isdisjoint(_WORD.findall(path)) and not (leaf.held is None and has_set(leaf.value())):
                found[path] = xxhash.xxh3_64_hexdigest(repr(leaf.token).encode())
        return found

    def _texts_of_start(self, outermost: Look) -> set[str]:
        """Returns the paths of texts that hold the time of the start: all, if the loop reads one and a version is compared with it."""
        nest = self._nest
        found = {
            path
            for path, leaf in (outermost.leaves.items() if nest.reads_files else ())
            if path.rpartition(".")[2] in nest.started and type(leaf.value()) is str
        }
        return found if nest.used & {word for path in found for word in path.split(".")} else set()

    def _changes(self, entries: Sequence[Entry], before: Look, always: set[str]) -> Changes:
        def look() -> Look:
            return self.look(entries)

        return Changes(look, self._lines, self._nest.members, before=before, always=always, home=self._home)


def _nothing(*_: Any) -> None:
    """The leaf itself knows how it is set."""


_NO_OWNER = Owner(_nothing, _nothing)


def is_function(frame: FrameType) -> bool:
    """Tell whether a frame is one of a function, with names of its own."""
    return frame.f_code.co_name != "<module>"


def _key(frame: FrameType) -> int:
    """Returns the number of a frame; 0 for the script itself."""
    return id(frame) if is_function(frame) else 0


def _frames(frame: FrameType | None, main: dict[str, Any], modules: frozenset[str]) -> list[FrameType]:
    """Returns the functions of the script, and of its own modules, that run, the innermost first."""
    found: list[FrameType] = []
    while frame is not None:
        mine = frame.f_globals is main or frame.f_globals.get("__name__") in modules
        if mine and is_function(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def _named(frames: Sequence[FrameType], taken: set[str] | None = None) -> list[str]:
    names: list[str] = []
    used = set(taken or ())
    for frame in frames:
        name = f"{frame.f_code.co_name}()"
        while name in used:
            name += "'"
        used.add(name)
        names.append(name)
    return names
