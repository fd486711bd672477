"""Compares what a loop can reach with how it was when the loop began: what changed is carried, or the loop is not kept.

A script that is started again comes to its loop with everything as it was at the first start. So a version is right if it
carries each plain value that differs from that, and if nothing else differs. `Changes.now` says both, at every step;
`before.put` sets carried values in a process that has just come to the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import xxhash

from holdfast.adapters.zero_lines.reach import container_kinds, held_arrays, identities
from holdfast.adapters.zero_lines.reach.growing_lists import Grown, without_data
from holdfast.adapters.zero_lines.reach.loader_places import Source
from holdfast.adapters.zero_lines.reach.look import ENDED, Leaf, Look
from holdfast.adapters.zero_lines.reach.plain_values import CLOCK, has_set
from holdfast.adapters.zero_lines.reach.walk import ANOTHER
from holdfast.base.errors import HoldfastError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.entries.carried_tensors import MAX_BYTES as GROWN_BYTES
from holdfast.tiers.format import values as value_codec

# So many values are compared with those of an earlier start, in so many characters.
MAX_BEGAN, MAX_TEXT = 500, 200
_WORD = re.compile(r"\w+")
# Data under one name in more parts than this is compared as one.
MAX_PARTS = 64
# More of plain values is not kept with every step.
MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Changed:
    """The part of a version that one step changed.

    Attributes:
        rows: path, owner, key and value of each plain value that is not as it was; before these, with the name of its class
            behind it, each object that came to be.
        gone: path, owner and key of each that is no longer there.
        reason: what can neither be carried nor be left out; empty if all is well.
        graph: the first tensor with a graph among the rows, and its line; empty if there is none.
    """

    rows: list[list[Any]]
    gone: list[list[Any]]
    reason: str = ""
    graph: str = ""


class Changes:
    """Everything that the loop can reach, as it was at its beginning.

    Args:
        lines: attribute or name -> line of the script that stores to it.
        members: names of sets whose order matters to nobody.
        before: how it was.
        always: paths of plain values that are carried also where they are as they were.
        home: name of the module in which the loop stands; empty: it stands in the script itself.
    """

    def __init__(
        self,
        look: Callable[[], Look],
        lines: Mapping[str, int],
        members: Container[str] = (),
        *,
        before: Look,
        always: Container[str] = (),
        home: str = "",
    ) -> None:
        self._look = look
        self._members = members
        self._lines = lines
        self._always = always
        self._home = f"{home}." if home else ""
        self.before = before
        self._places = self.before.places
        self.local: Mapping[str, tuple[str, str]] = {}
        self._data: dict[frozenset[str], dict[str, str]] = {}

    def now(self) -> Changed:
        """Returns what differs from the beginning of the loop."""
        try:
            return self.between(self._look())
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and training must go on
            pass_on(error)
            return Changed([], [], f"what it holds cannot be looked at: {type(error).__name__}: {error}")

    def between(self, now: Look) -> Changed:
        """Returns what of this look differs from the beginning of the loop."""
        before = self.before
        self._places = now.places
        born = self._born(now)
        reason = self._fixed(now, born) or self._reordered(now)
        if now.unsure and not before.unsure:
            (path, kind), *_ = now.unsure
            reason = reason or f"{path!r}{self._where(path)}, a {kind} cannot be looked at"
        rows: list[list[Any]] = [[path, owner, key, None, kind] for path, (kind, owner, key) in born.items()]
        for path, leaf in now.leaves.items():
            was = before.leaves.get(path)
            if was is not None and _is_same(leaf, was) and path not in self._always:
                continue
            if was is None and leaf.owner not in before.owners and leaf.owner not in born:
                reason = (
                    reason or f"{path!r} came to be in the loop{self._where(path)}, and a restart has no place for it"
                )
            if path in now.shared:
                reason = reason or (
                    f"{path!r} changes in the loop{self._where(path)}, and {now.shared[path]}: a restart would make two of one"
                )
            value, stay = _stored(leaf, was)
            reason = reason or self._why_not_stored(path, leaf, (value, stay), now.owners)
            rows.append([path, leaf.owner, leaf.key, value])
            if path not in self._members and has_set(without_data(value)):
                reason = reason or (
                    f"{path!r} changes in the loop{self._where(path)}, and is a set, or has one in it: its order cannot be "
                    f"carried to a restart"
                )
            if held := self.holds_identity(without_data(value)):
                reason = reason or f"{path!r} changes in the loop{self._where(path)}, and {held}"
        reason = reason or self._too_much(now, rows)
        graph = next((f"{row[0]!r}{self._where(row[0])}" for row in rows if held_arrays.has_graph(row[3])), "")
        gone = [[p, leaf.owner, leaf.key] for p, leaf in before.leaves.items() if p not in now.leaves]
        gone = [row for row in gone if row[0] not in now.fixed]
        try:
            size = len(encoded(rows)) if rows else 0
        except HoldfastError as error:
            rows, reason = [], reason or f"{self._named(rows, error)} cannot be carried to a restart"
        else:
            if size > MAX_BYTES:
                largest = max(rows, key=lambda row: len(encoded([row])))
                rows, reason = [], reason or f"{largest[0]!r}{self._where(largest[0])} is too large to be carried"
        return Changed(rows, gone, reason, graph)

    def _why_not_stored(self, path: str, leaf: Leaf, stored: tuple[Any, list[Any]], owners: Container[str]) -> str:
        """Returns why a restart would not have what `_stored` returned as it is now; empty if it would."""
        value, stay = stored
        if held_arrays.is_shared(*map(held_arrays.span, stay)):
            return f"{path!r} changes in the loop{self._where(path)}, and other processes may write to its memory"
        if leaf.kind is None or not (value is None or (container_kinds.is_stored(value) and leaf.owner not in owners)):
            return ""
        kind = leaf.kind[0].__qualname__
        return f"{path!r} becomes another {kind} in the loop{self._where(path)}, which cannot be carried to a restart"

    def _too_much(self, now: Look, rows: Iterable[Sequence[Any]]) -> str:
        """Returns why the tensors and arrays in containers are too large together; empty if they are not."""
        held = [(path, now.leaves[path].held) for path, *_ in rows if path in now.leaves]
        sizes = {path: each.num_bytes for path, each in held if isinstance(each, Grown)}
        if sum(sizes.values()) <= GROWN_BYTES:
            return ""
        largest = max(sizes, key=lambda path: sizes[path])
        return (
            f"{largest!r} changes in the loop{self._where(largest)}, and all lists that change there have more than "
            f"{GROWN_BYTES >> 20} MiB of tensors and arrays together"
        )

    def holds_identity(self, value: Any) -> str:
        """Returns of which object an identity lies in a value, as of the last look, in words; empty if there is none."""
        held = identities.identity_in(value, self._places)
        return f"holds the identity of {held!r}, which is another number after a restart" if held else ""

    def between_fixed(self, now: Look) -> str:
        """Returns what differs of what can neither be carried nor be left out, and what cannot be looked at; empty if nothing does."""
        if now.unsure and not self.before.unsure:
            (path, kind), *_ = now.unsure
            return f"{path!r}{self._where(path)}, a {kind} cannot be looked at"
        return self._fixed(now, self._born(now)) or self._reordered(now)

    def _born(self, now: Look) -> dict[str, tuple[str, str, str | int]]:
        """Returns the objects that came to be and that a restart can make: their class is one that was used before the loop."""
        before = self.before
        found: dict[str, tuple[str, str, str | int]] = {}
        for path, (kind, owner, key) in now.born.items():  # an owner comes before what it holds
            known = kind == ENDED or (now.kinds.get(kind) is not None and before.kinds.get(kind) is now.kinds[kind])
            if path not in before.fixed and known and (owner in before.owners or owner in found):
                found[path] = (kind, owner, key)
        return found

    def began(
        self, used: Container[str], bounds: Container[str], reread: frozenset[str] = frozenset()
    ) -> dict[str, str]:
        """Returns the numbers and texts, by path, that the loop reads and that stood before it began.

        Args:
            used: names that the loop reads.
            bounds: paths that say how far it counts, which may be others at every start.
            reread: names that may hold the time of the start, where files are read by one: then paths, lists, dicts and names of functions
                count too.
        """
        found: dict[str, str] = {}
        for path, leaf in self.before.leaves.items():
            path = self._place(path)
            root = path.replace("[", ".").partition(".")[0]
            value = leaf.value() if root in used and path not in bounds and len(found) < MAX_BEGAN else None
            if type(value) in (bool, int, str) or (type(value) is float and value < CLOCK):
                found[path] = repr(value)[:MAX_TEXT]
        for path, text in self._texts() if reread else ():
            if reread.intersection(_WORD.findall(path)) and len(found) < MAX_BEGAN:
                found.setdefault(self._place(path), text[:MAX_TEXT])
        return found

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yields all texts, paths, and lists and dicts with such, by their path."""
        look = self.before
        yield from ((path, token) for path, (kind, token) in self.local.items() if kind == "str")
        for path, token in look.fixed.items():
            if isinstance(token, tuple) and (token[0] is str or str(token[0]).endswith("Path")):
                yield path, str(token[1])
        for path, leaf in look.leaves.items():
            if texts := list(_strings(leaf.value())):
                yield path, repr(texts[0] if len(texts) == 1 else texts)

    def carried(self, rows: Iterable[Sequence[Any]]) -> dict[str, tuple[Any, Any]]:
        """Returns, by the path that `began` has it under, each value of these rows that stood before the loop, and what is there now."""
        leaves = self.before.leaves
        return {self._place(str(row[0])): (row[3], leaves[row[0]].value()) for row in rows if row[0] in leaves}

    def data(
        self, used: Set[str], *, lives: Set[str], clock: bool, carried: Iterable[Sequence[Any]] = ()
    ) -> dict[str, str]:
        """Returns tokens, by path, of the tensors, arrays and lists that the loop reads and that stood before it began.

        A script that was started again has to have made the same: a split or a vocabulary in another order would go unseen.

        Args:
            used: names that the loop reads.
            lives: those of them that live from turn to turn: left out, but for what an iterator of a data loader takes from.
            clock: whether the script reads a clock: then what has texts is left out, for they may hold a time.
            carried: rows of what a restart puts in place, whatever it has there: left out, with all that lies in it.
        """
        fixed = self.before.fixed
        without = frozenset(self._place(str(row[0])) for row in carried if type(fixed.get(row[0])) is not Source)
        if without not in self._data:
            stay = {self._place(path) for path, token in fixed.items() if type(token) is Source}
            self._data[without] = self._data_without(used - (lives - stay), without, clock=clock)
        return self._data[without]

    def _data_without(self, used: Container[str], without: frozenset[str], *, clock: bool) -> dict[str, str]:
        found: dict[str, dict[str, str]] = {}
        for path, (token, texts) in self.before.data.items():
            place = self._place(path)
            root = place.replace("[", ".").partition(".")[0]
            if root in used and not (texts and clock) and not _lies_in(place, without):
                found.setdefault(root, {})[place] = xxhash.xxh3_64_hexdigest(repr(token).encode())
        tokens: dict[str, str] = {}
        for root, parts in found.items():
            if len(parts) <= MAX_PARTS:
                tokens |= parts
            else:
                tokens[root] = xxhash.xxh3_64_hexdigest(repr(sorted(parts.items())).encode())
        return tokens

    def _place(self, path: str) -> str:
        """Returns the path without the function that has the name it begins with."""
        return self._at_home(path.partition("().")[2] if "()." in path else path)

    def _at_home(self, path: str) -> str:
        return path.removeprefix(self._home) if self._home else path

    def _fixed(self, look: Look, born: Container[str]) -> str:
        """Returns the first thing that differs and cannot be carried."""
        before, now = self.before.fixed, look.fixed
        for path, token in now.items():
            if path in born:
                continue
            if before.get(path) != token and str(token).startswith(ANOTHER):
                return f"{path!r} becomes {token} in the loop{self._where(path)}: a restart would make two of one"
            is_told = path in look.why or path in look.parts
            if path not in before and not (is_told and path in self.before.leaves):
                why = f": {look.why[path]}" if path in look.why else ""
                return f"{path!r} came to be in the loop{self._where(path)}, and cannot be carried to a restart{why}"
            if before.get(path) != token:
                other = look.parts.get(path)
                why = f": {other!r} has a part of it" if other else ""
                why = ": two of its parts share memory" if other == path else why
                why = f": {look.why[path]}" if path in look.why else why
                return f"{path!r} changes in the loop{self._where(path)}, and cannot be carried to a restart{why}"
        for path in before:
            if path not in now:
                return f"{path!r} is taken away in the loop{self._where(path)}, which cannot be carried to a restart"
        return ""

    def _reordered(self, now: Look) -> str:
        """Returns the first dict whose keys stand in an order that a restart would not make."""
        for path, order in now.orders.items():
            old = self.before.orders.get(path, [])
            made = [*(key for key in old if key in order), *(key for key in order if key not in old)]
            if order[: len(old)] != old and order != made:
                return (
                    f"the order of {path!r} changes in the loop{self._where(path)}, and cannot be carried to a restart"
                )
        return ""

    def other_data(self, saved: Mapping[str, str], now: Mapping[str, str]) -> str:
        """Returns why what the script made before its loop is not what the run that saved had; empty if it is.

        Args:
            saved: what `data` told then.
            now: what it tells now, with the same left out.
        """
        for path, token in saved.items():
            if now.get(path, token) != token:
                return (
                    f"{path!r} is another one than in the run that saved{self._where(path)}: the script makes it anew at every start, "
                    f"and not the same; seed what it draws, sort what has no order"
                )
        return ""

    def _where(self, path: str) -> str:
        """Returns the line of the script that stores to it, as far as it is known."""
        words = [word for part in path.replace("[", ".").split(".") for word in [part.strip("()'\"]")] if word]
        for word in reversed(words):
            if word in self._lines:
                return f" (line {self._lines[word]})"
        return ""

    def _named(self, rows: list[list[Any]], error: HoldfastError) -> str:
        for row in rows:
            try:
                encoded([row])
            except HoldfastError:
                return repr(row[0]) + self._where(row[0])
        return str(error)


def encoded(rows: Iterable[Sequence[Any]]) -> bytes:
    """Returns rows as bytes, with tokens for the data of tensors in containers.

    Raises:
        UsageError: a value cannot be stored.
    """
    return value_codec.encode([[*row[:3], *map(without_data, row[3:])] for row in rows])


def _is_same(now: Leaf, was: Leaf) -> bool:
    return was.token == now.token and container_kinds.is_same(now.kind, was.kind)


def _stored(now: Leaf, was: Leaf | None) -> tuple[Any, list[Any]]:
    """Returns a value as it is stored, and those of its tensors and arrays that are what they were when the loop began."""
    before = was.held if was is not None else None
    if isinstance(now.held, Grown):
        old = {id(part) for part in before.parts} if isinstance(before, Grown) else set()
        return now.held.stored(before), [part for part in now.held.parts if id(part) in old]
    if now.held is not None and now.held is before:
        return held_arrays.same(now.value()), [now.held]
    if now.kind is not None:
        return container_kinds.stored(now.value(), now.kind, was.kind if was is not None else None), []
    return now.value(), []


def _strings(value: Any) -> Iterator[str]:
    """Yields the texts in a plain value."""
    if type(value) is str:
        yield value
    elif isinstance(value, list | tuple | dict):
        yield from (text for part in (value.values() if isinstance(value, dict) else value) for text in _strings(part))


def _lies_in(path: str, places: frozenset[str]) -> bool:
    """Tell whether a path is one of these, or leads through one of them."""
    ends = (place for place, sign in enumerate(path) if sign in ".[")
    return bool(places) and (path in places or any(path[:end] in places for end in ends))
