"""Keeps what one life of a rank tells of its steps: a file of records that outlives SIGKILL.

    frame = u32 big-endian length | body            (body: msgpack of one record)

A life is one run of the script in one process, or one entry of a resumable function; each has a file of its own, numbered in
the order in which they began. A frame is written by one call, so a kill can cut the last one only, and that is left out.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.base.events import Value
from holdfast.testing.prove.step_comparison import DIGEST_BYTES, Step

_LENGTH = struct.Struct(">I")
_NAME = re.compile(r"rank(\d+)-life(\d+)\.steps")


class Parts(msgspec.Struct, frozen=True, array_like=True, tag="parts"):
    """Names what the digests of an optimizer's next steps are of, in their order."""

    optimizer: int
    label: str
    names: list[str]


class Made(msgspec.Struct, frozen=True, array_like=True, tag="made"):
    """Holds one step of an optimizer: 8 bytes for each part, and 8 of the generators of random numbers."""

    optimizer: int
    digests: bytes
    random: bytes


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """An event of holdfast in this process."""

    name: str
    fields: dict[str, Value]


Record: TypeAlias = Parts | Made | Said


@dataclass(slots=True)
class Life:
    """One life of a rank: its steps in order, and the events."""

    steps: list[Step] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)


class StepLog:
    """The file of one life, which is begun.

    Args:
        rank: whose life it is.

    Attributes:
        life: how many lives of this rank were before.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.life = 0
        while True:
            try:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(directory / f"rank{rank}-life{self.life}.steps", flags, 0o600)
                return
            except FileExistsError:
                self.life += 1

    def write(self, record: Record) -> None:
        body = msgspec.msgpack.encode(record)
        os.write(self._fd, _LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Writes no more."""
        os.close(self._fd)


def read_lives(directory: Path) -> dict[int, list[Life]]:
    """Returns the lives of every rank of a run, in the order in which they began."""
    found: dict[tuple[int, int], Life] = {}
    for path in directory.iterdir():
        if name := _NAME.fullmatch(path.name):
            found[int(name[1]), int(name[2])] = _read(path.read_bytes())
    lives: dict[int, list[Life]] = {}
    for rank, _ in sorted(found):
        lives.setdefault(rank, []).append(found[rank, _])
    return lives


def _read(data: bytes) -> Life:
    life = Life()
    parts: dict[int, tuple[str, tuple[str, ...]]] = {}
    for record in _records(data):
        if isinstance(record, Parts):
            parts[record.optimizer] = (record.label, tuple(record.names))
        elif isinstance(record, Made):
            label, names = parts[record.optimizer]
            life.steps.append(Step(label, names, record.digests, record.random))
            assert len(record.digests) == DIGEST_BYTES * len(names)
        else:
            life.said.append(record)
    return life


def _records(data: bytes) -> Iterator[Record]:
    decoder = msgspec.msgpack.Decoder(Record)
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield decoder.decode(data[at : at + length])
        at += length
