"""The position in loops that lie inside each other, and all that is carried, as an object with a state.

A version says, of every loop that ran: which one, what it went over, how many items were taken; of each outer one besides, what
its item began with (`start`): random numbers, and what differed from the beginning. A restart begins the item of the outer loop
again with that, runs the statements up to the inner loop, and then takes over what the version holds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.adapters.zero_lines.changes import Changed, encoded
from holdfast.adapters.zero_lines.doubts import Doubts, belongs, collectives_made
from holdfast.adapters.zero_lines.nested.nested_look import Entry, Lost
from holdfast.adapters.zero_lines.nested.nested_script import Nest, Site
from holdfast.adapters.zero_lines.nested.texts_of_start import are_alike, is_gone
from holdfast.adapters.zero_lines.reach.growing_lists import apart
from holdfast.adapters.zero_lines.reach.loader_places import has_place
from holdfast.adapters.zero_lines.reach.look import Look
from holdfast.adapters.zero_lines.reach.memory import spans_of
from holdfast.adapters.zero_lines.reach.plain_values import MAX_ELEMENTS, has_set, is_plain
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device.accelerator import name_of
from holdfast.checkpoint.entries import carried_tensors, living_gradients
from holdfast.checkpoint.entries.carried_tensors import is_carried, is_large
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.job import collectives
from holdfast.tiers.format import values as value_codec

_KEYS = {"position", "starts", "rows", "gone", "carried", "unsure", "began", "number"}


class NestedState(Doubts):
    """Holds what a version has besides the objects.

    Args:
        outermost: the one that began first.
        began: numbers and texts that the loops read, as they were then.

    Attributes:
        restored: the version that was loaded; None if there is none.
        stepped: the parameters that the optimizers step.
        objects: all that is kept.
        randomness: that the outermost loop began with.
        generators: name of a generator -> what is noted of it where the outermost loop began.
        rehearsed: whether the first steps are, or were, rehearsed.
        loses_gradients: whether a model of the first FSDP is kept, which drops those that it is given.
        workers: what workers that stay keep of loaders that steps of the innermost loop go over; empty if there are none.
        placing: the look whose values and owners take what a version carries; None: it is only noted.
    """

    def __init__(self, nest: Nest, outermost: Entry, began: dict[str, str], group: collectives.Ranks) -> None:
        super().__init__(group, began)
        self._nest, self._outermost = nest, outermost
        self.restored: dict[str, Any] | None = None
        self.stepped: Sequence[torch.Tensor] = ()
        self.objects: Sequence[Any] = ()
        self.workers = b""
        self.placing: Look | None = None
        self.randomness: dict[str, Any] = {}
        self.generators: dict[str, Generator] = {}
        self.rehearsed = self.loses_gradients = False
        self._cut = ""  # the first tensor that was carried without its graph
        self._made_before: dict[str, int] = {}
        self._cleared: frozenset[int] = frozenset()
        self._memory: list[tuple[Any, set[int]]] = []  # of the kept objects, for one look
        self._noted = {
            "range": [], "position": [], "starts": [], "rows": [], "gone": [], "carried": {}, "lost": [], "after": None,
            "unsure": "", "began": began, "number": -1, "entry": outermost.drawn, "randomness": {}, "data": {}, "who": self.who,
            "generators": {},
        }  # fmt: skip

    def all_are_here(self) -> None:
        """Every rank is at this point of the job: collectives are counted from here."""
        self._made_before = collectives_made({})

    def note(self, entries: Sequence[Entry], number: int, cleared: frozenset[int]) -> bool:
        """Takes everything as it is now, behind a step of the innermost loop; False: this step must be in no version.

        Args:
            entries: the loops that run.
            number: of the step.
            cleared: parameters whose gradients every step surely clears before it reads them.
        """
        *_, inner = entries
        self._cleared = cleared
        names = inner.names()
        items = inner.items
        assert items is not None
        after: dict[str, Any] | None = {}
        is_due = items.size is None or inner.taken >= items.size
        if is_due or items.may_end:
            after = (
                self._after(inner.site, names)
                if (self.is_alike(inner) or not is_due)
                and not (inner.site.grads and living_gradients.there_are(self.stepped))
                else None
            )
            if after is None and is_due and items.size is not None:
                return False
            if after is None and is_due:
                self.doubt(
                    f"the loop of line {inner.site.line} may end at any step, and what is read behind it cannot be carried"
                )
        changed = inner.changes.now()
        self.judge_files()
        carried, lost = self.living(inner, names)
        gradients = living_gradients.packed(self.stepped, cleared, zeros=not self.loses_gradients)
        self.doubt(
            changed.reason
            or (self._why_no_graph(changed.graph) if changed.graph else "")
            or self._why_unsure(carried, gradients)
            or self._of_items(entries)
            or _changed_around(entries)
        )
        self._noted = {
            "range": [],
            "position": [_place(entry) for entry in entries],
            "starts": [entry.start for entry in entries[:-1]],
            "rows": changed.rows,
            "gone": changed.gone,
            "carried": carried,
            "targets": _targets(inner),
            "same": _same(inner, names),
            "lost": lost,
            "absent": _absent(inner, names),
            "after": after,
            "gradients": gradients or {},
            "workers": self.workers,
            "unsure": self.unsure,
            "began": self._began,
            "number": number,
            "entry": self._outermost.drawn,
            "randomness": self.randomness,
            "generators": {name: list(each) for name, each in self.generators.items()},
            "data": self._data(changed.rows, [entry.start for entry in entries[:-1]]),
            "who": self.who,
            "asked": self.files.answers() if self.files is not None else {},
            "cut": {
                "turns": [[entry.site.number, entry.taken] for entry in entries],
                "collectives": collectives_made(self._made_before),
            },
        }
        return True

    def ends(self, entry: Entry) -> None:
        """An innermost loop has ended: a restart from its last step has to have what is read behind it, however many items its length told of."""
        is_last = [each[:2] for each in self._noted["position"][-1:]] == [[entry.site.number, entry.taken]]
        if is_last and self._noted["after"] is None:
            self.doubt(
                f"the loop of line {entry.site.line} ends before the number of its items that was told, and what is read behind it "
                f"cannot be carried"
            )

    def is_alike(self, entry: Entry) -> bool:
        """Tell whether all ranks surely find alike whether the last step can be in a version. One that leaves it out would have the others wait for it."""
        if self.alone or entry.items is None or entry.items.size is None:
            return True
        sure = entry.site.numbers | {*_flat(entry.site.target)}
        return not any(site.grads for site in self._nest.sites) and {*entry.site.after} <= sure

    def start_of(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Returns what is there as an item of an outer loop begins."""
        *_, entry = entries
        changed = entry.changes.now()
        names = entry.names()
        carried, lost = self.living(entry, names)
        entry.tensors = {
            name: carried_tensors.token(names[name]) for name in carried if name in names and not is_plain(names[name])
        }
        self.doubt(changed.reason)
        assert entry.items is not None
        return {
            "rows": [[*row[:3], *map(apart, row[3:])] for row in changed.rows], "gone": changed.gone,
            "carried": {name: apart(value) if is_plain(value) else value for name, value in carried.items()}, "lost": lost, "absent": _absent(entry, names), "rng": packed_randomness(),
            "digest": entry.items.digest(), "settings": settings(self.objects),
            "targets": _targets(entry), "same": _same(entry, names),
        }  # fmt: skip

    def living(self, entry: Entry, names: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Returns the names that live from turn to turn and can be carried, and those that may live and cannot be."""
        site = entry.site
        self._memory.clear()
        carried: dict[str, Any] = {}
        lost: list[str] = []
        for name in site.lives:
            value = names.get(name)
            if name not in names or type(value) is Lost:
                lost.append(name)  # who reads it before it is set is told
            elif is_plain(value):
                carried[name] = value
            elif name in site.carried and is_carried(value, is_plain) and not (site.outer and is_large(value)):
                self.doubt(self._why_no_tensors(name, value) or self._why_not_beside(name, entry, names))
                carried[name] = carried_tensors.packed(value)
            elif has_place(value):
                continue  # it stays, and is put where it was
            elif name in site.loose:
                lost.append(name)
            else:
                what = f"a {type(value).__qualname__}"
                self.doubt(f"{name!r}, {what}, is carried from one turn of the loop of line {site.line} to the next")
        for name, value in carried.items():
            if is_plain(value) and has_set(value) and name not in self._nest.members:
                self.doubt(
                    f"{name!r}, a set or with one in it, is carried from one turn to the next, and its order cannot be"
                )
            if is_plain(value) and (held := entry.changes.holds_identity(value)):
                self.doubt(f"{name!r} is carried from one turn to the next, and {held}")
        self._memory.clear()
        return carried, lost

    def _loop_name(self) -> str:
        return f"the loop of line {self._outermost.site.line}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Notes the version; its plain values are put in place where the innermost loop begins."""
        self._noted = self.restored = state
        if self.placing is not None:
            self.placing.put(state["rows"], state["gone"])

    def _why_no_tensors(self, name: str, value: Any) -> str:
        """Returns why tensors that live from turn to turn cannot be carried; empty if they can."""
        found = list(carried_tensors.tensors(value))
        if any(tensor.requires_grad for tensor in found) and (why := self._why_no_graph(repr(name))):
            return why
        memory = [tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()]
        if len({*memory}) < len(memory):
            return f"{name!r} lives from one turn to the next, and two of its tensors share memory with each other"
        trained = {p.untyped_storage().data_ptr(): number for number, p in enumerate(self.stepped) if p.numel()}
        if both := {*memory} & trained.keys():
            other = self._named(self.stepped[trained[min(both)]])
            return f"{name!r} lives from one turn to the next, and shares memory with {other}, which trains"
        return ""

    def _why_no_graph(self, named: str) -> str:
        """Returns why a tensor with a graph cannot be carried without it; empty if it can, as far as the rehearsal has told yet."""
        self._cut = self._cut or named
        if self.rehearsed and not self._nest.retains:
            return ""
        why = "the script retains graphs" if self._nest.retains else "the first steps are not rehearsed"
        return f"{named} lives from one turn to the next with its graph, and {why}"

    def rehearses(self, reason: str) -> None:
        """Says once why the first steps are not rehearsed; what relied on that is in no version."""
        super().rehearses(reason)
        if reason and self._cut:
            self.rehearsed = False
            self.doubt(self._why_no_graph(self._cut))

    def _why_not_beside(self, name: str, entry: Entry, names: Mapping[str, Any]) -> str:
        """Returns why tensors cannot be carried beside those of other names and of what is kept, of which a restart makes others; empty if they can."""
        mine = _storages(names[name])
        if mine and entry.began.get(name) is not names[name] and self._is_kept_memory(mine, name, names):
            return f"{name!r} lives from one turn to the next, and shares memory with an object that is kept by itself"
        for other in entry.site.lives:
            both = names.get(other), names[name]
            if other == name or both[0] is both[1] or not {name, other} & self._nest.written:
                continue
            is_as_begun = all(each in entry.began and entry.began[each] is names.get(each) for each in (name, other))
            if not is_as_begun and carried_tensors.is_carried(both[0], is_plain) and mine & _storages(both[0]):
                return (
                    f"{name!r} and {other!r} live from one turn to the next, share memory, and may be written in place"
                )
        return ""

    def _is_kept_memory(self, mine: set[int], name: str, names: Mapping[str, Any]) -> bool:
        """Tell whether tensors of the kept objects lie there, or gradients that later ones may be written to.

        A tensor that is kept by itself, as data is, counts only where it may be written, by its own names or by the one that is asked for.
        """
        if not self._memory:
            lives_on = self._nest.reuses_gradients or not {*map(id, self.stepped)} <= self._cleared
            parts = [part for thing in self.objects for part in (thing if isinstance(thing, list) else [thing])]
            for part in (each for thing in parts for each in (thing.values() if type(thing) is dict else [thing])):
                spans = spans_of(part, gradients=lives_on)
                self._memory.append((part, {first for first, end in spans if first < end}))
        for part, memory in self._memory:
            if mine & memory:
                its = {other for other, value in names.items() if value is part} if torch.is_tensor(part) else set()
                if not its or {name, *its} & self._nest.written:
                    return True
        return False

    def _named(self, parameter: torch.Tensor) -> str:
        """Returns what a module calls a parameter."""
        parts = [part for thing in self.objects for part in (thing if isinstance(thing, list) else [thing])]
        for module in parts:
            for path, each in module.named_parameters() if isinstance(module, torch.nn.Module) else ():
                if each is parameter:
                    return f"the parameter {path!r}"
        return "a parameter"

    def _after(self, site: Site, names: Mapping[str, Any]) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for name in site.after:
            value = _packed(names.get(name, self), number=name in site.numbers)
            if value is None:
                return None
            found[name] = value
        return found

    def _why_unsure(self, carried: Mapping[str, Any], gradients: Mapping[str, Any] | None) -> str:
        try:
            value_codec.encode({name: value for name, value in carried.items() if is_plain(value)})
        except Exception as error:  # noqa: BLE001 - values of other people
            pass_on(error)
            return f"what lives from one step to the next cannot be carried: {error}"
        return living_gradients.UNSURE if gradients is None else ""

    def _other_numbers(self, state: Mapping[str, Any], *, begun: bool) -> str:
        """Returns the generators whose numbers are others than in the run that saved, of those that the items may come
        from. `begun`: whether items may have been drawn before the loop was entered.
        """
        saved = {name: Generator(*told) for name, told in (state.get("generators") or {}).items()}
        if not saved:  # of a release that noted all in one
            return "all" if begun and state["entry"] != self._outermost.drawn else ""
        found = {name: (saved.get(name), self.generators.get(name)) for name in {*saved, *self.generators}}
        return ", ".join(sorted(name for name, (was, now) in found.items() if _matter(was, now, begun=begun)))

    def _of_items(self, entries: Sequence[Entry]) -> str:
        for entry in entries:
            if entry.items is not None and (why := entry.items.refused or entry.items.doubt):
                return f"the loop of line {entry.site.line} cannot be taken up: {why}"
        return ""

    def _why_not(self, state: Mapping[str, Any]) -> str:
        """Returns why a version does not fit; empty if it does."""
        if not state.keys() >= _KEYS:
            return "what was saved is of another release of holdfast, or of another shape of the script"
        if state["unsure"]:
            return f"the run that saved was not sure of it: {state['unsure']}"
        if not state["position"]:
            return ""
        (number, _, shape), entry = state["position"][0][:3], self._outermost
        assert entry.items is not None
        if number != entry.site.number:
            return f"its loop of line {entry.site.line} began first, and in the run that saved it was another one"
        if list(shape) != entry.items.shape:
            return (
                f"the loop of line {entry.site.line} goes over {_shown(entry.items.shape)}, and the one that was saved went over "
                f"{_shown(shape)}: the script may have gone on from a file of its own"
            )
        if others := self._other_numbers(state, begun=entry.items.begun):
            return (
                f"its random numbers ({others}) are others than in the run that saved, and its loader has drawn from them: "
                f"seed them"
            )
        taken, size = state["position"][0][1], entry.items.size
        if size is not None and (taken >= size if entry.site.outer else taken > size):
            return f"{taken} items of the loop of line {entry.site.line} were done, and there are {size}"
        if (why := self._why_not_begun(state)) or state.get("who") != self.who:
            return why
        if "cut" in state and not belongs(state["number"], state["cut"]):
            return (
                f"ranks were at different turns of the loop of line {entry.site.line} behind their step {state['number']}, and had "
                f"not made the same collectives: what they saved does not belong together"
            )
        if self.files is not None and (why := self.files.why_other(state.get("asked", {}))):
            return why
        return entry.changes.other_data(state.get("data", {}), self._data(state["rows"], state["starts"]))

    def _is_of_start(self, path: str, state: Mapping[str, Any]) -> bool:
        rows = state["starts"][0]["rows"] if state["starts"] else state["rows"]
        texts = {
            place: pair
            for place, pair in self._outermost.changes.carried(rows).items()
            if place.rpartition(".")[2] in self._nest.started and all(type(each) is str for each in pair)
        }
        return path in texts and are_alike(*texts[path]) and not any(is_gone(*pair) for pair in texts.values())

    def _data(self, rows: list[list[Any]], starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Returns tokens of what the script made, without what a restart puts in place before it uses any of it.

        Args:
            rows: what a version carries, which is put in place where its innermost loop begins.
            starts: what the items of the outer loops began with; that of the outermost is put in place first.
        """
        nest, outermost = self._nest, self._outermost
        carried = starts[0]["rows"] if starts else rows
        return outermost.changes.data(
            nest.used, lives=set(outermost.site.lives), clock=nest.reads_clock, carried=carried
        )


def _changed_around(entries: Sequence[Entry]) -> str:
    """Returns which tensor of an outer loop was changed in place since its item began; empty if none was."""
    for entry in entries[:-1]:
        names = entry.names() if entry.tensors else {}
        for name, token in entry.tensors.items():
            if name not in entries[-1].site.lives and carried_tensors.token(names.get(name)) != token:
                return f"{name!r}, which lives from one turn of the loop of line {entry.site.line} to the next, is changed in an inner loop"
    return ""


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in carried_tensors.tensors(value) if tensor.numel()}


def _absent(entry: Entry, names: Mapping[str, Any]) -> list[str]:
    """Returns the names that live from turn to turn and that the script has not set yet, or has deleted."""
    return [name for name in entry.site.lives if name not in names]


def _same(entry: Entry, names: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names that hold the object that they held when the loop began (""), or that of another name before them."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name in entry.site.lives:
        value = names.get(name)
        if name in entry.began and entry.began[name] is value:
            found[name] = ""
        elif (carried_tensors.stays(value) or isinstance(value, torch.Tensor)) and first.setdefault(
            id(value), name
        ) != name:
            found[name] = first[id(value)]
    return found


def _place(entry: Entry) -> list[Any]:
    assert entry.items is not None
    items = entry.items
    return [entry.site.number, entry.taken, items.shape, entry.made, entry.drawn, items.digest(), items.follows()]


def _targets(entry: Entry) -> dict[str, Any]:
    """Returns what the names of a loop's item hold, as far as it is a number or a text."""
    names = entry.names()
    held = {name: names[name] for name in _flat(entry.site.target) if name in names}
    return {name: value for name, value in held.items() if type(value) in (bool, int, float, str)}


def _flat(target: Any) -> Iterator[str]:
    if isinstance(target, str):
        yield target
    else:
        for part in target:
            yield from _flat(part)


def stand_in(target: Any, values: Mapping[str, Any]) -> Any:
    """Returns an item that sets the names of a loop to what they held."""
    return values.get(target) if isinstance(target, str) else tuple(stand_in(part, values) for part in target)


def _shown(shape: Sequence[Any]) -> str:
    if shape[0] == "range":
        return f"a range from {shape[1]} by {shape[2]}"
    return " ".join(map(str, shape))


def given(
    names: Sequence[str],
    carried: Mapping[str, Any],
    after: Mapping[str, Any] | None = None,
    there: Mapping[str, Any] | None = None,
    stays: Mapping[str, Any] | None = None,
    same: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Returns the values of these names, in order; what was lost tells so when it is used.

    Args:
        names: of the script.
        carried: what a version has of them.
        after: the same of names that are read behind a loop.
        there: what they mean now, where the statements before have just made them as the run that saved did.
        stays: what they mean now: an iterator of a data loader is in no version, and stays with its place.
        same: names that held one object since the loop began, which may have other names too, or that of another of these names.
    """
    found = {name: carried_tensors.unpacked(value) for name, value in carried.items()} | {
        name: _unpacked(value) for name, value in (after or {}).items()
    }
    found |= {name: value for name, value in (there or {}).items() if name in found and _is_same(found[name], value)}
    now = stays or {}
    for name, other in (same or {}).items():
        if name in found and (other in found if other else name in now):
            found[name] = found[other] if other else carried_tensors.filled(now[name], found[name])
    found = {name: value for name, value in now.items() if has_place(value)} | found
    return tuple(found[name] if name in found else Lost(name) for name in names)


def _is_same(saved: Any, now: Any) -> bool:
    """Tell whether a tensor without a graph is the one that was saved: then it stays, for it may have several names."""
    tensors = isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor)
    return tensors and not now.requires_grad and carried_tensors.token(saved) == carried_tensors.token(now)


def differing(saved: Sequence[Sequence[Any]], now: Changed) -> str:
    """Returns the path of a value that is not as it was saved; empty if all are."""
    there = {row[0]: encoded([row]) for row in saved}
    here = {row[0]: encoded([row]) for row in now.rows}
    return next((path for path in (*there, *here) if there.get(path) != here.get(path)), "")


def settings(objects: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns what a script may read of optimizers and schedulers before an inner loop begins: learning rates, counts of steps."""
    return [{key: value for key, value in held.items() if _is_setting(value)} for held in _with_settings(objects)]


def put_settings(objects: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Sets them as they were; a restore that follows sets them as the version has them."""
    for held, values in zip(_with_settings(objects), saved, strict=False):
        held.update({key: list(value) if isinstance(value, list) else value for key, value in values.items()})


def _with_settings(objects: Sequence[Any]) -> list[dict[str, Any]]:
    parts = [part for thing in objects for part in (thing if isinstance(thing, list) else [thing])]
    groups = [group for part in parts if isinstance(part, Optimizer) for group in part.param_groups]
    return [*groups, *(vars(part) for part in parts if isinstance(part, LRScheduler))]


def _is_setting(value: Any) -> bool:
    return type(value) in (bool, int, float) or (
        type(value) is list and all(type(part) in (int, float) for part in value)
    )


def packed_randomness() -> dict[str, Any]:
    """Returns the states of the generators of random numbers of the process, as plain values."""
    packed_state: dict[str, Any] = _pack(ProcessRandomness().state_dict())
    return packed_state


def put_randomness(state: Mapping[str, Any]) -> None:
    """Goes on with random numbers as they were packed."""
    ProcessRandomness().load_state_dict(_unpack(state))


def generators() -> dict[str, str]:
    """Returns a token of each generator of random numbers of the process."""
    return {name: xxhash.xxh3_64_hexdigest(value_codec.encode(state)) for name, state in packed_randomness().items()}


class Generator(NamedTuple):
    """A generator of random numbers, as it was where the outermost loop began.

    Attributes:
        token: of its state as the loop was entered.
        touched: whether somebody has seeded it, or drawn from it, before. torch's own begins alike in every run of a rank, so it counts.
        drawn: whether what the loop goes over has drawn from it.
    """

    token: str
    touched: bool
    drawn: bool


def noted(began: Mapping[str, str], entered: Mapping[str, str], now: Mapping[str, str]) -> dict[str, Generator]:
    """Returns what is noted of each generator.

    Args:
        began: tokens as the script began.
        entered: as its loop was entered.
        now: as the loop asks for its first item.
    """
    return {
        name: Generator(token, name not in ("python", "numpy") or began.get(name) != token, now.get(name) != token)
        for name, token in entered.items()
    }


def _matter(was: Generator | None, now: Generator | None, *, begun: bool) -> bool:
    """Tell whether items may have come from a generator that had other numbers in the run that saved."""
    told = [each for each in (was, now) if each is not None]
    alike = len(told) == 2 and told[0].token == told[1].token
    return not alike and any(each.drawn or (begun and each.touched) for each in told)


def drawn() -> str:
    """Returns a token of the generators of random numbers of the process."""
    return xxhash.xxh3_64_hexdigest(value_codec.encode([packed_randomness(), list(random.getstate()[1][-1:])]))


def _pack(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        data = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": data, "dtype": str(tree.dtype).removeprefix("torch.")}
    if hasattr(tree, "tobytes") and hasattr(tree, "dtype") and getattr(tree, "shape", ()) != ():
        return {"array": tree.tobytes(), "dtype": str(tree.dtype)}
    if isinstance(tree, dict):
        return {key: _pack(part) for key, part in tree.items()}
    return list(map(_pack, tree)) if isinstance(tree, list | tuple) else tree


def _unpack(tree: Any) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {"tensor", "dtype"}:
            return torch.frombuffer(bytearray(tree["tensor"]), dtype=getattr(torch, tree["dtype"]))
        if tree.keys() == {"array", "dtype"}:
            import numpy  # noqa: ICN001, PLC0415 - only a process that has drawn from it has such a state

            return numpy.frombuffer(bytearray(tree["array"]), dtype=tree["dtype"])
        return {key: _unpack(part) for key, part in tree.items()}
    return list(map(_unpack, tree)) if isinstance(tree, list) else tree


def _packed(value: Any, *, number: bool) -> Any:
    """Returns a value as it can be stored; None if it cannot."""
    if is_plain(value):
        return {"plain": value}
    if isinstance(value, torch.Tensor) and number and value.numel() <= MAX_ELEMENTS and not value.is_quantized:
        where = name_of(value.device)
        return {"tensor": value.detach().tolist(), "dtype": str(value.dtype).removeprefix("torch."), "device": where}
    return None


def _unpacked(packed: Mapping[str, Any]) -> Any:
    """Returns the value that was stored."""
    if "plain" in packed:
        return packed["plain"]
    return torch.tensor(packed["tensor"], dtype=getattr(torch, packed["dtype"]), device=packed["device"])
