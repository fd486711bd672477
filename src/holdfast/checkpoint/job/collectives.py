"""Ranks agree before they train: bytes gathered from all, one vote, and an error that everybody raises or nobody.

Uses the default process group when there is one, with `all_gather` and `broadcast` of byte tensors: nothing is pickled. One rank alone
needs no group. Restore and construction call this, and saves where there is no level in memory; other saves need no collective (decision 10).

Ranks that save straight to storage meet in the middle of training, where a signal's handler of the script may take one of them out
between two collectives. It gives a last word, and all leave (`Meeting`). Within a collective no handler runs.

A group without a backend for the host agrees through its device. An aborted collective leaves there what happens to be in
memory, and zeros would say that no rank failed. So what was read counts only if the job had not broken off by then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed as dist

from holdfast.base.errors import DeviceError, HoldfastError, Interrupted, LevelNotReached, UsageError, kind_of
from holdfast.base.handler_errors import handlers_later, pass_on
from holdfast.checkpoint.device.accelerator import device_of
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.core.versions.late_copy_rules import counts

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The step of a meeting behind all others.
AT_END = sys.maxsize


class Ranks(Protocol):
    """All ranks of the job. Every rank MUST make the same calls in the same order."""

    rank: int
    world_size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, by rank."""

    def give(self, data: bytes) -> bytes:
        """Return what rank 0 gave: what it costs a rank does not grow with their number."""

    def send(self, data: torch.Tensor, to: int) -> None:
        """Bytes in host memory to one other rank, which MUST receive as many."""

    def receive(self, num_bytes: int, origin: int) -> torch.Tensor:
        """Bytes from one other rank, in host memory."""


class Alone:
    """A job of one rank."""

    rank = 0
    world_size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def give(self, data: bytes) -> bytes:
        return data

    def send(self, data: torch.Tensor, to: int) -> None:  # noqa: ARG002 - there is nobody
        raise AssertionError("a job of one rank has nobody to send to")

    def receive(self, num_bytes: int, origin: int) -> torch.Tensor:  # noqa: ARG002 - there is nobody
        raise AssertionError("a job of one rank has nobody to receive from")


class Group:
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = _device()

    def gather(self, data: bytes) -> list[bytes]:
        """Two collectives: lengths, then bytes padded to the longest."""
        mine = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(lengths, mine)
        sizes = _read(torch.cat(lengths)).tolist()
        padded = self._padded(data, max(sizes))
        rows = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(rows, padded)
        return [_read(row[:size]).numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def give(self, data: bytes) -> bytes:
        """Two collectives: the length that rank 0 gives, then its bytes."""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(length, 0)
        size = int(_read(length))
        given = self._padded(data if self.rank == 0 else b"", size)
        dist.broadcast(given, 0)
        return _read(given[:size]).numpy().tobytes()

    def _padded(self, data: bytes, size: int) -> torch.Tensor:
        """Return bytes on the device of the group, with zeros behind them: a collective takes none that is empty."""
        padded = torch.zeros(max(1, size), dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return padded.to(self._device)

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send by way of the device of the group."""
        dist.send(data.to(self._device), to)

    def receive(self, num_bytes: int, origin: int) -> torch.Tensor:
        """Receive by way of the device of the group."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        dist.recv(data, origin)
        return _read(data)


class LeftBehind(LevelNotReached):
    """Other ranks have left this meeting, and wait in a later one.

    Attributes:
        step: that of the later one, if it is of the same checkpoints; else -1.
    """

    def __init__(self, where: str, step: int) -> None:
        super().__init__(f"another rank left it before its end, and waits {where}")
        self.step = step


class Meeting:
    """All ranks at one place of a training, where they gather words a known number of times.

    Who leaves before its end, because a signal's handler took it out, gives a last word in the next gather, and all others leave as
    well. Where it could not, it is met again: each word says where its rank is. Who is ahead waits there for the others, who leave
    what they wait in.

    Args:
        step: of the training; AT_END behind all.
        part: of the step: what the ranks meet for, after one another.
        root: of the checkpoints that they meet for.
        num_words: how often they gather there.
    """

    def __init__(self, group: Ranks, step: int, part: int, root: str, *, num_words: int = 1) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._place = [step, part, root]
        self._number = 0
        self._num_words = num_words
        self.is_over = False  # all ranks leave, and know so

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, by rank.

        Raises:
            LeftBehind: another rank is at a later place. LevelNotReached: one has left.
        """
        if self.world_size == 1:
            return [data]
        while True:
            with handlers_later():  # what was gathered counts, or it was not
                found = self._turn(data)
            if found is not None:
                return found

    def _turn(self, data: bytes) -> list[bytes] | None:
        """Gathers once; returns None where another rank has to come here first."""
        mine = [*self._place, self._number]
        told = [word.partition(b"\n") for word in self._say(mine, data, leaves=False)]
        rows = [json.loads(head) for head, _, _ in told]
        newest = max(place for place, _ in rows)
        if mine != newest:
            self.is_over = True
            where = f"at step {newest[0]}" if newest[0] != AT_END else "at its end"
            raise LeftBehind(where, newest[0] if newest[2] == self._place[2] else -1)
        if left := [rank for rank, (place, leaves) in enumerate(rows) if leaves and place == mine]:
            self.is_over = True
            raise LevelNotReached(f"rank {left[0]} left it, which a signal's handler took out")
        if any(place != mine for place, _ in rows):
            return None
        self._number += 1
        return [given for _, _, given in told]

    def leave(self, error: BaseException) -> None:
        """Tells the others that this rank does not go on, for this error, if they may wait for it."""
        if self.world_size == 1 or self.is_over or self._number >= self._num_words or isinstance(error, Interrupted):
            return
        self.is_over = True
        try:
            with handlers_later():
                self._say([*self._place, self._number], b"", leaves=True)
        except RuntimeError as fault:  # of torch: they are gone
            pass_on(fault)
            logger.info("the other ranks were not told that this one left a meeting: %s", fault)

    def give(self, data: bytes) -> bytes:  # noqa: ARG002 - of no rank
        raise AssertionError("the ranks of a meeting only gather: who leaves it is heard in no broadcast")

    def _say(self, place: list[Any], data: bytes, *, leaves: bool) -> list[bytes]:
        return self._group.gather(json.dumps([place, leaves]).encode() + b"\n" + data)

    def send(self, data: torch.Tensor, to: int) -> None:
        self._group.send(data, to)

    def receive(self, num_bytes: int, origin: int) -> torch.Tensor:
        return self._group.receive(num_bytes, origin)


def _read(received: torch.Tensor) -> torch.Tensor:
    """Return what a collective left, in host memory.

    Raises:
        Interrupted: the job broke off before it was read.
    """
    data = received.cpu()
    if not counts(broke_off=bool(open_checkpointers.broken.reason), passed_by_then=False):
        raise Interrupted(open_checkpointers.broken.reason)
    return data


def ranks() -> Ranks:
    """The ranks of this job.

    Raises:
        UsageError: the launcher started several ranks, but there is no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return Group() if dist.get_world_size() > 1 else Alone()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise UsageError(
            f"the launcher started {launched} ranks, but there is no process group",
            remedy="call torch.distributed.init_process_group() before restore()",
        )
    return Alone()


def together(group: Ranks, work: Callable[[], T]) -> T:
    """Does `work` on every rank; if it fails on one, every rank raises that class of error.

    Every rank learns of the fault before anybody waits in a later collective for the one that has it.

    Raises:
        HoldfastError: of the class that the lowest failing rank met. What a device raised becomes DeviceError, anything else UsageError.
    """
    result, fault = _attempt(work)
    told = group.gather(b"" if fault is None else _describe(fault))
    failed = [rank for rank, text in enumerate(told) if text]
    if failed and isinstance(group, Meeting):
        group.is_over = True
    if fault is not None and not isinstance(fault, HoldfastError):  # the script is to end, or to leave what it is in
        try:
            raise fault
        finally:
            fault = None  # its frames would hold it, and with it what they have open
    if fault is not None:
        pass_on(fault)
    if not failed:
        return result  # type: ignore[return-value]  # no fault, so there is a result
    first = failed[0]
    if fault is not None and (first == group.rank or group.world_size == 1):
        raise fault
    raise _retell(told[first], first, len(failed)) from fault


def gather_json(group: Ranks, value: Any) -> list[Any]:
    """A plain JSON value of every rank."""
    return [json.loads(data) for data in group.gather(json.dumps(value).encode())]


def share(group: Ranks, make: Callable[[], bytes]) -> bytes:
    """Rank 0 makes bytes, all ranks get them; a fault of rank 0 is raised by all."""
    made = together(group, lambda: make() if group.rank == 0 else b"")
    return group.give(made)


def same(group: Ranks, what: str, value: Any) -> None:
    """All ranks give the same plain value.

    Raises:
        UsageError: they do not; on every rank.
    """
    told = gather_json(group, value)
    if told.count(told[0]) != len(told):
        different = next(rank for rank, other in enumerate(told) if other != told[0])
        raise UsageError(
            f"rank 0 has {what}={told[0]}, rank {different} has {told[different]}", remedy="give it alike on all ranks"
        )


def unanimous(group: Ranks, vote: bool) -> bool:
    """Return whether every rank votes yes."""
    return all(data == b"1" for data in group.gather(b"1" if vote else b"0"))


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except HoldfastError as error:
        return None, error
    except Interrupted:  # all ranks leave
        raise
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of any fault, else they wait for ever
        fault = _fault_of(error)
        fault.__cause__ = error
        return None, fault
    except BaseException as error:  # noqa: BLE001 - of these too
        return None, error


def _fault_of(error: BaseException) -> HoldfastError:
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"a device has no memory left for the state: {error}",
            remedy="free memory of the device before restore() (`nvidia-smi` or its like shows who holds it); batches and "
            "activations come after it; nothing that was saved is harmed",
        )
    if isinstance(error, torch.AcceleratorError):
        return DeviceError(f"a device failed: {error}")
    return UsageError(f"{type(error).__name__}: {error}".removesuffix(": "))


def _describe(fault: BaseException) -> bytes:
    fault = fault if isinstance(fault, HoldfastError) else _fault_of(fault)
    row = (type(fault).__name__, fault.what, fault.where, fault.remedy)
    return json.dumps([text[:4000] for text in row]).encode()


def _retell(text: bytes, rank: int, count: int) -> HoldfastError:
    name, what, where, remedy = json.loads(text)
    more = f" (and {count - 1} more ranks)" if count > 1 else ""
    return kind_of(name)(f"rank {rank}{more}: {what}", where=where, remedy=remedy)


def _device() -> torch.device:
    """Return where collectives of the default group can be run: on the host, or on the current device of the group's
    kind.
    """
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config()).split(",")]
    return torch.device("cpu") if "cpu" in kinds else device_of(kinds[0]).current()
