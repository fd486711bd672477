"""Makes the first steps of a loop twice and compares: in this process, and in a child as a restart would make them.

The child is forked before any step, where a script that was started again would go on from a version, so it is what such a script is at
that place. It waits. Behind the `BEFORE`-th optimizer step it gets what a version of that step holds, takes it over as a restore does, and runs
the script's own loop from there. Both tell digests of everything that a version holds behind each of the next `COMPARED` steps. What
differs shows state that no version has.

The steps of this process are those of the script, made once. The child must not be noticed: it is shut in (`sandbox.py`) before it
runs a line, so a script that writes, sends or starts something in its first steps ends it, and nothing is compared. Nor is it in a job of several
ranks or on an accelerator (neither survives a fork), in one with several threads of computation (they do not either, and one sums otherwise),
or of much state.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import msgspec
import torch
import xxhash
from torch import distributed as dist

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.entries.sharding import local_of
from holdfast.checkpoint.entries.types import Group, SavedTensor
from holdfast.checkpoint.liveness import heartbeat
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.usage import sandbox
from holdfast.core.model import Shard
from holdfast.tiers.format import values as value_codec

logger = logging.getLogger(__name__)

# Optimizer steps before the version that the child goes on from, and steps that are compared.
BEFORE, COMPARED = 2, 2
# More state is not copied for this.
MAX_BYTES = 256 << 20
# How long the child is waited for: so often the time that the compared steps took here, and so many seconds.
TIMES, LIMIT_S = 1.0, 5.0
_LENGTH = struct.Struct("<Q")
# What a child tells that could not take the version up: no name of anything.
_REFUSED = ""


class _Version(msgspec.Struct, frozen=True):
    number: int
    shards: list[Shard]
    data: list[bytes]
    values: list[tuple[Group, bytes]]


class SelfCheck:
    """One comparison.

    Args:
        state: makes, or finds, the state of what is saved.
        clock: whether the script reads a clock: numbers that differ are no sign then.

    Attributes:
        state: the state of what is saved, asked for when it is needed first.
        reason: why nothing is compared; empty as long as that is not so.
        pending: whether it is not known yet what came of it.
        child: whether this is the child.
    """

    def __init__(self, state: Callable[[], State], *, clock: bool) -> None:
        self.state = functools.cache(state)
        self._clock = clock
        self.reason = ""
        self._made = 0
        self._digests: list[dict[str, str]] = []
        self._began_s = 0.0
        self._pid = 0
        self._version: _Version | None = None
        self._line: socket.socket | None = None
        self.child = False
        self.pending = False

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Forks the child, if that can be done with these objects."""
        if reason := why_not(objects):
            self._give_up(reason)
            return
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that other threads are there: the child uses none of them
            self._pid = os.fork()
        if self._pid:
            theirs.close()
            self._line, self.pending = ours, True
            return
        self.child = True
        try:
            heartbeat.forget()
            ours.close()
            sandbox.shut_in(keep=theirs.fileno(), parent=parent)
        except BaseException:  # noqa: BLE001 - a second script must never come out of here
            os._exit(1)
        self._line = theirs

    def taken(self) -> int:
        """Waits for the version, in the child, and takes it over; returns the step that it is behind."""
        assert self._line is not None
        descriptor = self._line.fileno()
        version = msgspec.msgpack.decode(_receive(lambda size: os.read(descriptor, size)), type=_Version)
        state = self.state()
        state.trained()
        self._take(state, version)
        self._version = version
        return version.number

    def take_again(self) -> None:
        """Takes the version over once more, in the child: what the script did meanwhile is undone."""
        assert self._version is not None
        self._take(self.state(), self._version)

    def refused(self, reason: str) -> NoReturn:
        """Ends the child, and tells why it could not take the version up."""
        self._digests = [{_REFUSED: reason}]
        self.tell()

    def told(self, beside: Mapping[str, str]) -> None:
        """Notes a step of the child in which an optimizer stepped; the process ends with the last that is compared."""
        self._digests.append({**beside, **self._digest(self.state())})
        if len(self._digests) == COMPARED:
            self.tell()

    def tell(self) -> NoReturn:
        """Ends the child, and tells what its steps were."""
        try:
            assert self._line is not None
            data = memoryview(_framed(msgspec.msgpack.encode(self._digests)))
            while data:
                data = data[os.write(self._line.fileno(), data) :]
        finally:
            os._exit(0)

    def made(self, number: int, beside: Mapping[str, str]) -> str:
        """Tells of an optimizer's step of the script, behind step `number`; returns the name of what differs; empty if nothing does.

        Waits for the child behind the last step that is compared, but not for long.

        Args:
            number: of the step.
            beside: more that is compared, by name: digests of what is in no version.
        """
        if not self.pending:
            return ""
        self._made += 1
        try:
            if self._made == BEFORE:
                self._show(number)
            elif self._made > BEFORE:
                self._digests.append({**beside, **self._digest(self.state())})
            if len(self._digests) == COMPARED:
                return self._judge()
        except Exception as error:  # noqa: BLE001 - objects of other people are asked, and training must go on
            pass_on(error)
            self._give_up(f"{type(error).__name__}: {error}")
            self.end()
        return ""

    def end(self) -> None:
        """Ends the child; calling it again does nothing."""
        self.pending = False
        line, self._line = self._line, None
        if line is not None and not self.child:
            line.close()
            with contextlib.suppress(
                ProcessLookupError, ChildProcessError
            ):  # the script may take up children by itself
                if os.waitpid(self._pid, os.WNOHANG)[0] == 0:  # else its number may be another process's by now
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        logger.info("the first steps are not rehearsed: %s", reason)

    def _show(self, number: int) -> None:
        gathered = self.state().gather()
        assert self._line is not None
        version = _Version(
            number,
            [live.shard for live in gathered.tensors.values()],
            [_bytes(live.local) for live in gathered.tensors.values()],
            [(group, value_codec.encode(dict(values))) for group, values in gathered.values.items()],
        )
        self._line.settimeout(LIMIT_S)
        self._line.sendall(_framed(msgspec.msgpack.encode(version)))
        self._began_s = time.monotonic()

    def _take(self, state: State, version: _Version) -> None:
        saved = {s.name: SavedTensor(s.dtype, s.global_shape, (s.extent,)) for s in version.shards}
        values = {group: value_codec.decode(data) for group, data in version.values}
        targets = state.create(state.fitting(saved, values))
        data = dict(zip((s.name for s in version.shards), version.data, strict=True))
        with torch.no_grad():
            for name, live in targets.items():
                if data[name]:
                    raw = torch.frombuffer(bytearray(data[name]), dtype=torch.uint8)
                    live.local.copy_(raw.view(live.local.dtype).view(live.local.shape))
        state.apply(values, targets)

    def _digest(self, state: State) -> dict[str, str]:
        gathered = state.gather()
        found = {name: xxhash.xxh3_128_hexdigest(_bytes(live.local)) for name, live in gathered.tensors.items()}
        for values in gathered.values.values():
            for path, value in values.items():
                for name, part in _parts(str(path), value):
                    judged = _without_numbers(part) if self._clock else part
                    found[name] = xxhash.xxh3_128_hexdigest(value_codec.encode(judged))
        return found

    def _judge(self) -> str:
        assert self._line is not None
        self._line.settimeout(LIMIT_S + TIMES * (time.monotonic() - self._began_s))
        try:
            data = _receive(self._line.recv)
        except OSError as error:  # too late, or cut off
            pass_on(error)
            data = b""
        self.end()
        if not data:
            self._give_up("the child ended, or took too long: it was not allowed something")
            return ""
        told = msgspec.msgpack.decode(data, type=list[dict[str, str]])
        if told and _REFUSED in told[0]:
            return told[0][_REFUSED]
        for here, there in zip(self._digests, told, strict=False):
            different = [name for name in (*here, *there) if here.get(name) != there.get(name)]
            if different:
                return different[0]
        logger.info("%d steps were rehearsed as a restart would make them, and were the same", len(told))
        return ""


def why_not(objects: Mapping[str, Any]) -> str:
    """Returns what keeps a child from making steps; empty if nothing does."""
    if not sandbox.available():
        return "a process cannot be shut in here"
    if dist.is_available() and dist.is_initialized():
        return "there is a process group, which does not survive a fork"
    on_device = any(local_of(tensor).device.type != "cpu" for tensor in _tensors(objects))
    if on_device or accelerator.in_use() is not None:
        return "an accelerator is used, which does not survive a fork"
    if torch.get_num_threads() > 1:
        return "torch computes with several threads, which do not survive a fork"
    if sum(t.numel() * t.element_size() for t in _tensors(objects)) > MAX_BYTES:
        return f"more than {MAX_BYTES >> 20} MiB of tensors"
    return "memory is shared with others" if sandbox.shares_memory() else ""


def _tensors(objects: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in objects.values():
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            if isinstance(part, torch.nn.Module):
                yield from (*part.parameters(), *part.buffers())
            elif isinstance(part, torch.Tensor):
                yield part


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields a value by its parts, so that one that differs has a name: what is carried by its own. Of gradients, which ones live; not
    what is known of how the script clears them, which grows with every step.
    """
    if isinstance(value, dict) and {"range", "rows", "carried"} <= value.keys():
        yield from ((str(row[0]), row[3]) for row in value["rows"])
        yield from ((str(name), part) for name, part in value["carried"].items())
    elif isinstance(value, dict) and {"of", "gradients", "zero"} <= value.keys():
        yield from ((f"{path}.{number}", bool(part)) for number, part in value["gradients"].items())
    else:
        yield path, value


def _without_numbers(tree: Any) -> Any:
    """Returns a value without fractions, which may be times."""
    if isinstance(tree, float):
        return 0.0
    if isinstance(tree, dict):
        return {key: _without_numbers(part) for key, part in tree.items()}
    return type(tree)(map(_without_numbers, tree)) if type(tree) in (list, tuple) else tree


def _bytes(local: torch.Tensor) -> bytes:
    data = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return data.numpy().tobytes()


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _receive(read: Callable[[int], bytes]) -> bytes:
    """Returns a whole message; nothing if the other side ended before."""
    size = _exactly(read, _LENGTH.size)
    return _exactly(read, _LENGTH.unpack(size)[0]) if size else b""


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        part = read(min(1 << 20, length - len(found)))
        if not part:
            return b""
        found += part
    return bytes(found)
