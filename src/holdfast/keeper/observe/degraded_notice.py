"""A note beside the keeper's socket, for who looks: the ranks of this node go on without the level in memory, and why.

A keeper that is not there cannot say it. The note names the process that wrote it and means nothing without it. Written
by the first rank of a node (`checkpoint.save.storage_saver`), read by `holdfast status`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.base import private
from holdfast.base.errors import ConfigError
from holdfast.base.handler_errors import forgive
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.tiers.format.strict_json import parse_loose
from holdfast.tiers.memory.processes import has_ended, start_time

MAX_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class DegradedNotice:
    """The ranks of this node save to storage alone.

    Attributes:
        pid: the process that said so; it lives.
        durable: the newest version that it made durable; empty if there is none yet.
    """

    place: RuntimePaths
    pid: int
    root: str
    reason: str
    durable: str


def post(place: RuntimePaths, *, root: str, reason: str, durable: str = "") -> None:
    """Writes the note, or writes it anew.

    Raises:
        ConfigError: the runtime directory is unfit. OSError: it cannot be written.
    """
    place.make()
    pid = os.getpid()
    text = json.dumps({"pid": pid, "since": start_time(pid), "root": root, "reason": reason, "durable": durable})
    fresh = place.notice.with_suffix(f".{pid}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    fresh.rename(place.notice)


def withdraw(place: RuntimePaths) -> None:
    """Removes the note, and directories that nothing else is in. Of another user's directory nothing is removed."""
    with forgive(ConfigError, OSError):  # nothing is there, or a keeper, or another job
        private.prove(place.runtime)
        with forgive(FileNotFoundError):
            place.notice.unlink()
        for directory in (place.directory, place.directory.parent, place.runtime):
            directory.rmdir()


def posted(runtime: Path) -> Iterator[DegradedNotice]:
    """The notes beneath a runtime directory whose writers live."""
    for file in sorted(runtime.glob("*/*/durable-only.json")):
        told = _read(RuntimePaths(runtime, file.parent.parent.name, file.parent.name))
        if told is not None:
            yield told


def sweep(place: RuntimePaths) -> None:
    """Removes the note of a process that was killed."""
    if _read(place) is None:
        place.notice.unlink(missing_ok=True)


def _read(place: RuntimePaths) -> DegradedNotice | None:
    """The note, if whoever wrote it lives."""
    with forgive(OSError, ValueError, KeyError, TypeError):
        with place.notice.open("rb") as stream:
            said = parse_loose(stream.read(MAX_BYTES))
        if isinstance(said["pid"], int) and not has_ended(said["pid"], said["since"]):
            return DegradedNotice(place, said["pid"], str(said["root"]), str(said["reason"]), str(said["durable"]))
    return None
