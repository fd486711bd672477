"""A timeline on disk: what one process did and when, one JSON line per span; for `holdfast trace`.

A handler of `base.events`: every event that says how long it took (`seconds`) becomes a span that ended when it was
emitted. Whoever knows spans that are no events adds them. The first line of a file says whose track it is and what the
machine's clocks showed, so that files of several machines can be laid side by side.

Must never stop what it watches: a file that cannot be written ends the trace with one warning; a full one as well.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from holdfast.base.events import Event
from holdfast.base.handler_errors import pass_on

logger = logging.getLogger(__name__)

SUFFIX = ".trace.jsonl"
# A trace is for looking at minutes, not for keeping: some hundred thousand spans.
MAX_BYTES = 32 << 20
# Lines are gathered and written together, so that a span costs a microsecond and not a system call.
BATCH_LINES = 512
# And at least so often, as long as something happens: what a killed process did last is what one wants to see.
FLUSH_S = 1.0
# The directory may be one that others write to: no link is followed, and a pipe under our name makes nobody wait.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TraceFile:
    """The track of one process in `directory`.

    Args:
        directory: made if it is missing; private to the user.
        track: as people read it: `rank 3`, `keeper node-a`.
    """

    def __init__(self, directory: Path, track: str) -> None:
        self.path = directory / f"{track.replace(' ', '-')}-{os.getpid()}{SUFFIX}"
        self._lines: list[str] = [
            json.dumps({"track": track, "pid": os.getpid(), "monotonic": time.monotonic(), "wall": time.time()})
        ]
        self._lock = threading.Lock()
        self._left = MAX_BYTES
        self._written_s = 0.0  # so the first span writes the head
        self._failed = False

    def __call__(self, event: Event) -> None:
        """An event; of those with `seconds` the span is kept, of the others the moment."""
        fields = dict(event.fields)
        seconds = fields.pop("seconds", 0.0)
        length = float(seconds) if isinstance(seconds, int | float) else 0.0
        self.span(event.name, event.at_s - length, event.at_s, fields)

    def span(self, what: str, start: float, end: float, fields: Mapping[str, object] | None = None) -> None:
        """Something from `start` to `end`, in monotonic seconds."""
        row: list[object] = [what, round(start, 6), round(end, 6)]
        if fields:
            row.append(fields)
        with self._lock:
            self._lines.append(json.dumps(row))
            if len(self._lines) >= BATCH_LINES or time.monotonic() - self._written_s >= FLUSH_S:
                self._write()

    def close(self) -> None:
        """Writes what is left."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines)
        self._lines.clear()
        self._written_s = time.monotonic()
        if self._failed:
            return
        if len(text) > self._left:
            self._failed = True
            logger.warning("the trace %s is full; what comes now is not in it", self.path)
            return
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(self.path, _FLAGS, 0o600), "a") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
                    raise OSError(errno.EPERM, "the file is not ours alone")
                file.write(text)
        except OSError as error:
            pass_on(error)
            self._failed = True
            logger.warning("no trace: %s: %s", self.path, error.strerror)
        self._left -= len(text)
