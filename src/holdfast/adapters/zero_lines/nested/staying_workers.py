"""Data loaders with `persistent_workers=True`: their workers are made once, and go on from epoch to epoch.

torch draws their seed where the loader is gone over for the first time, and makes them there. A restart in a later epoch makes them
where an item of an outer loop begins: with the same seed, without a number that is drawn in this process and without an item, so that
the next time the loader is gone over is not its first. Then each worker takes over what its forerunner had noted there: its
generators of random numbers, and the plain values of its dataset that had changed. What differs then is seen by a digest.

What workers keep and cannot note is refused by name. So is what this process changes of a dataset, for workers that stay do not see it.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, MapDataPipe, dataloader
from torch.utils.data._utils import worker

from holdfast.adapters.zero_lines.nested.nested_items import Items
from holdfast.adapters.zero_lines.nested.worker_notes import Noting, Slot, around, named, other, tokens
from holdfast.adapters.zero_lines.reach.reach import Reach
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.loader_workers.worker_draws import is_forked
from holdfast.tiers.format import values as value_codec

# Workers load what they were asked for before they note anything.
PATIENCE_S = 60.0
_STAY = "its workers stay"
_PROBE = "holdfast"
# Names that functions of torch have in them, if workers that stay are made and spoken to as they are here.
_PARTS: tuple[tuple[Any, str, frozenset[str]], ...] = (
    (DataLoader, "__iter__", frozenset({"_iterator", "_reset", "_get_iterator"})),
    (DataLoader, "_get_iterator", frozenset({"_MultiProcessingDataLoaderIter"})),
    (
        dataloader._BaseDataLoaderIter,
        "__init__",
        frozenset({"_base_seed", "generator", "_index_sampler", "_sampler_iter"}),
    ),
    (
        dataloader._MultiProcessingDataLoaderIter,
        "__init__",
        frozenset({"worker_init_fn", "_index_queues", "_workers", "_reset"}),
    ),
    (
        dataloader._MultiProcessingDataLoaderIter,
        "_reset",
        frozenset({"_index_queues", "_ResumeIteration", "_get_data"}),
    ),
    (dataloader._MultiProcessingDataLoaderIter, "_next_data", frozenset({"_get_data"})),
    (dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers", frozenset()),
    (worker, "_worker_loop", frozenset({"_ResumeIteration", "create_fetcher", "_DatasetKind"})),
)


class StayingWorkers:
    """Makes the workers of all loaders of a script that stay, and notes what they keep.

    Args:
        reach: looks at what lies in datasets.
        is_on: tells whether anything of the script is, or may be, saved.
    """

    def __init__(self, reach: Reach, is_on: Callable[[], bool]) -> None:
        self._reach, self._is_on = reach, is_on
        self._owner = (os.getpid(), threading.get_ident())
        self._loaders: list[weakref.ref[DataLoader[Any]]] = []
        self._original: Any = None
        self._places: dict[int, tuple[Any, ...]] = {}
        self._moved = b""
        self.reason = ""

    def begin(self) -> None:
        """Makes workers from here on."""
        if not all(map(_is_known, _PARTS)):
            return
        self._original = original = DataLoader._get_iterator

        @functools.wraps(original)
        def _get_iterator(loader: DataLoader[Any]) -> Any:
            if not (
                loader.num_workers and loader.persistent_workers and os.getpid() == self._owner[0] and self._is_on()
            ):
                return original(loader)
            self._knows(loader)
            if not self._is_mine() or self.why_not(loader):
                return original(loader)
            slots = self._slots(loader)
            if not slots:
                return original(loader)
            loader.check_worker_number_rationality()
            return _Iterator(self, loader, slots, None)

        DataLoader._get_iterator = _get_iterator  # type: ignore[method-assign, assignment]

    def end(self, *, unfit: bool = False) -> None:
        """Makes no more; if a version could not be taken up, ends the workers too, for the script runs from its beginning."""
        if self._original is not None:
            DataLoader._get_iterator = self._original  # type: ignore[method-assign]
            self._original = None
        for loader in self._begun() if unfit else ():
            if isinstance(loader._iterator, _Iterator):
                loader._iterator._shutdown_workers()
                loader._iterator = None

    def adopt(self) -> None:
        """This is a child, which goes on in place of its parent."""
        self._owner = (os.getpid(), threading.get_ident())

    def why_not(self, loader: DataLoader[Any]) -> str:
        """Returns why the workers of a loader that stay cannot be taken up; empty if they can."""
        kind = type(loader)
        if self._original is None:
            return f"{_STAY}, and this torch keeps them otherwise than is known"
        if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
            return f"{_STAY}, and {kind.__qualname__} goes over them by code of its own"
        if loader._dataset_kind != dataloader._DatasetKind.Map or isinstance(loader.dataset, MapDataPipe):
            return f"{_STAY}, and each keeps its place in a stream"
        if not is_forked(loader):
            return f"{_STAY}, and are not forked"
        if not getattr(loader, "in_order", True):
            return f"{_STAY}, and hand out batches in no order"
        if loader._iterator is not None and not isinstance(loader._iterator, _Iterator):
            return f"{_STAY}, and were made where nobody looked"
        return ""

    def states(self, found: Mapping[str, DataLoader[Any]], running: Collection[int]) -> bytes:
        """Returns what the workers keep that a restart has to have when an item of an outer loop begins; asks them.

        Encoded once, for each version that is made in the item has it.

        Args:
            found: loaders by path.
            running: `id` of those that loops go over which run now: a restart goes over them again.
        """
        paths = {id(loader): path for path, loader in found.items()}
        begun = [loader for loader in self._begun() if id(loader) not in running]
        if any(id(loader) not in paths for loader in begun):
            del begun
            gc.collect()  # one that a function made, and that waits for it
            begun = [loader for loader in self._begun() if id(loader) not in running]
        asked: dict[str, _Iterator] = {}
        for loader in begun:
            iterator = loader._iterator
            if why := self.why_not(loader):
                self.doubt(f"a DataLoader cannot be taken up: {why}")
            elif id(loader) not in paths:
                self.doubt(
                    f"a DataLoader whose workers stay is made in the loop, or has no name: {_STAY}, and nobody finds it again"
                )
            elif isinstance(iterator, _Iterator):
                iterator.compares(loader)
                asked[paths[id(loader)]] = iterator
        states: dict[str, Any] = {}
        for iterator in asked.values():
            iterator.asks()
        for path, iterator in asked.items():
            notes = iterator.answers()
            self.doubt(
                next((f"a worker of {path!r} stays, and {why}" for note in notes if (why := note["reason"])), "")
            )
            states[path] = {**iterator.made, "workers": [{**note, "reason": ""} for note in notes]}
        return value_codec.encode(states)

    def restore(self, saved: bytes, found: Mapping[str, DataLoader[Any]], running: Collection[int]) -> str:
        """Makes workers as they were; returns why they cannot be, empty if they are.

        Args:
            saved: what `states` returned; empty if no workers were there.
            found: loaders by path, now.
            running: as for `states`.
        """
        states: dict[str, Any] = value_codec.decode(saved) if saved else {}
        asked: dict[str, _Iterator] = {}
        for path, state in states.items():
            loader = found.get(path)
            if loader is None:
                return f"{path!r} was a DataLoader whose workers stay, and is none now"
            if why := self.why_not(loader):
                return f"{path!r} cannot be taken up: {why}"
            if _facts(loader) != state["facts"]:
                return f"{path!r} has other workers than in the run that saved"
            if loader._iterator is None:
                self._knows(loader)
                if not (slots := self._slots(loader)):
                    return self.reason
                loader._iterator = _Iterator(self, loader, slots, state)
            iterator = loader._iterator
            assert isinstance(iterator, _Iterator)
            if iterator.made != {key: state[key] for key in iterator.made}:
                return f"the workers of {path!r} have another seed than in the run that saved"
            if not iterator.asks(state["workers"]):
                return f"what the workers of {path!r} keep cannot be told them"
            asked[path] = iterator
        for path, iterator in asked.items():
            digests = [note.get("digest") for note in iterator.answers()]
            if digests != [note["digest"] for note in states[path]["workers"]]:
                return f"what a worker of {path!r} keeps is not what it was in the run that saved"
        taken = {id(found[path]) for path in states}
        if any(id(loader) not in taken and id(loader) not in running for loader in self._begun()):
            return "a DataLoader whose workers stay has begun that had not in the run that saved"
        return ""

    def inner_begins(self, moved: bytes) -> None:
        """An innermost loop begins: what its steps go over besides is known by that from here on.

        Args:
            moved: what `moved` returned for the version that is taken up; empty if there is none.
        """
        self._places = {id(loader): _place(loader) for loader in self._begun()}
        self._moved = moved

    def moved(self, look: Callable[[], Mapping[str, DataLoader[Any]]], running: Collection[int]) -> bytes:
        """Returns what the workers keep of all loaders, if a step of the innermost loop has gone over another; empty if none has.

        Args:
            look: returns loaders by path.
            running: `id` of those that loops go over which run now.
        """
        places = {id(loader): _place(loader) for loader in self._begun() if id(loader) not in running}
        if any(self._places.get(key) != place for key, place in places.items()):
            self._places |= places
            self._moved = self.states(look(), running)
        return self._moved

    def any_begun(self) -> bool:
        """Tell whether workers that stay are there."""
        return bool(self._begun())

    def why_unsure(self, items: Sequence[Items]) -> str:
        """Returns why no version can be right any more, of what loops go over that run; empty if nothing says so."""
        if any(each.is_taken for each in items) and self._begun():
            self.doubt(
                "a DataLoader's workers stay, and a loop goes over an iterator of the script, which may go over that loader"
            )
        for iterator, begins in (pair for each in items for pair in each.staying):
            if iterator.begins != begins:
                self.doubt("a DataLoader whose workers stay is gone over anew while a loop goes over it")
        return self.reason

    def doubt(self, reason: str) -> None:
        """Notes why no version can be right any more; the first reason counts."""
        self.reason = self.reason or reason

    def seen(self, loader: DataLoader[Any]) -> dict[str, object]:
        """Returns tokens of what this process has of a loader's dataset, and of what holds for it."""
        try:
            look = self._reach.of(named(loader.dataset, loader.collate_fn))
            found = tokens(look)
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the script must run
            self.doubt(f"{_STAY}, and its dataset cannot be looked at: {type(error).__name__}: {error}")
            pass_on(error)
            found = {}
        return {**found, **around()}

    def watches(self) -> bool:
        """Tell whether anything is, or may be, saved."""
        return self._is_mine() and self._is_on()

    def _slots(self, loader: DataLoader[Any]) -> list[Slot]:
        try:
            return [Slot() for _ in range(loader.num_workers)]
        except OSError as error:
            self.doubt(f"{_STAY}, and there is no memory to hear of what they keep: {error}")
            pass_on(error)
            return []

    def _knows(self, loader: DataLoader[Any]) -> None:
        self._loaders = [each for each in self._loaders if each() not in (None, loader)]
        self._loaders.append(weakref.ref(loader))

    def _is_mine(self) -> bool:
        return self._owner == (os.getpid(), threading.get_ident())

    def _begun(self) -> list[DataLoader[Any]]:
        loaders = [each() for each in self._loaders]
        return [each for each in loaders if each is not None and each._iterator is not None]


class _Iterator(dataloader._MultiProcessingDataLoaderIter):
    """The iterator of a loader whose workers stay.

    Args:
        workers: who makes it.
        loader: it goes over this one.
        slots: memory that is shared with each worker.
        saved: what is noted of one in the run that saved; None: workers begin as torch has it.

    Attributes:
        made: how the workers were made: plain values.
        begins: how often the loader was gone over.
    """

    def __init__(
        self,
        workers: StayingWorkers,
        loader: DataLoader[Any],
        slots: Sequence[Slot],
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._keeper, self._ours = weakref.ref(workers), weakref.ref(loader)
        self._slots = slots
        self.begins = 0
        self._asked = (0, 0)
        self._messages = 1  # a worker makes its first fetcher without one
        self._seen = workers.seen(loader)
        modes = (
            list(saved["modes"]) if saved is not None else [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        )
        if torch.is_autocast_enabled("cpu"):
            workers.doubt("the workers of a DataLoader stay, and were made under autocast of the CPU")
        stand_in = _StandIn(loader, Noting(loader.worker_init_fn, self._slots, workers._reach), saved)
        with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
            super().__init__(stand_in)
        self._index_sampler = loader._index_sampler
        self.made = {"seed": self._base_seed, "generator": stand_in.drawn, "modes": modes, "facts": _facts(loader)}

    def loader(self) -> DataLoader[Any] | None:
        """Returns the loader, if it is still there."""
        return self._ours()

    def place(self) -> tuple[int, int]:
        """Returns how often the loader was gone over, and how much was asked for."""
        return self.begins, self._send_idx

    def asks(self, notes: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Asks each worker for a note behind all that it has to load, when it has taken over one; False if that has no room."""
        place = self.place()
        if not notes and place == self._asked:
            return True  # nothing was loaded since
        self._asked = place
        self._messages += 1
        kept: list[Mapping[str, Any] | None] = [
            {key: note[key] for key in ("rows", "gone", "generators")} for note in notes
        ]
        kept = kept or [None] * len(self._slots)
        told = [slot.ask(self._messages, note) for slot, note in zip(self._slots, kept, strict=True)]
        if not all(told):
            return False
        for queue in self._index_queues:
            queue.put(worker._ResumeIteration(_PROBE))  # type: ignore[arg-type]
        return True

    def answers(self) -> list[dict[str, Any]]:
        """Returns the notes; of a worker that says nothing in time, that it does not."""
        deadline = time.monotonic() + PATIENCE_S
        notes = [slot.answered(self._messages) for slot in self._slots]
        pause = 0.0005
        while None in notes and time.monotonic() < deadline and all(each.is_alive() for each in self._workers):
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            notes = [note or slot.answered(self._messages) for note, slot in zip(notes, self._slots, strict=True)]
        return [note or {"reason": "does not say what it keeps"} for note in notes]

    def compares(self, loader: DataLoader[Any]) -> None:
        """Doubts if this process has something else of the dataset than the workers began with: a restart would make others."""
        keeper = self._keeper()
        if keeper is not None and keeper.watches() and not keeper.reason:
            path = other(self._seen, keeper.seen(loader))
            keeper.doubt(
                path and f"{path!r} changes in this process, and workers of a DataLoader that stay do not see it"
            )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.begins += 1
        if not first_iter:
            self._messages += 1
            self.compares(loader)
        super()._reset(loader, first_iter)

    def _get_data(self) -> Any:
        while True:
            found = super()._get_data()  # type: ignore[no-untyped-call]
            if getattr(found[0], "seed", None) != _PROBE:
                return found


# The script sees what torch would have made.
_Iterator.__name__ = _Iterator.__qualname__ = dataloader._MultiProcessingDataLoaderIter.__name__


class _StandIn:
    """A loader, as an iterator sees it while its workers are made.

    Args:
        init: is called in each worker.
        saved: what is noted of the workers in the run that saved; None: they begin as torch has it.

    Attributes:
        drawn: state of the generator that the seed of the workers was drawn from, before it was.
    """

    def __init__(self, loader: DataLoader[Any], init: Noting, saved: Mapping[str, Any] | None) -> None:
        self._loader, self._saved = loader, saved
        self.worker_init_fn = init
        self.drawn = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property
    def _index_sampler(self) -> Any:
        """Nothing is loaded, and no order is drawn, where workers are made again."""
        return self._loader._index_sampler if self._saved is None else ()

    @property
    def generator(self) -> torch.Generator | None:
        """Asked for where the seed is drawn."""
        found: torch.Generator | None = self._loader.generator
        if self._saved is not None:
            found = torch.Generator()
            found.set_state(torch.frombuffer(bytearray(self._saved["generator"]), dtype=torch.uint8))
        self.drawn = (torch.default_generator if found is None else found).get_state().numpy().tobytes()
        return found


def _is_known(part: tuple[Any, str, frozenset[str]]) -> bool:
    thing, name, names = part
    code = getattr(getattr(thing, name, None), "__code__", None)
    return code is not None and names <= {*code.co_names, *code.co_varnames}


def _place(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Returns what is another one when a loader was gone over since."""
    iterator = loader._iterator
    return (iterator.made["seed"], *iterator.place()) if isinstance(iterator, _Iterator) else (id(iterator),)


def _facts(loader: DataLoader[Any]) -> list[int]:
    return [loader.num_workers, loader.prefetch_factor or 0]
