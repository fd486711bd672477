"""Knows what this rank waits to see in storage: the callback of every durable save, the answer of `flush`, further
places.

A save that was asked for at the durable level ends in one of four ways, and is told of once: the version is durable
(and, if it was wanted elsewhere too, stands there), it is durable but not at all places, it was given up, or its deadline
passed. One thread looks; the callback runs in it, so it may take its time, and what it raises is logged. What is copied
(`checkpoint.save.extra_places`) is held in storage from here, from the call on and until all places are done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, LevelNotReached, UsageError
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.save.extra_places import LEFT, ExtraPlaces, PlaceCopy
from holdfast.checkpoint.save.save_handle import PROGRESS_S, SaveHandle
from holdfast.core.model import Version
from holdfast.tiers.wire.lock_owner import is_mine

logger = logging.getLogger(__name__)

# How often a save whose end is awaited is looked at; a push of the keeper would have to cross a thread as well.
LOOK_EVERY_S = 0.05
# Of saves that do not become durable one is told of at level WARNING within this time, for the next has the same reason.
TELL_EVERY_S = 10.0
# Saves that did not become durable, as `flush` names them; one that only the cadence asked for no more once a later one is.
MAX_FAILED = 16
JOIN_TIMEOUT_S = 10.0

OnDurable = Callable[[Version, HoldfastError | None], None]
REMEDY = "training may go on; the next durable save tries again"


@dataclass(slots=True)
class _Awaited:
    """A durable save that has not ended.

    Attributes:
        places: further ones, each with its copy once that was started.
        asked: by the script, and not only by the cadence.
        stamp: what the version is held with; empty if it is not.
        unheld: it could not be held, which was said.
        is_durable: at its own place; it stays so, whatever becomes of the keeper that said it.
        is_decided: it is being told of, and takes no more places.
    """

    handle: SaveHandle
    deadline_s: float
    places: dict[str, PlaceCopy | None]
    asked: bool = False
    stamp: str = ""
    unheld: bool = False
    is_durable: bool = False
    is_decided: bool = False

    @property
    def outstanding(self) -> list[str]:
        """Return where it does not stand yet."""
        return [place for place, copy in self.places.items() if copy is None or not copy.ended]

    @property
    def lacking(self) -> list[str]:
        """Return where it will not stand, each with the reason."""
        return [f"{place}: {copy.why}" for place, copy in self.places.items() if copy is not None and copy.why]

    @property
    def text(self) -> str:
        """Return how far its copies are."""
        copies = ((place, self.places[place]) for place in self.outstanding)
        far = (f"{place} ({copy.text if copy is not None else 'is not durable yet'})" for place, copy in copies)
        return f"{self.handle.version} at {', '.join(far)}"


class DurableTracker:
    """The durable saves of one rank that have not ended.

    Args:
        on_durable: called with the version and None, or with the error that says what is missing.
        further: makes durable versions stand at other places too; None on ranks that leave that to another one.
        timeout_s: the deadline of a save, counted from the call; that of copies are the time-outs of their places.
    """

    def __init__(
        self,
        on_durable: OnDurable | None,
        further: ExtraPlaces | None,
        *,
        timeout_s: float,
    ) -> None:
        self._on_durable = on_durable
        self._further = further
        self._timeout_s = timeout_s
        # No OrderedDict: who goes through one asks for hashes, and what a signal's handler raises in that becomes a KeyError.
        self._awaited: dict[Version, _Awaited] = {}
        self._failed: dict[Version, tuple[_Awaited, str]] = {}
        self._lock = threading.RLock()  # taken in one step of the interpreter, which no handler comes between
        self._changed = threading.Condition(self._lock)
        self._marking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._has_left = self._is_ending = False
        self._warned_s = -TELL_EVERY_S

    def add(self, handle: SaveHandle, also_to: Sequence[str] = (), *, asked: bool = True) -> None:
        """A save was asked for at the durable level. Asked again it only may be wanted at more places. `asked`: by the script."""
        with self._lock:
            known = self._awaited.get(handle.version)
            if known is None or known.is_decided:
                known = self._awaited[handle.version] = _Awaited(handle, time.monotonic() + self._timeout_s, {})
            elif known.handle.given_up:
                known.handle = handle
            known.asked |= asked
            for place in also_to if self._further is not None else ():
                known.places.setdefault(place, None)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="holdfast durables", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def restarted(self, incarnation: int) -> None:
        """Another incarnation runs in this process, and what is held stays so: when this returns, before it commits anything."""
        if self._further is None:
            return
        self._further.restarted(incarnation)
        with self._lock:
            held = [item for item in self._awaited.values() if item.stamp]
        for item in held:
            self._hold(item)

    @property
    def is_telling(self) -> bool:
        """Return whether this is called in a callback."""
        return self._thread is threading.current_thread()

    @property
    def is_held(self) -> bool:
        """Return whether this thread is in the middle of a call here: a signal's handler interrupted it."""
        return is_mine(self._changed)

    def flush(self, timeout_s: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Waits until every durable save has ended and `on_durable` was called for it; `meanwhile` is called now and then. A
        callback that does not return within the time is no error: the version is durable.

        Raises:
            LevelNotReached: names all that are not durable, or not at all places, each with the reason. Not those that
                only the cadence asked for, if a later one is.
            UsageError: in a callback, which it would wait for.
        """
        if self.is_telling:
            raise UsageError("`on_durable` cannot flush: it would wait for itself", remedy="flush where you train")
        deadline = time.monotonic() + timeout_s
        with self._lock:
            wanted = set(self._awaited)
            while self._awaited.keys() & wanted and time.monotonic() < deadline:
                self._changed.wait(min(0.5, max(0.0, deadline - time.monotonic())))
                meanwhile()
            missing = {version: why for version, (_, why) in self._failed.items()}
            self._failed.clear()
            for version in sorted(self._awaited.keys() & wanted):
                item = self._awaited[version]
                if version in missing:
                    continue  # its callback has not returned
                if not item.is_durable:
                    missing[version] = f"{version} is not durable: not within {timeout_s:g} s"
                elif item.outstanding:
                    missing[version] = f"{version} is durable, but after {timeout_s:g} s not at all places: {item.text}"
        if missing:
            raise LevelNotReached("; ".join(what for _, what in sorted(missing.items())), remedy=REMEDY)

    def ending(self) -> None:
        """The job ends, where a version that is given up may be saved once more: what is not durable is told by `close`."""
        self._is_ending = True

    def close(self, timeout_s: float = 0.0, *, join_s: float = JOIN_TIMEOUT_S) -> None:
        """Waits until what goes to further places is there, `timeout_s` at most, and says how far it is meanwhile. Then
        tells of what has ended and of what did not arrive, and forgets the rest; waits `join_s` at most for that.
        """
        self._is_ending = False
        self._wait_for_places(timeout_s)
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._further is not None:
            self._further.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            with self._lock:  # a signal's handler may hold it already, from where it struck: a wait lets go of it
                self._changed.wait_for(lambda: self._has_left, join_s)

    def _wait_for_places(self, timeout_s: float) -> None:
        """Waits for the further places; not in a callback, which runs in the thread that this would wait for."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        deadline, said = time.monotonic() + timeout_s, time.monotonic()
        with self._lock:
            while time.monotonic() < deadline:
                left = [item for item in self._awaited.values() if item.outstanding and not item.handle.given_up]
                if not left:
                    return
                if time.monotonic() - said >= PROGRESS_S:
                    said = time.monotonic()
                    logger.info(
                        "waiting %.0f s more for copies: %s", deadline - said, "; ".join(item.text for item in left)
                    )
                self._changed.wait(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))

    def _run(self) -> None:
        while True:
            with self._lock:
                closed = self._closed
                if not closed:
                    self._changed.wait(LOOK_EVERY_S if self._awaited else None)
                awaited = list(self._awaited.values())
            for item in awaited:
                self._look(item, leaving=closed)
            if closed:
                with self._lock:
                    self._has_left = True
                    self._changed.notify_all()
                return

    def _look(self, item: _Awaited, *, leaving: bool) -> None:
        version = item.handle.version
        item.handle.ask_again()
        ended, why = (True, "") if item.is_durable else item.handle.durable
        if ended and why and not item.handle.given_up and item.handle.is_stored():
            why = ""  # so long ago that the keeper's word is forgotten: a callback may take its time
        if ended and not why and not item.is_durable:
            item.is_durable = True
            open_checkpointers.wish.saved(version.step)
        if not leaving and not (ended and why):
            self._hold(item)
        if item.is_durable:
            self._look_at_places(item, leaving=leaving)
        elif self._is_ending:
            return
        elif ended or time.monotonic() >= item.deadline_s:
            why = why if ended else f"not within {self._timeout_s:g} s; {why}"
            self._end(item, f"{version} is not durable: {why}")
        elif leaving:
            self._forget(item)

    def _look_at_places(self, item: _Awaited, *, leaving: bool) -> None:
        """The version is durable: starts what is to be copied, and looks whether all is there."""
        version = item.handle.version
        with self._lock:
            for place, copy in item.places.items():
                if copy is None:
                    assert self._further is not None
                    item.places[place] = PlaceCopy(version, place) if leaving else self._further.start(version, place)
            for copy in item.places.values():
                if leaving and copy is not None:
                    copy.end(f"{LEFT}: {copy.text}")
            if item.outstanding:
                return
            item.is_decided = True
            lacking = "; ".join(item.lacking)
        self._end(item, f"{version} is durable, but not at {lacking}" if lacking else "")

    def _hold(self, item: _Awaited) -> None:
        with self._marking:
            if self._further is None or not item.places or item.is_decided or item.stamp == self._further.stamp:
                return
            try:
                item.stamp = self._further.hold(item.handle.version, item.stamp)
            except HoldfastError as error:  # it is tried again, and copied in any case
                if not item.unheld:
                    logger.warning("%s may be removed before it is copied: %s", item.handle.version, error)
                item.unheld = True

    def _forget(self, item: _Awaited) -> None:
        """We leave, and it is not decided whether the version becomes durable: the keeper goes on with it."""
        if item.places:
            logger.warning("%s is not copied to %s: %s", item.handle.version, ", ".join(item.places), LEFT)
        self._release(item)
        self._drop(item)

    def _end(self, item: _Awaited, why: str) -> None:
        """It is decided, and told of."""
        version = item.handle.version
        self._release(item)
        with self._lock:
            if item.is_durable:
                over = [failed for failed, (it, _) in self._failed.items() if failed < version and not it.asked]
                for failed in (*over, version):
                    self._failed.pop(failed, None)
            if why:
                self._failed[version] = item, why
                while len(self._failed) > MAX_FAILED:
                    del self._failed[next(iter(self._failed))]
        self._tell(item, why)
        self._drop(item)

    def _drop(self, item: _Awaited) -> None:
        """Nobody waits for it any more; it may have been asked for anew."""
        with self._lock:
            if self._awaited.get(item.handle.version) is item:
                del self._awaited[item.handle.version]
            self._changed.notify_all()

    def _release(self, item: _Awaited) -> None:
        with self._marking:
            item.is_decided = True
            if self._further is not None and item.stamp:
                self._further.release(item.handle.version, item.stamp)

    def _tell(self, item: _Awaited, why: str) -> None:
        version = item.handle.version
        if why:
            again = not item.is_durable and time.monotonic() - self._warned_s < TELL_EVERY_S
            logger.log(logging.DEBUG if again else logging.WARNING, "%s", why)
            self._warned_s = self._warned_s if again else time.monotonic()
        if self._on_durable is None:
            return
        try:
            self._on_durable(version, LevelNotReached(why, remedy=REMEDY) if why else None)
        except BaseException:  # the user's code, also `sys.exit`, must not end the thread that the next callback needs
            logger.exception("on_durable failed for %s", version)
