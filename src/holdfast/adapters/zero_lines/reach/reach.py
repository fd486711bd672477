"""Looks at everything that a script's loop can reach and that no `state_dict` hands out: plain values, and what must stay.

    look = Reach(used=used, kept=kept, named=named).look(globals, frames)

A path says how a thing is reached from the names of the script, so a script that was started again has the same thing under
the same path. Two looks are compared: a leaf that changed can be carried, something fixed that changed cannot. The walk goes
through containers, functions (defaults, closures, attributes), partials, bound methods, classes and modules of the user,
data loaders, samplers, models, optimizers, and objects that are nothing but attributes. The user's is what is not known to be
installed. A thing that is reached twice is noted by its first path: a restart would make two of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.utils.data import DataLoader

from holdfast.adapters.zero_lines.reach.look import Look, Owner, owner_of
from holdfast.adapters.zero_lines.reach.plain_values import ATOMS
from holdfast.adapters.zero_lines.reach.walk import ALL, NO_PLACE, NOTHING, Told, Walk, workers_stay
from holdfast.base.installed import is_installed

# What libraries of Hugging Face call the code that they have fetched, which lies in a cache of the user's.
_OF_THE_HUB = ("datasets_modules", "evaluate_modules", "transformers_modules")


class Reach:
    """Walks from the names of one script.

    Args:
        used: names that the loop reads: what they hold must not keep a place that nobody can read.
        kept: objects that hand out their state.
        members: names of sets whose order matters to nobody.
        pops: whether the text of the script calls a `pop()` of something.
        named: path of each kept object, by its `id`.

    Attributes:
        counted: generators that come to where they are when the items of a loop are counted, by their `id`.
        may_begin: whether a generator that has not begun is what the statements before a loop make again.
        why_not_staying: tells why the workers of a loader that stay cannot be taken up; empty if they can.
    """

    def __init__(
        self,
        *,
        used: Iterable[str],
        kept: Iterable[Any],
        members: Iterable[str] = (),
        pops: bool = False,
        named: Mapping[int, str],
    ) -> None:
        self._named = named
        self.why_not_staying: Callable[[DataLoader[Any]], str] = workers_stay
        self.counted: Container[int] = ()
        self.may_begin = False
        self._members, self._pops = frozenset(members), pops
        self._used = frozenset(used)
        self._kept = list(kept)
        self._users: dict[str, bool] = {}
        self._told: dict[int, Told] = {}
        self._began: dict[str, Any] = {}
        self._has_looked = False

    def look(
        self,
        main: dict[str, Any],
        frames: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        inner: Sequence[tuple[str, Mapping[str, Any]]] = (),
        hidden: frozenset[str] = frozenset(),
        local: Mapping[str, Any] = MappingProxyType({}),
        carried: Mapping[str, Any] = MappingProxyType({}),
        home: str = "",
    ) -> Look:
        """Returns what is there now.

        Args:
            main: the names of the script itself.
            frames: name and local names of the functions that are running, the innermost, with the loop, first.
            inner: those that came to run since the loop began, the outermost first: they are looked at last, so that a thing
                has the path that it had before.
            hidden: names of the script itself that are not looked at.
            local: names that loops set, which functions in them may hold too.
            carried: names that are set anew by a restart.
            home: name of the module in which the loop stands; empty: it stands in the script itself.
        """
        walk = Walk(self.is_of_user_module, hidden, self._kept, local, self._told)
        walk.found.owners[""] = Owner(main.__setitem__, main.pop)
        walk.carried = frozenset(carried)
        walk.counted, walk.may_begin = self.counted, self.may_begin
        walk.why_not_staying = self.why_not_staying
        walk.began, walk.is_first = self._began, not self._has_looked
        self._has_looked = True
        for name, value in carried.items():
            walk.share(name, value)
        for number, thing in enumerate(self._kept):
            walk.inside(self._named.get(id(thing), f"kept{number}"), thing)
        # What is reached twice counts as used, and what only an iterator of the loop's has too.
        for is_used in (True, False):
            self._at_home(walk, home, is_used=is_used)
            for path, scope in frames:
                self._visit(walk, path, scope, is_used=is_used)
            for name in self._some(main, is_used=is_used):
                if not name.startswith("__") and name not in walk.hidden:
                    walk.visit(name, main[name], asks=ALL if is_used else NOTHING, hold=("", name))
                    if is_used:
                        walk.foreign(name, main[name])
            walk.iterators()
        for path, scope in inner:
            for is_used in (True, False):
                self._visit(walk, path, scope, is_used=is_used)
        walk.iterators()
        walk.settings()
        walk.common(self._kept)
        walk.lone(self._kept, carried)
        walk.places()
        if self._pops or walk.pops:
            kind = "set in a script that pops, by an order that cannot be read,"
            walk.found.unsure += [(path, kind) for path in walk.sets if path not in self._members]
        return walk.found

    def of(self, things: Mapping[str, Any]) -> Look:
        """Returns what is there now of some things, and of all that they lead to, in whatever process this is.

        Args:
            things: by name. What `functools.lru_cache` holds for them counts as something that is kept.
        """
        walk = Walk(self.is_of_user_module, frozenset(), (), {}, {})
        main = vars(sys.modules["__main__"])
        walk.found.owners[""] = Owner(main.__setitem__, main.pop)
        walk.strict = True
        for name, thing in things.items():
            walk.visit(name, thing, asks=NO_PLACE)
            walk.foreign(name, thing if callable(thing) else type(thing))
        walk.iterators()
        walk.lone((), {})
        walk.places(data=False)
        return walk.found

    def _at_home(self, walk: Walk, home: str, *, is_used: bool) -> None:
        """Looks at the module in which the loop stands, as at the script itself; if it stands in one."""
        if not home:
            return
        module = sys.modules[home]
        walk.found.owners[home] = owner_of(module)
        names = vars(module)
        for name in self._some(names, is_used=is_used):
            if not name.startswith("__"):
                walk.visit(f"{home}.{name}", names[name], asks=ALL if is_used else NOTHING, hold=(home, name))
                if is_used:
                    walk.foreign(f"{home}.{name}", names[name])

    def _visit(self, walk: Walk, path: str, scope: Mapping[str, Any], *, is_used: bool) -> None:
        """Looks at the names of a function."""
        for name in self._some(scope, is_used=is_used):
            if type(scope[name]) in ATOMS:
                walk.found.local[f"{path}.{name}"] = (type(scope[name]).__qualname__, repr(scope[name]))
            walk.visit(f"{path}.{name}", scope[name], asks=ALL if is_used else NOTHING)

    def is_of_user(self, value: Any) -> bool:
        """Tell whether the class of a value, or one that this is made from, is the user's."""
        return any(self.is_of_user_module(kind.__module__) for kind in type(value).__mro__)

    def _some(self, names: Iterable[str], *, is_used: bool) -> list[str]:
        """Lists in order the names that the loop uses, or those that it does not."""
        return sorted(str(name) for name in names if (name in self._used) is is_used)

    def is_of_user_module(self, module: str) -> bool:
        """Tell whether a module is the user's."""
        known = self._users.get(module)
        if known is None:
            top = module.partition(".")[0]
            files = (getattr(sys.modules.get(name), "__file__", None) or "" for name in (module, top))
            place = os.path.abspath(next(filter(None, files), ""))
            known = top in sys.stdlib_module_names or top in ("holdfast", "torch", *_OF_THE_HUB)
            self._users[module] = module == "__main__" or not (known or is_installed(place))
        return self._users[module]
