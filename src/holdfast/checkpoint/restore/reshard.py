"""Coming back in another layout: other mesh, placements, stages or number of ranks than those that saved the version.

In rounds that all ranks make together, each with a vote, so that a bad copy is known everywhere before anybody goes on:

1. *heads*: headers and values of all bundles, read by ranks that have them near, told to all (`checkpoint.restore.bundle_headers`);
2. *plan*: every rank finds the pieces of what it holds (`checkpoint.restore.catalog`, `core.layout.reshard`); the job judges what is
   missing and what nobody takes;
3. *read*: every chunk that lies in storage only, and that somebody needs, is read by one rank;
4. *fetch*: each rank gets its chunks from its node, from a holder's memory, or from the node that read them;
5. *fill*: proved and copied, as in the saved layout; what several ranks had of their own under one name, what was two
   tensors and is tied here, and what ranks had that are no more, is compared.

Nothing is applied here, and a round that fails leaves only tensors that the next attempt fills anew.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.base.errors import CorruptError, MismatchError
from holdfast.checkpoint.entries.entries import EXCLUDED, MEMORY_ORDER, Loading, mismatch
from holdfast.checkpoint.entries.pytree import references
from holdfast.checkpoint.entries.sharding import bits_of
from holdfast.checkpoint.entries.types import Group, LiveTensor, LoadRecord
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.restore import tensor_fill
from holdfast.checkpoint.restore.bundle_headers import BundleHeaders
from holdfast.checkpoint.restore.catalog import Catalogue, Offer, Place, merged_groups, under_other_name
from holdfast.checkpoint.restore.fetcher import (
    Fault,
    Fetcher,
    Loaded,
    by_bundle,
    chunks_of,
    fault_of,
    fetch_of,
    prove_seal,
)
from holdfast.checkpoint.restore.tensor_fill import Copy, Source
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout import reshard
from holdfast.core.layout.reshard import Runs
from holdfast.core.rank_runs import is_in
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts, Fetch
from holdfast.core.recovery.version_choice import Source as SourceKind
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format.image import CHUNK_BYTES

# Values of a version that belong to no object.
_OF_THE_SAVE = ("info", "carried", "gradients", "frozen_or_thawed", "modes_and_dropout", EXCLUDED, MEMORY_ORDER)

_encoder = msgspec.msgpack.Encoder()
_needs_decoder = msgspec.msgpack.Decoder(dict[str, list[tuple[int, int]]])


class OtherLoading(Loading):
    """A restore of one rank from what the catalogue offers it.

    Attributes:
        leftover: what no rank takes; known when all ranks have planned.
    """

    def __init__(self, state: State, catalogue: Catalogue, offer: Offer, *, strict: bool) -> None:
        super().__init__(state.layouts, offer.saved, dict(offer.values), strict=strict)
        self._catalogue = catalogue
        self.leftover: tuple[str, ...] = ()
        self.whole_states: list[str] = []

    def regroup(self, path: str, group: Group | None, names: Sequence[Sequence[str]]) -> None:
        """Options follow the parameters by name, whichever ranks had them in a group."""
        made = merged_groups(self._catalogue.all_values(path), names, self._catalogue.tied_names)
        if made is not None:
            name, _ = self.layouts.resolve(path, group)
            self.values = {**self.values, name: self._catalogue.as_own(made, self.layouts.rank)}

    def states_of_ranks(self, path: str) -> list[Any] | None:
        """Return what every saved rank had, if their number was another one."""
        if self._catalogue.world_size == self.layouts.world_size:
            return None
        states = self._catalogue.own_values(path)
        if states is not None:
            self.used.add(path)
            self.whole_states.append(path)
        return states

    def unused(self) -> list[str]:
        """Return what nobody in the job takes."""
        return list(self.leftover)

    def forget(self, path: str, names: set[str]) -> bool:
        """Gives up a value if one of these entries is part of it, and takes them out of `names`; whether it did."""
        mine = names & set(references(self._ready.get(path)))
        names -= mine
        if mine:
            del self._ready[path]
        return bool(mine)

    def paths(self) -> set[str]:
        """Return what this rank takes, without regard to ranks."""
        return {self._catalogue.split(name)[1] for name in self.used}


@dataclass(slots=True)
class _Need:
    """Holds what this rank copies from one bundle."""

    copies: list[Copy]
    runs: Runs


class OtherLayout:
    """One attempt on one version. Collective.

    Args:
        facts: what every rank knows of the job and of bad copies.
        vote: tells all ranks the faults of this one; whether nobody had any.
        strict: refuse what does not fit.
    """

    def __init__(
        self,
        group: Ranks,
        state: State,
        fetcher: Fetcher,
        *,
        facts: Facts,
        vote: Callable[[list[Fault]], bool],
        strict: bool,
    ) -> None:
        self._group = group
        self._state = state
        self._fetcher = fetcher
        self._facts = facts
        self._vote = vote
        self._strict = strict
        self._loading: OtherLoading

    def load(self, choice: Choice, progress: Callable[[int], None]) -> Loaded | None:
        """Everything filled and compared, or None if some rank found a bad copy.

        Raises:
            MismatchError: it does not fit; on every rank.
        """
        loaded = Loaded()
        heads = BundleHeaders(self._group, self._fetcher, self._facts, choice)
        catalogue = self._catalogue(heads, choice, loaded)
        if catalogue is None:
            return None
        offer = collectives.together(self._group, lambda: self._plan(choice, catalogue))
        loaded.by_rank = self._judge(catalogue, offer)
        loaded.tensors = collectives.together(self._group, lambda: self._state.create(self._loading))
        scratch = _Scratch(loaded.tensors, offer)
        if not self._take(choice, catalogue, scratch.wanted, (heads.read_before(catalogue), loaded), progress):
            return None
        loaded.by_rank += self._compare(scratch, offer)
        loaded.values = {(): self._loading.values}
        return loaded

    # For who has no objects of a Checkpointer to fill (`adapters.dcp`): what there is, then boxes of it.

    def catalogue(self, choice: Choice) -> Catalogue | None:
        """All that the version holds; None if some rank found a bad copy."""
        return self._catalogue(BundleHeaders(self._group, self._fetcher, self._facts, choice), choice, Loaded())

    def take(self, choice: Choice, catalogue: Catalogue, wanted: Sequence[tuple[LiveTensor, Sequence[Place]]]) -> bool:
        """Fills tensors, each from places that make up its extent; False if some rank found a bad copy."""
        return self._take(choice, catalogue, wanted, ({}, Loaded()), lambda _: None)

    def _take(
        self,
        choice: Choice,
        catalogue: Catalogue,
        wanted: Sequence[tuple[LiveTensor, Sequence[Place]]],
        found: tuple[Mapping[str, Mapping[int, int]], Loaded],
        progress: Callable[[int], None],
    ) -> bool:
        loaded = found[1]
        needs = collectives.together(self._group, lambda: _needs(wanted))
        if not self._fetch(choice, catalogue, needs, found):
            return False
        sources = _sources(loaded.located, catalogue, needs)
        started = time.perf_counter()
        copies = [needs[source.image.bundle_id].copies for source in sources]
        bad = collectives.together(self._group, lambda: tensor_fill.fill_with(sources, copies, progress))
        loaded.fill_seconds = time.perf_counter() - started
        loaded.faults += [fault_of(name, self._node(choice, name), why) for name, why in bad.items()]
        return self._vote(loaded.faults)

    # 1 and 2. Heads and plan.

    def _catalogue(self, heads: BundleHeaders, choice: Choice, loaded: Loaded) -> Catalogue | None:
        data = collectives.together(self._group, lambda: heads.read(loaded))
        if not self._vote(loaded.faults):
            return None
        told = self._group.gather(data)
        random = [name for name, is_random in self._state.stateful.items() if is_random]
        found = collectives.together(self._group, lambda: heads.understand(told))
        return Catalogue(found, world_size=choice.world_size, random=random)

    def _plan(self, choice: Choice, catalogue: Catalogue) -> Offer:
        home = self._facts.topology.node_of[self._group.rank]
        here = {name for name, held in choice.holders.items() if any(is_in(home, copy.nodes) for copy in held)}
        offer = catalogue.offer(self._group.rank, here, num_ranks=self._group.world_size)
        self._loading = OtherLoading(self._state, catalogue, offer, strict=self._strict)
        self._state.plan(self._loading)
        for other, first in self._state.tied.items():
            self._loading.misfit += offer.tie(first, other)
        # Of objects, and of what a save carries beside the state, it is told by object what is not used.
        others = (*self._state.stateful, *_OF_THE_SAVE)
        for name in [
            name for name in offer.gone if catalogue.split(name)[1].startswith(tuple(f"{o}." for o in others))
        ]:
            del offer.gone[name]
        return offer

    def _judge(self, catalogue: Catalogue, offer: Offer) -> tuple[str, ...]:
        """Return what does not fit, in the whole job; what became of the state of single ranks.

        Raises:
            MismatchError: strict, and something is missing, different, or taken by nobody.
        """
        loading, stateful = self._loading, self._state.stateful
        kept = [name for name in loading.missing if self._is_of_a_rank(catalogue, name)]
        loading.missing = [name for name in loading.missing if name not in kept]
        taken = loading.paths()
        mask = sum(1 << number for number, path in enumerate(catalogue.paths) if path in taken)
        ties = {catalogue.split(other)[1]: catalogue.split(first)[1] for other, first in self._state.tied.items()}
        told = collectives.gather_json(self._group, [loading.missing, loading.misfit, f"{mask:x}", ties])
        used = 0
        for _, _, theirs, _ in told:
            used |= int(theirs, 16)
        tied = [names for row in told for names in row[3].items()]
        loading.leftover = tuple(
            path
            for number, path in enumerate(catalogue.paths)
            if not used >> number & 1 and not _is_tied(path, tied) and path.partition(".")[0] not in _OF_THE_SAVE
        )
        if self._strict:
            missing, misfit = ([name for row in told for name in row[kind]] for kind in (0, 1))
            problem = mismatch(
                LoadRecord(
                    tuple(dict.fromkeys(missing)), loading.leftover, tuple(dict.fromkeys(misfit)), (), loading.patterns
                )
            )
            if problem is not None:
                raise problem
        return tuple(self._by_rank(catalogue, offer, kept, stateful))

    def _is_of_a_rank(self, catalogue: Catalogue, name: str) -> bool:
        """Return whether this is the whole state of an object which other ranks had, and each one of its own."""
        _, path = catalogue.split(name)
        path = path if path in self._state.stateful else name.removeprefix(f"rank{self._group.rank}/")
        return path in self._state.stateful and bool(catalogue.owners(path))

    def _by_rank(
        self, catalogue: Catalogue, offer: Offer, kept: Iterable[str], stateful: Mapping[str, bool]
    ) -> Iterable[str]:
        for name in kept:
            yield f"{name}: kept as it is here; the ranks that were saved had each their own"
        if catalogue.world_size == self._group.world_size:
            return
        for path in stateful:
            if path in self._loading.whole_states:
                yield f"{path}: made of the states of {catalogue.world_size} ranks"
                continue
            name, _ = self._state.layouts.resolve(path)
            if name in self._loading.used and name in offer.origin:
                yield f"{path}: as rank {offer.origin[name]} of {catalogue.world_size} ranks left it"
            gone = [rank for rank in catalogue.owners(path) if rank >= self._group.world_size]
            if gone and not (name in offer.origin and offer.rivals.get(name)):
                yield f"{path}: what rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} had is not used"

    # 3 and 4. Chunks.

    def _fetch(
        self,
        choice: Choice,
        catalogue: Catalogue,
        needs: Mapping[str, _Need],
        found: tuple[Mapping[str, Mapping[int, int]], Loaded],
    ) -> bool:
        """Brings every needed chunk to this node; False if some rank found a bad copy. `found`: chunks that were read
        with the heads, and by whom; where everything goes.
        """
        before, loaded = found
        node_of, me, heads = self._facts.topology.node_of, self._group.rank, catalogue.heads
        fetches = {name: fetch_of(choice, heads[name].ref, me, self._facts, need.runs) for name, need in needs.items()}
        stored = {name: need.runs for name, need in needs.items() if fetches[name].source is SourceKind.STORAGE}
        told = [_needs_decoder.decode(data) for data in self._group.gather(_encoder.encode(stored))]
        wanted = {rank: {name: tuple(runs) for name, runs in rows.items()} for rank, rows in enumerate(told)}
        readers = reshard.readers(wanted, node_of, before)
        duty = [
            fetch_of(choice, heads[name].ref, me, self._facts, runs)
            for name, rows in readers.items()
            if (
                runs := reshard.merged((c, c + 1) for c, r in rows.items() if r == me and c not in before.get(name, {}))
            )
        ]
        collectives.together(self._group, lambda: self._fetcher.obtain(choice.version, duty, loaded.faults))
        if not self._vote(loaded.faults):
            return False
        final = [fetch for name, fetch in fetches.items() if name not in stored]
        for name, runs in stored.items():
            final += _from_readers(fetches[name], runs, readers[name], (me, node_of))
        loaded.located = collectives.together(
            self._group, lambda: self._fetcher.obtain(choice.version, final, loaded.faults)
        )
        for item in loaded.located:
            try:
                prove_seal(choice, item)
            except CorruptError as error:
                node = self._node(choice, item.ref.bundle_id)
                loaded.faults.append(Fault(item.ref.bundle_id, node, error.what))
        return self._vote(loaded.faults)

    def _node(self, choice: Choice, bundle_id: str) -> int | None:
        """Return whose copy is to blame."""
        ref = next(ref for ref in choice.bundles if ref.bundle_id == bundle_id)
        return version_choice.cheapest(ref, choice, self._group.rank, self._facts).node

    # 5. Comparison.

    def _compare(self, scratch: _Scratch, offer: Offer) -> tuple[str, ...]:
        """Return what several ranks had of their own under one name, or is tied here, was the same, or it is for no
        other rank.

        Raises:
            MismatchError: parameters or optimizer state differ. On every rank.
        """
        different = scratch.different()
        kept = [path for path in self._state.stateful if self._loading.forget(path, different)]
        told = collectives.gather_json(self._group, sorted(offer.spelt(name) for name in different))
        names = sorted({name for row in told for name in row})
        if names:
            raise MismatchError(
                f"{len(names)} entries were saved several times with other bytes, and this layout has one place for them: "
                f"{', '.join(names[:5])}",
                remedy="restore in the layout that was saved, or make them the same on all ranks first",
            )
        lost = self._lost(scratch)
        return (*(f"{path}: kept as it is here; the ranks that were saved had each their own" for path in kept), *lost)

    def _lost(self, scratch: _Scratch) -> list[str]:
        """Return what ranks had of their own that are no more, and no rank has now.

        Raises:
            MismatchError: strict, and an optimizer stepped it. On every rank.
        """
        told = collectives.gather_json(self._group, scratch.lost())
        lost = sorted({(path, owner) for row in told for path, owner, _ in row})
        trained = [
            f"{path} of rank {owner}" for path, owner in sorted({(p, o) for row in told for p, o, late in row if late})
        ]
        if trained and self._strict:
            raise MismatchError(
                f"{len(trained)} entries that single ranks trained have no rank to go to: {', '.join(trained[:5])}",
                remedy="restore with as many ranks as were saved, or with strict=False, which leaves out what they learnt",
            )
        return [f"{path}: what rank {owner} had is not used, and no other rank had the same" for path, owner in lost]


class _Scratch:
    """The tensors to fill, and memory for what rivals and ranks that are no more had, to be compared."""

    def __init__(self, tensors: Mapping[str, LiveTensor], offer: Offer) -> None:
        self._pairs: list[tuple[str, LiveTensor, LiveTensor]] = []
        self._gone: list[tuple[str, int, LiveTensor, LiveTensor | None]] = []
        self.wanted: list[tuple[LiveTensor, list[Place]]] = []
        for name, live in tensors.items():
            self.wanted.append((live, offer.places[name]))
            for places in offer.rivals[name]:
                other = LiveTensor(live.shard, torch.empty_like(live.local, device="cpu"), late=False)
                self._pairs.append((name, live, other))
                self.wanted.append((other, places))
            for owner, places in offer.gone.get(name, {}).items():
                self._gone.append((name, owner, live, self._like(live, places)))

    def _like(self, live: LiveTensor, places: list[Place]) -> LiveTensor | None:
        """Return memory to read what another rank had; None if that is no tensor of the same kind."""
        first = places[0].entry
        alike = (first.dtype, first.global_shape) == (live.shard.dtype, live.shard.global_shape)
        if not alike or reshard.cover(live.shard.extent, [place.entry.extent for place in places]) is None:
            return None
        other = LiveTensor(live.shard, torch.empty_like(live.local, device="cpu"), late=False)
        self.wanted.append((other, places))
        return other

    def lost(self) -> list[tuple[str, int, bool]]:
        """Return what ranks that are no more had otherwise: path, rank, and whether an optimizer steps it."""
        return [
            (name.partition("/")[2], owner, live.late)
            for name, owner, live, other in self._gone
            if other is None or not _same_bytes(live.local, other.local)
        ]

    def different(self) -> set[str]:
        """Names whose rivals had other bytes."""
        return {name for name, live, other in self._pairs if not _same_bytes(live.local, other.local)}


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(bits_of(tensor.cpu()) for tensor in (one, other)))


def _is_tied(path: str, tied: Iterable[Sequence[str]]) -> bool:
    """Return whether this is a second name of a tensor that is kept under its first, or optimizer state of one."""
    return any(under_other_name(path, other, first) is not None for other, first in tied)


def _needs(wanted: Iterable[tuple[LiveTensor, Sequence[Place]]]) -> dict[str, _Need]:
    """Return which boxes of which entries go where, by bundle, and the chunks in which they lie."""
    found: dict[str, list[Copy]] = defaultdict(list)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for live, places in wanted:
        parts = reshard.cover(live.shard.extent, [place.entry.extent for place in places])
        assert parts is not None, "what is incomplete was not claimed"
        for part in parts:
            place = places[part.piece]
            entry = place.entry
            found[place.bundle_id].append(Copy(entry, part.box, live))
            size = (entry.end - entry.start) // place.entry.extent.num_elements
            spans[place.bundle_id] += [
                (entry.start + first, entry.start + end)
                for first, end in reshard.spans(place.entry.extent, part.box, size, CHUNK_BYTES)
            ]
    return {
        name: _Need(sorted(copies, key=lambda copy: copy.entry.start), reshard.chunk_runs(spans[name], CHUNK_BYTES))
        for name, copies in found.items()
    }


def _from_readers(
    fetch: Fetch, runs: Runs, readers: Mapping[int, int], home: tuple[int, Sequence[int]]
) -> Iterable[Fetch]:
    """Chunks that came from storage, fetched from whoever read them; `home`: this rank, and the node of every rank."""
    me, node_of = home
    by_place: dict[tuple[SourceKind, int | None], list[int]] = defaultdict(list)
    for first, end in runs:
        for chunk in range(first, end):
            reader = readers[chunk]
            if reader == me:
                by_place[SourceKind.STORAGE, None].append(chunk)
            else:
                near = node_of[reader] == node_of[me]
                by_place[SourceKind.NODE if near else SourceKind.PEER, node_of[reader]].append(chunk)
    for (source, node), chunks in by_place.items():
        yield Fetch(fetch.ref, fetch.seal, source, node, reshard.merged((c, c + 1) for c in chunks), file=fetch.file)


def _sources(located: Iterable[Located], catalogue: Catalogue, needs: Mapping[str, _Need]) -> list[Source]:
    return [
        Source(parts[0], catalogue.heads[name].image, tuple(chunks_of(parts, needs[name].runs).items()), whole=False)
        for name, parts in by_bundle(located).items()
    ]
