"""What this rank waits to see in storage: the callback of every durable save, the answer of `flush`, further copies.

A save that was asked for at the durable level ends in one of three ways, and is told of once: the version is durable
(and, if it was wanted elsewhere too, stands there), it was given up, or its deadline passed. One thread looks; the
callback runs in it, so it may take its time, and what it raises is logged. Called by `train.checkpointer`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, LevelNotReached
from holdfast.core.model import Version
from holdfast.train import alive
from holdfast.train.handle import SaveHandle

logger = logging.getLogger(__name__)

# How often a save whose end is awaited is looked at; a push of the keeper would have to cross a thread as well.
LOOK_EVERY_S = 0.05
# Saves that did not become durable, as `flush` names them; none once a later one is.
MAX_FAILED = 16
JOIN_TIMEOUT_S = 10.0

OnDurable = Callable[[Version, HoldfastError | None], None]
REMEDY = "training may go on; the next durable save tries again"


@dataclass(slots=True)
class _Awaited:
    handle: SaveHandle
    deadline_s: float
    also_to: tuple[str, ...]


class Durables:
    """The durable saves of one rank that have not ended.

    Args:
        on_durable: called with the version and None, or with the error that says what is missing.
        copy: makes a durable version stand at another place too.
        timeout_s: the deadline, counted from the save.
    """

    def __init__(self, on_durable: OnDurable | None, copy: Callable[[Version, str], None], *, timeout_s: float) -> None:
        self._on_durable = on_durable
        self._copy = copy
        self._timeout_s = timeout_s
        self._awaited: OrderedDict[Version, _Awaited] = OrderedDict()
        self._failed: OrderedDict[Version, str] = OrderedDict()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, handle: SaveHandle, also_to: Sequence[str] = ()) -> None:
        """A save was asked for at the durable level. Asked again it only may be wanted at more places."""
        with self._changed:
            known = self._awaited.get(handle.version)
            places = tuple(dict.fromkeys([*(known.also_to if known else ()), *also_to]))
            deadline = known.deadline_s if known else time.monotonic() + self._timeout_s
            self._awaited[handle.version] = _Awaited(handle, deadline, places)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="holdfast durables", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Waits until every durable save has ended.

        Raises:
            LevelNotReached: names all that are not durable, each with the reason.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            wanted = set(self._awaited)
            while self._awaited.keys() & wanted and time.monotonic() < deadline:
                self._changed.wait(min(0.5, max(0.0, deadline - time.monotonic())))
            missing = dict(self._failed)
            self._failed.clear()
            for version in sorted(self._awaited.keys() & wanted):
                missing[version] = f"not within {timeout_s:g} s"
        if missing:
            what = "; ".join(f"{version} is not durable: {why}" for version, why in sorted(missing.items()))
            raise LevelNotReached(what, remedy=REMEDY)

    def close(self) -> None:
        """Tells once more of what has ended, and forgets the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                closed = self._closed
                if not closed:
                    self._changed.wait(LOOK_EVERY_S if self._awaited else None)
                awaited = list(self._awaited.values())
            for item in awaited:
                self._look(item)
            if closed:
                return

    def _look(self, item: _Awaited) -> None:
        version = item.handle.version
        ended, why = item.handle.durable
        if not ended and time.monotonic() < item.deadline_s:
            return
        if not ended:
            why = f"not within {self._timeout_s:g} s; {why}"
        for place in item.also_to if not why else ():
            try:
                self._copy(version, place)
            except HoldfastError as error:
                why = f"{why}{'; ' if why else ''}it is not at {place}: {error}"
        self._tell(version, why)
        with self._changed:
            self._awaited.pop(version, None)
            if why:
                self._failed[version] = why
                while len(self._failed) > MAX_FAILED:
                    self._failed.popitem(last=False)
            self._changed.notify_all()

    def _tell(self, version: Version, why: str) -> None:
        if why:
            logger.warning("%s is not durable: %s", version, why)
        else:
            alive.wish.saved(version.step)
        if self._on_durable is None:
            return
        try:
            self._on_durable(
                version, LevelNotReached(f"{version} is not durable: {why}", remedy=REMEDY) if why else None
            )
        except Exception:  # the user's code must not end the thread that the next callback needs
            logger.exception("on_durable failed for %s", version)
