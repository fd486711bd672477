"""XORs what several sources bring into one buffer, several of them at once.

The order in which parts come does not change the result, so no source waits for another: a part is XORed where it belongs as soon
as it is read. The first error ends all sources, each behind the part that it reads; when a call returns or raises, nothing
writes to its buffer. Used to make parity (`keeper.replication.parity_builder`) and to undo it (`keeper.fetch.parity_rebuild`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator

from holdfast.tiers.memory.xor import xor_into

# Where in the buffer, and bytes that stay as they are until the next part is asked for.
Parts = Generator[tuple[int, memoryview], None, None]


def xor_sources(
    target: memoryview, sources: Iterable[Parts], at_once: int, came: Callable[[int], None] = lambda _: None
) -> None:
    """XORs all parts of all sources into `target`.

    Args:
        target: what parts are XORed into; parts of one place begin at the same number.
        sources: each is asked for when a thread is free, and run and closed by that one.
        at_once: that many sources are read at the same time, or as many as the system allows threads for.
        came: told of each part, once it is in `target`, where it begins; of one place by one thread at a time.

    Raises:
        BaseException: what the first source, or `came`, raised.
    """
    work = _Work(target, iter(sources), came)
    threads: list[threading.Thread] = []
    while len(threads) + 1 < at_once:
        thread = threading.Thread(target=work.run, name="holdfast parity source", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had: those that there are bring it all
            break
        threads.append(thread)
    work.run()
    for thread in threads:
        thread.join()  # each wait of a source has a deadline
    error, work.error = work.error, None
    try:
        if error is not None:
            raise error
    finally:
        del error  # which would else keep itself, and the memory that was read into


class _Work:
    """Holds the sources that nobody reads yet. Any thread."""

    def __init__(self, target: memoryview, waiting: Iterator[Parts], came: Callable[[int], None]) -> None:
        self.error: BaseException | None = None
        self._target = target
        self._waiting = waiting
        self._came = came
        self._lock = threading.Lock()
        self._places: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def run(self) -> None:
        """Reads one source after the other, for as long as there are any and nothing failed."""
        try:
            while (source := self._next()) is not None:
                with contextlib.closing(source):
                    self._read(source)
        except BaseException as error:  # noqa: BLE001  # raised by whoever asked for the whole
            with self._lock:
                self.error = self.error or error

    def _next(self) -> Parts | None:
        with self._lock:
            return next(self._waiting, None) if self.error is None else None

    def _read(self, source: Parts) -> None:
        for at, part in source:
            with self._place(at):
                xor_into(self._target[at : at + part.nbytes], part)
                self._came(at)
            if self.error is not None:
                return

    def _place(self, at: int) -> threading.Lock:
        with self._lock:
            return self._places[at]
