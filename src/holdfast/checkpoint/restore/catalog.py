"""All that a version holds, by name, and what of it one rank of another layout is offered under which name.

Names say what is whose: `rank3/x` is what rank 3 had of its own, `x` what is the same thing wherever it stands. In
another layout the ranks are others, so for every path `x` a rank is offered, in this order:

1. what it had of its own under that name, if a rank of its number was saved;
2. what stands under the plain name; if several groups had the whole of it, all the same (compared when it is loaded);
3. what single ranks had, if all that had it had the same: equal values, equal bytes (compared when they are loaded).

What ranks had of their own that are no more is compared with what others keep, so that nothing trained goes without a word.
Random numbers belong to one rank and are offered to no other. A tensor that was kept under one name and had another as well
(tied weights) is offered under both, with its optimizer state. Pieces that overlap are alternatives; those on this node
come first. Pure with regard to training.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.entries.pytree import references
from holdfast.checkpoint.entries.types import SavedTensor
from holdfast.core.layout import reshard
from holdfast.core.model import BundleRef, Seal
from holdfast.tiers.format.image import Entry, Image
from holdfast.tiers.format.values import TensorRef, renamed

_OWNED = re.compile(r"rank(\d+)/(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """A bundle of the version: what its header says, and its values."""

    ref: BundleRef
    seal: Seal
    image: Image
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of a tensor: an entry of image `bundle_id`."""

    bundle_id: str
    entry: Entry


@dataclass(slots=True)
class Offer:
    """Holds what a rank may load.

    Attributes:
        saved: entries by the name that this rank would give them.
        places: name -> where the pieces of `saved` are, in the same order.
        rivals: name -> pieces of every other rank that had an entry of its own, or of other groups that had the whole
            under the same name; all must hold the same bytes.
        values: by path, named as this rank would.
        origin: name of a value -> the rank whose own it was.
        ties: name -> another one, whose tensor is tied to it here and was saved besides; among its rivals.
        gone: name -> what ranks that are no more had of their own beside what this rank had, by rank.
    """

    saved: dict[str, SavedTensor] = field(default_factory=dict)
    places: dict[str, list[Place]] = field(default_factory=dict)
    rivals: dict[str, list[list[Place]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, int] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    gone: dict[str, dict[int, list[Place]]] = field(default_factory=dict)

    def tie(self, first: str, other: str) -> list[str]:
        """Note that what was saved under `other` is one tensor with `first` here: both must hold the same.

        Returns what cannot.
        """
        misfit = []
        for name in list(self.saved):
            second = under_other_name(name, first, other)
            if second not in self.saved or self.places[second] == self.places[name]:
                continue
            here, there = self.saved[name], self.saved[second]
            if (here.dtype, here.global_shape) != (there.dtype, there.global_shape):
                misfit.append(
                    f"{second} (tied to {name} here; saved as {there.dtype} {there.global_shape}, "
                    f"{name} as {here.dtype} {here.global_shape})"
                )
            else:
                self.rivals[name].append(self.places[second])
                self.ties[name] = second
        return misfit

    def spelt(self, name: str) -> str:
        """A name for an error: with the one that is tied to it."""
        return f"{name} and {self.ties[name]}, which are tied here" if name in self.ties else name


class Catalogue:
    """A version's content.

    Args:
        world_size: number of ranks that saved it.
        random: names of objects whose state is random numbers.
    """

    def __init__(self, heads: Iterable[BundleHeader], *, world_size: int, random: Collection[str]) -> None:
        self.world_size = world_size
        self._random = tuple(random)
        self.heads = {head.ref.bundle_id: head for head in heads}
        self._plain: dict[str, list[Place]] = defaultdict(list)
        self._owned: dict[str, dict[int, list[Place]]] = defaultdict(lambda: defaultdict(list))
        self._plain_values: dict[str, list[tuple[BundleRef, Any]]] = defaultdict(list)
        self._owned_values: dict[str, dict[int, Any]] = defaultdict(dict)
        self._tied: dict[str, str] = {}
        for bundle_id in sorted(self.heads):
            self._read(self.heads[bundle_id])
        self.paths: list[str] = sorted(
            {*self._plain, *self._owned, *self._plain_values, *self._owned_values, *self._tied}
        )
        for other, first in self._tied.items():
            self._also(other, first)

    def _read(self, head: BundleHeader) -> None:
        for entry in head.image.entries:
            owner, path = self.split(entry.name)
            place = Place(head.ref.bundle_id, entry)
            (self._plain[path] if owner is None else self._owned[path][owner]).append(place)
        for name, value in head.values.items():
            owner, path = self.split(name)
            if type(value) is TensorRef and self.split(value.name)[1] != path:
                self._tied[path] = self.split(value.name)[1]
            elif owner is None:
                self._plain_values[path].append((head.ref, value))
            else:
                self._owned_values[path][owner] = value

    def _also(self, other: str, first: str) -> None:
        """All that stands under `first` stands under `other` too, where nothing of its own does."""
        rows: tuple[dict[str, Any], ...] = (self._plain, self._owned, self._plain_values, self._owned_values)
        known = {path for row in rows for path in row}
        for row in rows:
            for path in list(row):
                second = under_other_name(path, first, other)
                if second is not None and second not in known:
                    row[second] = row[path]

    @property
    def tied_names(self) -> dict[str, str]:
        """Another name of a parameter, as optimizers know it -> the one under which it was saved."""
        return {_fqn(other): _fqn(first) for other, first in self._tied.items()}

    def split(self, name: str) -> tuple[int | None, str]:
        """The rank whose own this is, None if it is nobody's, and the name without regard to ranks."""
        match = _OWNED.match(name)
        if match:
            return int(match[1]), match[2]
        # A job of one rank marks nothing as its own.
        alone = self.world_size == 1 and self.is_random(name)
        return (0 if alone else None), name

    def names(self) -> list[str]:
        """Every entry, as it was saved, and other names of tied ones."""
        return sorted({*(entry.name for head in self.heads.values() for entry in head.image.entries), *self._tied})

    def places(self, name: str) -> list[Place]:
        """Return where the pieces of an entry are, by the name that it was saved under; twins' pieces are alternatives."""
        owner, path = self.split(name)
        if owner is None or not _OWNED.match(name):
            return self._plain.get(path, []) or self._owned.get(path, {}).get(0, [])
        return self._owned.get(path, {}).get(owner, [])

    def is_random(self, path: str) -> bool:
        """Return whether this is, or belongs to, random numbers."""
        return any(path == name or path.startswith(f"{name}.") for name in self._random)

    def owners(self, path: str) -> list[int]:
        """The ranks that had something of their own under this name."""
        return sorted({*self._owned.get(path, ()), *self._owned_values.get(path, ())})

    def own_values(self, path: str) -> list[Any] | None:
        """Return what every saved rank had, in order; None if some had nothing, or tensors are part of it."""
        found = self._owned_values.get(path, {})
        if self.world_size == 1 and path in self._plain_values:
            found = {0: self._plain_values[path][0][1]}
        if sorted(found) != list(range(self.world_size)) or any(any(references(tree)) for tree in found.values()):
            return None
        return [found[rank] for rank in sorted(found)]

    def all_values(self, path: str) -> list[Any]:
        """Every value that anybody had under this name."""
        return [value for _, value in self._plain_values.get(path, ())] + list(
            self._owned_values.get(path, {}).values()
        )

    def offer(self, rank: int, here: Collection[str], *, num_ranks: int) -> Offer:
        """Return what `rank` of `num_ranks` is offered. `here`: bundles that lie in memory of its node."""
        offer = Offer()
        for path in {*self._plain, *self._owned}:
            self._offer_tensor(offer, rank, path, here)
            if path not in self._plain and not self.is_random(path) and rank in (owned := self._owned[path]):
                # Each of them is looked at by one rank.
                gone = {owner: places for owner, places in owned.items() if owner >= num_ranks}
                offer.gone[f"rank{rank}/{path}"] = {
                    owner: places for owner, places in gone.items() if owner % num_ranks == rank
                }
        for path in {*self._plain_values, *self._owned_values}:
            self._offer_value(offer, rank, path)
        return offer

    def _offer_tensor(self, offer: Offer, rank: int, path: str, here: Collection[str]) -> None:
        plain, owned = self._plain.get(path, []), self._owned.get(path, {})
        own = [owned[rank]] if rank in owned else []
        if plain:
            boxes = [place.entry.extent for place in plain]
            common = [[plain[n] for n in layer] for layer in reshard.layers(plain[0].entry.global_shape, boxes)]
        else:
            common = own if self.is_random(path) else [owned[owner] for owner in sorted(owned)]
        for name, rows in ((path, common), (f"rank{rank}/{path}", own or common)):
            if rows:
                places = sorted(rows[0], key=lambda place: place.bundle_id not in here)
                first = places[0].entry
                extents = tuple(place.entry.extent for place in places)
                offer.saved[name] = SavedTensor(first.dtype, first.global_shape, extents)
                offer.places[name] = places
                offer.rivals[name] = rows[1:]

    def _offer_value(self, offer: Offer, rank: int, path: str) -> None:
        plain, owned = self._plain_values.get(path, []), self._owned_values.get(path, {})
        common: list[tuple[int | None, Any]] = []
        if plain:
            common = [(None, next((value for ref, value in plain if ref.has(rank)), plain[0][1]))]
        elif owned and not self.is_random(path):
            first = min(owned)
            trees = [renamed(tree, lambda name: self.split(name)[1]) for tree in owned.values()]
            if all(tree == trees[0] for tree in trees):
                common = [(first, owned[first])]
        own: list[tuple[int | None, Any]] = [(rank, owned[rank])] if rank in owned else []
        for name, rows in ((path, common or own), (f"rank{rank}/{path}", own or common)):
            if rows:
                owner, tree = rows[0]
                offer.values[name] = self.as_own(tree, rank)
                if owner is not None:
                    offer.origin[name] = owner

    def as_own(self, tree: Any, rank: int) -> Any:
        """A value with references to what is the rank's own, in place of what was somebody's own."""

        def rename(name: str) -> str:
            owner, path = self.split(name)
            return name if owner is None else f"rank{rank}/{path}"

        return renamed(tree, rename)


def under_other_name(name: str, first: str, other: str) -> str | None:
    """Return what the tensor `first`, or state that optimizers keep of it, is called if it is named `other`; None:
    neither.
    """
    if name == first:
        return other
    stem, state, rest = f"{name}.".partition(f".state.{_fqn(first)}.")
    return f"{stem}.state.{_fqn(other)}.{rest}".removesuffix(".") if state else None


def _fqn(path: str) -> str:
    """A parameter's name in optimizer state; see `checkpoint.entries.entries.Owner`."""
    return _OWNED.sub(r"\2", path).removeprefix("model.")


def merged_groups(
    saved: Sequence[Any], names: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> list[dict[str, Any]] | None:
    """Parameter groups with these parameters, put together from groups that several ranks saved.

    Options follow the parameters by name, or by the name in `tied` under which they were saved. None if a parameter stands
    in no saved group, or parameters that are together here had different options.
    """
    rows = [group for groups in saved if isinstance(groups, list) for group in groups if isinstance(group, dict)]
    made: list[dict[str, Any]] = []
    for index, members in enumerate(names):
        found = []
        for name in members:
            known = {name, tied.get(name, name)}
            options = [group for group in rows if known & set(group.get("params", ()))]
            if not options:
                return None
            found += options
        if not members:  # a stage without parameters: by position
            found = [groups[index] for groups in saved if isinstance(groups, list) and index < len(groups)][:1]
        options = [{key: value for key, value in group.items() if key != "params"} for group in found]
        if not options or any(not _same(other, options[0]) for other in options):
            return None
        made.append({**options[0], "params": list(members)})
    return made


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def bare(tree: Mapping[str, Any]) -> Any:
        return renamed(dict(tree), lambda name: _OWNED.sub(r"\2", name))

    return bool(bare(one) == bare(other))
