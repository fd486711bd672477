"""Notes what the workers of a plain data loader draw and count, behind each batch, and gives it to those of a restart.

A worker has random numbers of its own, and loads ahead of the loop. So it writes the state of its generators behind each batch into
memory that it shares with its main process, which reads there what stood behind the last batch that the loop has had of it.
A restart makes workers with the same seed, gives each the state of its forerunner, and hands the next batch to the worker whose
turn it was. Nothing is loaded again.

The generators are those of the process, and what `dataset_generators` finds in the dataset and in the collate function. What else a
worker keeps is not noted.
"""

from __future__ import annotations

import mmap
import multiprocessing
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, MapDataPipe, dataloader
from torch.utils.data._utils import worker

from holdfast.base.handler_errors import forgive, pass_on
from holdfast.checkpoint.entries.rng import process_generators
from holdfast.checkpoint.loader_workers.dataset_generators import Beside, Kept, Look, Number, kept_in
from holdfast.checkpoint.loader_workers.worker_init import WorkerInit
from holdfast.tiers.format import values as value_codec

# Bytes for what a worker says behind one batch; a page costs memory when it is written.
_ROOM = 1 << 16
_HEAD = struct.Struct("<QQQQ")  # how many batches it has loaded; lengths of states and of words; digest of both
# How long a version waits for what workers load ahead, once in an epoch; the next epoch waits for it anyway.
_PATIENCE_S = 5.0
# Batches of a worker behind which its dataset is looked at for generators that were not there before; then at powers of two.
_LOOKED_AT = 4
_SILENT = "random numbers of its workers, which say nothing of them"


def why_not(loader: DataLoader[Any]) -> str:
    """Returns why the workers of a loader cannot say what they draw; empty if they can."""
    iterator = dataloader._MultiProcessingDataLoaderIter
    known = (
        (iterator._reset, "_worker_queue_idx_cycle"),
        (iterator._try_put_index, "_next_index"),
        (worker._worker_loop, "create_fetcher"),
    )
    if any(name not in function.__code__.co_names for function, name in known):
        return "this torch has workers otherwise than is known"
    if not is_forked(loader):
        return "they are not forked"
    if type(loader)._get_iterator is not DataLoader._get_iterator or isinstance(loader.dataset, MapDataPipe):
        return "the loader makes them in a way of its own"
    return "" if getattr(loader, "in_order", True) else "they hand out batches in no order"


def has_no_order(loader: DataLoader[Any]) -> bool:
    """Tell whether the batches of a loader come as its workers finish them, so that a count does not say which were had."""
    return loader.num_workers > 1 and not getattr(loader, "in_order", True)


def is_forked(loader: DataLoader[Any]) -> bool:
    """Tell whether the workers of a loader are children that are forked."""
    context = loader.multiprocessing_context or torch.multiprocessing
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and getattr(loader, "worker_method", "multiprocessing") == "multiprocessing"


class NotedIterator(dataloader._MultiProcessingDataLoaderIter):
    """An iterator over a loader whose workers note what they draw.

    Args:
        loader: of a dataset with items.
        begun: what `state` returned in the run that saved; None: the workers begin as torch has it.
        first: the number of the worker that loads the first batch.
    """

    def __init__(self, loader: DataLoader[Any], begun: dict[str, Any] | None, first: int) -> None:
        count = loader.num_workers
        self._begun: Sequence[bytes] = begun["states"] if begun is not None else [b""] * count
        self._given = begun["seed"] if begun is not None else None
        self._notes = _Notes(count, (loader.prefetch_factor or 1) + 2)
        self._loaded = [0] * count  # by each worker, before the loader was last gone over
        self._first = self._to_pass = first
        self._waited: tuple[int, ...] = ()  # for this once already
        init = loader.worker_init_fn
        with forgive(Exception):  # classes are read here, once for all workers, which say what fails
            kept_in(_things(loader.dataset, loader.collate_fn))
        vars(loader)["worker_init_fn"] = _Noting(init, self._notes, self._begun)
        try:
            super().__init__(loader)
        finally:
            vars(loader)["worker_init_fn"] = init

    @property
    def _base_seed(self) -> int:
        """Return the seed of the workers: the one that was given, though another was drawn."""
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed: int = drawn if self._given is None else self._given

    def state(self) -> dict[str, Any]:
        """Return the seed of the workers, and what each has drawn up to the last batch that was had of it."""
        return self._told([each or (b"", _SILENT) for each in self._said(self._rcvd_idx)])

    def state_behind(self) -> dict[str, Any] | None:
        """Return that of when they have loaded all that they were asked for, as the next epoch finds them; None: they do not get there."""
        asked = (*self._loaded, self._send_idx)
        deadline, pause = time.monotonic() + (_PATIENCE_S if asked != self._waited else 0), 0.0005
        self._waited = asked
        while None in (found := self._said(self._send_idx)):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self._told(list(filter(None, found)))

    def _told(self, found: Sequence[tuple[bytes, str]]) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "states": [states for states, _ in found],
            "words": next(filter(None, (words for _, words in found)), ""),
        }

    def _said(self, num_batches: int) -> list[tuple[bytes, str] | None]:
        """Returns what each worker says of when so many batches were loaded since the loader was last gone over."""
        return [
            self._notes.read(number, loaded) if loaded else (self._begun[number], "")
            for number, loaded in enumerate(self._loaded_of(num_batches))
        ]

    def _loaded_of(self, num_batches: int) -> list[int]:
        """Returns how many batches each worker has loaded when so many were since the loader was last gone over."""
        count = len(self._loaded)
        return [
            before + len(range((number - self._first) % count, num_batches, count))
            for number, before in enumerate(self._loaded)
        ]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._loaded, self._first = self._loaded_of(self._send_idx), 0
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        while self._to_pass:
            next(self._worker_queue_idx_cycle)
            self._to_pass -= 1
        return super()._next_index()  # type: ignore[no-untyped-call]


# The script sees what torch would have made.
NotedIterator.__name__ = NotedIterator.__qualname__ = dataloader._MultiProcessingDataLoaderIter.__name__


class _Notes:
    """Memory that workers share with their main process: for each of them the last few things that it said.

    Args:
        kept: so many of each are kept: a worker loads no further ahead.
    """

    def __init__(self, count: int, kept: int) -> None:
        self._kept = kept
        self._memory = mmap.mmap(-1, count * kept * _ROOM)

    def write(self, number: int, loaded: int, states: bytes, words: str) -> None:
        """Says what a worker has drawn, behind so many batches."""
        said = words.encode()[:1024]
        if len(states) + len(said) + _HEAD.size > _ROOM:
            states, said = b"", b"random numbers of its workers, which are too many to be kept"
        at, body = self._at(number, loaded), states + said
        head = _HEAD.pack(loaded, len(states), len(said), xxhash.xxh3_64_intdigest(body))
        self._memory[at : at + len(head) + len(body)] = head + body

    def read(self, number: int, loaded: int) -> tuple[bytes, str] | None:
        """Returns what a worker had drawn behind so many batches, and what cannot be kept; None if it has not said so."""
        at = self._at(number, loaded)
        found, num_states, num_words, digest = _HEAD.unpack(self._memory[at : at + _HEAD.size])
        if found != loaded:
            return None
        at += _HEAD.size
        body = self._memory[at : at + num_states + num_words]
        if xxhash.xxh3_64_intdigest(body) != digest:
            return None  # it is about to
        return body[:num_states], body[num_states:].decode(errors="replace")

    def _at(self, number: int, loaded: int) -> int:
        return (number * self._kept + loaded % self._kept) * _ROOM


class _Noting(WorkerInit):
    """Has a worker note what it draws.

    Args:
        init: the loader's own; None if it has none.
        begun: what each worker begins with; nothing: with its seed.
    """

    def __init__(self, init: Callable[[int], Any] | None, notes: _Notes, begun: Sequence[bytes]) -> None:
        super().__init__(init)
        self._notes, self._begun = notes, begun
        self._number, self._loaded = 0, 0
        self._kept: Kept = {}
        self._beside: list[Beside] = []
        self._numbers: list[Number] = []
        self._lists: dict[str, Any] = {}
        self._seeded: dict[str, Any] = {}
        self._drawn: tuple[dict[str, Any], bytes] = ({}, b"")
        self._words = ""

    def fetches(self, number: int, dataset: Any, collate_fn: Any, fetcher: Any) -> None:
        """Notes what is drawn for each batch."""
        self._number, fetch = number, fetcher.fetch
        things = _things(dataset, collate_fn)
        if not self._kept:
            self._begins(things)

        def fetched(index: Any) -> Any:
            try:
                return fetch(index)
            finally:
                self._ends(things)

        fetcher.fetch = fetched

    def _begins(self, things: dict[str, Any]) -> None:
        """Takes over what was noted of a forerunner, before the first batch."""
        self._kept = process_generators() | self.found(things)
        self._seeded = self._states()
        begun = self._begun[self._number]
        for path, state in (value_codec.decode(begun) if begun else {}).items():
            try:
                self._kept[path][1](state)
            except Exception as error:  # noqa: BLE001 - it is not there, or is one of another kind
                pass_on(error)
                self._words = f"{path!r}, which was there when they were saved"

    def found(self, things: dict[str, Any]) -> Kept:
        """Returns what can be noted of a dataset and a collate function."""
        try:
            looked = Look(things)
            if not self._kept:
                self._beside, self._numbers, self._words = looked.beside, looked.numbers, looked.words
                self._lists = looked.lists
            changed = (path for path, was in self._lists.items() if looked.lists.get(path, was) != was)
            self._words = self._words or next((f"{path!r}, which a worker changes" for path in changed), "")
            return looked.found
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and the worker has to go on
            pass_on(error)
            self._words = f"what cannot be looked at: {type(error).__name__}: {error}"
            return {}

    def _ends(self, things: dict[str, Any]) -> None:
        """Notes what has been drawn, behind a batch."""
        self._loaded += 1
        try:
            self._look_again(things)
            drawn = {name: state for name, state in self._states().items() if state != self._seeded[name]}
            if drawn != self._drawn[0]:
                self._drawn = (drawn, value_codec.encode(drawn))
        except Exception as error:  # noqa: BLE001 - the batch was loaded, and is handed out
            pass_on(error)
            self._drawn, self._words = ({}, b""), f"what its workers draw: {type(error).__name__}: {error}"
        self._notes.write(self._number, self._loaded, self._drawn[1], self._words)

    def _look_again(self, things: dict[str, Any]) -> None:
        """Finds what changed in a way that nobody can note."""
        if (self._loaded <= _LOOKED_AT or not self._loaded & (self._loaded - 1)) and not self._words:
            for path, (read, _) in self.found(things).items():
                if path not in self._kept or read() != self._kept[path][0]():  # another one took its place
                    self._words = f"{path!r}, which a worker makes"
        for each in self._beside:
            self._leave_out(each)
        if not self._words:
            now = ((path, held.get(name), was) for path, held, name, was in self._numbers)
            changed = (
                path
                for path, number, was in now
                if number is not was and (type(number) is not type(was) or number != was)
            )
            self._words = next((f"{path!r}, which a worker changes" for path in changed), "")

    def _leave_out(self, beside: Beside) -> None:
        """Keeps counts no more beside which something changed that nobody keeps."""
        if (changed := beside.changed()) and (not self._words or beside.counts & self._kept.keys()):
            self._words = f"{beside.path + changed!r}, which a worker changes"
            for path in beside.counts:
                self._kept.pop(path, None)

    def _states(self) -> dict[str, Any]:
        found = {}
        for name, (read, _) in list(self._kept.items()):
            try:
                found[name] = read()
            except Exception as error:  # noqa: BLE001 - it is of another kind now, or cannot be asked in a worker
                pass_on(error)
                del self._kept[name]
                self._words = f"{name!r}, which cannot be read"
        return found


def _things(dataset: Any, collate_fn: Any) -> dict[str, Any]:
    return {"dataset": dataset, "collate_fn": collate_fn}
