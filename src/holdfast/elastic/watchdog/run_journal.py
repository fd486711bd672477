"""The journal of one launcher: where its ranks stand, now and then, and every incident. JSON lines, for `holdfast report`.

Samples become rarer as the run grows older, so that the file stays small. Must never stop training: a full disk ends
the journal with a warning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.base import private
from holdfast.base.errors import ConfigError
from holdfast.checkpoint.liveness import heartbeat_page
from holdfast.core.elastic.incident import box, from_facts
from holdfast.core.elastic.worker_facts import Phase

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
SAMPLE_S = 1.0
# A journal that earlier runs of the same name made longer is begun anew.
MAX_BYTES = 8 << 20
# The distance of samples grows with the age of the run: some thousands of them, however long it lasts.
SHARE_OF_AGE = 1 / 2000


class Journal:
    """Appends to `directory/journal.jsonl`; times are seconds of the machine's monotonic clock. Each line names its process.

    Args:
        watchdog: the mode of the watchdog that the run has.
    """

    def __init__(self, directory: Path, watchdog: str = "") -> None:
        self._directory, self._watchdog = directory, watchdog
        self._file: IO[str] | None = None
        self._failed = False
        self._began_s = self._sampled_s = time.monotonic()
        self._incidents = 0
        self._closed = False
        self._paths: list[str] = []  # told and not yet written

    def works_on(self, root: str) -> None:
        """A rank saves to this checkpoint path: whoever reads the journal finds the run of that job. Written with the next sample."""
        self._paths.append(root)

    def progress(self, now_s: float, pages: Mapping[int, int], *, always: bool = False) -> None:
        """Write where the ranks (rank -> descriptor of its page) stand, if it is time to say so."""
        if self._file is None and not self._failed and not self._closed:
            begin = {"event": "run", "t": round(self._began_s, 3), "wall": time.time(), "ranks": sorted(pages)}
            self._write({**begin, "watchdog": self._watchdog})
        while self._paths:
            self._write({"event": "works on", "t": round(now_s, 3), "root": self._paths.pop()})
        distance = max(SAMPLE_S, (now_s - self._began_s) * SHARE_OF_AGE)
        if not pages or not (always or now_s - self._sampled_s >= distance):
            return
        self._sampled_s = now_s
        readings = [heartbeat_page.read(fd) for fd in pages.values()]
        step = max(reading.beat.step for reading in readings)
        spent = {phase.name: round(sum(r.spent_s[phase] for r in readings) / len(readings), 4) for phase in Phase}
        used = {name: seconds for name, seconds in spent.items() if seconds}
        self._write({"event": "progress", "t": round(now_s, 3), "step": step, "spent": used})

    def restored(self, step: int) -> None:
        """The ranks go on after so many finished steps, whoever made them."""
        self._write({"event": "restored", "t": round(time.monotonic(), 3), "step": step})

    def incident(self, facts: Mapping[str, Any]) -> None:
        """One failure and its end: a box on standard error and a line here."""
        self._incidents += 1
        record = from_facts({"number": self._incidents, **facts})
        sys.stderr.write(box(record) + "\n")
        sys.stderr.flush()
        self._write({**facts, "event": "incident", "number": record.number, "t": round(time.monotonic(), 3)})

    def report(self, ranks: Sequence[int], reason: str) -> None:
        """Ranks that make no progress, and are left alone."""
        self._write({"event": "report", "t": round(time.monotonic(), 3), "ranks": list(ranks), "reason": reason})

    def close(self, code: int | None = None) -> None:
        """The run is over on this node."""
        if self._closed:
            return
        self._closed = True
        if self._file is not None:
            self._write({"event": "end", "t": round(time.monotonic(), 3), "code": code})
        if self._file is not None:
            with contextlib.suppress(OSError):  # a line that could not be written is tried once more
                self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._failed:
            return
        try:
            if self._file is None:
                private.make(self._directory, below=self._directory.parent)
                fd = private.open_in(self._directory, NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                if os.fstat(fd).st_size > MAX_BYTES:
                    os.ftruncate(fd, 0)
                self._file = os.fdopen(fd, "a", encoding="utf-8")
            self._file.write(json.dumps({**line, "by": os.getpid()}, default=str) + "\n")
            self._file.flush()
        except (OSError, ValueError, ConfigError) as error:
            self._failed = True
            logger.warning("the journal of this run ends here: %s", error)
