"""Tells when a script reads its standard input, if what it reads is gone then: from a pipe, a socket or a file.

A second run would find the rest of it, or nothing. A script that does its work for each line would end well without having done it.
So the agent is told of the first byte, and starts no further run (`elastic.launch.agent`). A terminal, /dev/null and an
empty input are left alone. What does not go through `sys.stdin` (`open(0)`, `os.read`, programs that the script starts) is not seen.

Used before the script begins.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable


class _Noted(io.FileIO):
    """Reads the standard input, and says once that something came.

    Args:
        say: called with the first byte, in the thread that reads.
    """

    def __init__(self, say: Callable[[], object]) -> None:
        super().__init__(0, "rb", closefd=False)
        self.name = "<stdin>"
        self._say: Callable[[], object] | None = say

    def _note(self, came: object) -> None:
        say, self._say = (self._say, None) if came else (None, self._say)
        if say is not None:
            say()

    def readinto(self, buffer: bytearray | memoryview) -> int | None:  # type: ignore[override]  # as `io` calls it
        """Fill a buffer; return how many bytes came."""
        count = super().readinto(buffer)
        self._note(count)
        return count

    def readall(self) -> bytes | None:  # type: ignore[override, unused-ignore]  # None: nothing now, of one that does not block
        """Return all that is left."""
        came = super().readall()
        self._note(came)
        return came

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override, unused-ignore]
        """Return so many bytes at most."""
        came = super().read(-1 if size is None else size)
        self._note(came)
        return came


def watch(say: Callable[[], object]) -> None:
    """Call `say` at the first byte that is read from `sys.stdin`, if it can be read only once."""
    given = sys.stdin
    if given is None or not _is_spent_by_reading():
        return
    reader = io.BufferedReader(_Noted(say))  # type: ignore[type-var]
    sys.stdin = io.TextIOWrapper(reader, encoding=given.encoding, errors=given.errors, newline="\n")
    sys.stdin.mode = "r"  # type: ignore[misc, attr-defined, unused-ignore]
    sys.__stdin__ = sys.stdin  # type: ignore[misc]


def _is_spent_by_reading() -> bool:
    try:
        kind = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or stat.S_ISREG(kind)
