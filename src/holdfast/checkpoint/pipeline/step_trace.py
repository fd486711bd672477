"""Writes what one rank did, step by step, into the timeline of `base.trace`; only if a directory for it is set.

Spans that are events of holdfast (saves, fences, restores) come by themselves; steps and what a pipeline saw of itself
are added here, at the end of a step.
"""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.base.events import Events
from holdfast.base.trace import TraceFile
from holdfast.checkpoint.pipeline.bubbles import Bubbles


class Recorder:
    """The track of one rank, for as long as its process lives; without a directory it does nothing."""

    def __init__(self, directory: str, rank: int, events: Events) -> None:
        self._file = TraceFile(Path(directory), f"rank {rank}") if directory else None
        self._bubbles: Bubbles | None = None
        self._began_s = time.monotonic()
        if self._file is not None:
            events.subscribe(self._file)

    def watch(self, bubbles: Bubbles | None) -> None:
        """This is what sees the pipeline from now on; None: nothing does."""
        if self._file is not None:
            self._drain(self._file)
        self._bubbles = bubbles

    def step(self, step: int) -> None:
        """`step` is over; the next one begins."""
        now = time.monotonic()
        if self._file is not None:
            self._file.span("step", self._began_s, now, {"step": step})
            self._drain(self._file)
        self._began_s = now

    def close(self) -> None:
        """Writes what is left."""
        if self._file is not None:
            self._drain(self._file)
            self._file.close()

    def _drain(self, file: TraceFile) -> None:
        spans = self._bubbles.spans if self._bubbles is not None else None
        while spans:
            seen = spans.popleft()
            file.span(seen.what, seen.start, seen.end)
