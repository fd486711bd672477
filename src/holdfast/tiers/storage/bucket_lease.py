"""Tells who works on a prefix of a bucket right now: a chain of create-once objects, where the kernel has no lock to
give.

`run.lock/N` names a holder; the highest N is the lock. Whoever finds it free or its holder dead creates N + 1, once: of any
number of challengers one succeeds, and no lock is ever removed from under anybody. The holder alone writes its object
again, every few seconds with a higher beat. A holder of the same machine whose process has ended is dead at once; any
other is dead when its beat has not changed for LEASE_S of the *challenger's* monotonic clock.

Nothing but the create-once put is asked of the store, on which incarnations rest too; a conditional update, which fewer
stores know, is not needed. Safety does not rest on the lock, just as with `runlock`: a holder that sleeps past its lease
is fenced by the next incarnation. It says so loudly when it wakes.

`storage` chooses between the two. The renewing thread belongs to the lock: `take` starts it, `release` stops and joins it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from holdfast.base.errors import Fenced, HoldfastError, InUse, VersionNotFound
from holdfast.base.handler_errors import pass_on
from holdfast.tiers.backends.interface import Backend
from holdfast.tiers.format.strict_json import parse_loose
from holdfast.tiers.memory.processes import has_ended, machine_id, start_time
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.run_lock import PREDECESSOR_TIMEOUT_S

logger = logging.getLogger(__name__)

LOCKS = "run.lock"
RENEW_S = 3.0
LEASE_S = 15.0
POLL_S = 0.5

_MAX_BYTES = 4096


class LeaseLock:
    """The lock of one prefix, as one user of it in this process sees it.

    Args:
        renew_s: between two beats.
        lease_s: a beat that does not change for so long is that of a dead holder.
    """

    def __init__(self, backend: Backend, *, renew_s: float = RENEW_S, lease_s: float = LEASE_S) -> None:
        self._backend = backend
        self._renew_s = renew_s
        self._lease_s = lease_s
        self._number = 0  # of the lock that is ours; 0: none
        self._pid = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, run_id: str, *, timeout_s: float = PREDECESSOR_TIMEOUT_S) -> None:
        """Takes the lock, or finds that this user has it; waits for a predecessor that shows no sign of life.

        Args:
            run_id: for whoever is refused.
            timeout_s: how long to wait for a holder that goes on beating; a silent one is waited for until its lease
                ends.

        Raises:
            InUse: another process has it; says which. StorageError: the store refuses.
        """
        if self._number and self._pid == os.getpid() and self._numbers()[-1:] == [self._number]:
            return
        self.release()
        words = _words(run_id)
        deadline = time.monotonic() + timeout_s
        seen: tuple[int, dict[str, Any]] | None = None
        changed_s = time.monotonic()
        while True:
            # An answer may be as old as its request, and we may have been stopped since it came: the beat stood still from
            # the end of its first sight to the beginning of the last one, and not a moment longer.
            asked_s = time.monotonic()
            number, found = self._newest()
            now = time.monotonic()
            if (number, found) != seen:
                # The second sight of a beat that moves proves that somebody is there.
                if seen is not None and found and now >= deadline:
                    raise self._refusal(found)
                seen, changed_s = (number, found), now
            if not found or _is_dead(found) or asked_s - changed_s >= self._lease_s:
                if found:
                    logger.warning("the lock of %s is taken over: its holder is gone", _describe(found))
                if self._create(number + 1, words):
                    break
                continue
            if found.get("machine") == machine_id() and now >= deadline:
                raise self._refusal(found)
            time.sleep(min(POLL_S, self._renew_s / 4))
        self._number, self._pid = number + 1, os.getpid()
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._renew, args=(number + 1, words), name="holdfast run lock", daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Gives the lock back, if it is ours."""
        thread, self._thread = self._thread, None
        number, self._number = self._number, 0
        if thread is not None and self._pid == os.getpid():
            self._stop.set()
            thread.join()
            try:
                if self._numbers()[-1:] == [number]:
                    self._write(number, b"")  # the name stays taken: who slept over all this must not create it again
            except HoldfastError as error:
                logger.warning("the run lock was not given back, it ends by itself: %s", error)

    def _renew(self, number: int, words: dict[str, Any]) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                newest, found = self._newest()
                if newest != number:
                    self._say_lost(_describe(found) if newest > number else "")
                    return
                words["beat"] += 1
                self._write(number, _encode(words))
            except HoldfastError as error:
                logger.info("the run lock was not renewed: %s", error)

    def _say_lost(self, by: str) -> None:
        where = self._backend.properties.where
        if by:
            logger.error(
                "this job was silent for too long, and its run lock of %s was taken by %s: as soon as that job registers, "
                "nothing of this one becomes durable any more; end one of the two",
                where,
                by,
            )
        else:
            logger.error("the run lock of this job was removed from %s: a second job is not kept out any more", where)

    def _create(self, number: int, words: dict[str, Any]) -> bool:
        """Returns whether lock `number` is ours and the newest: others may have come and gone since it was looked for."""
        try:
            self._backend.create(_name(number), _encode(words), stamp=make_stamp(0))
        except Fenced:
            return False
        numbers = self._numbers()
        if numbers[-1:] != [number]:
            return False
        self._backend.delete(*map(_name, numbers[:-1]))
        return True

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """Returns the number of the newest lock (0: there never was one) and what its holder says; nothing: it is free."""
        while numbers := self._numbers():
            try:
                data = self._backend.read(_name(numbers[-1]), length=_MAX_BYTES)
            except VersionNotFound:
                continue  # a newer one stands, whose holder removed it
            return numbers[-1], _decode(data)
        return 0, {}

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name, _ in self._backend.listing(LOCKS) if name.isdecimal())

    def _write(self, number: int, data: bytes) -> None:
        self._backend.put(_name(number), [memoryview(data)], stamp=make_stamp(0))

    def _refusal(self, found: dict[str, Any]) -> InUse:
        return InUse(
            f"another job works on this path: {_describe(found)}",
            where=f"{self._backend.properties.where}/{LOCKS}",
            remedy="stop it, or give this job another path; another run id does not help",
        )


def _name(number: int) -> str:
    return f"{LOCKS}/{number:06d}"


def _words(run_id: str) -> dict[str, Any]:
    """Return what this process says of itself when it takes the lock."""
    me = {"pid": os.getpid(), "started": start_time(os.getpid()), "machine": machine_id()}
    return {**me, "host": socket.gethostname(), "run_id": run_id, "key": secrets.token_hex(8), "beat": 0}


def _encode(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _decode(data: bytes) -> dict[str, Any]:
    """Return what a holder says of itself; nothing if it left. What nobody can read is a holder that is not known."""
    if not data:
        return {}
    try:
        words = parse_loose(data)
    except ValueError as error:
        pass_on(error)
        words = None
    return words if isinstance(words, dict) and words else {"unreadable": data.hex()}


def _is_dead(found: dict[str, Any]) -> bool:
    """Returns whether the holder is known to be a process of this machine that has ended."""
    pid, started = found.get("pid"), found.get("started")
    return found.get("machine") == machine_id() and isinstance(pid, int) and has_ended(pid, started)


def _describe(found: dict[str, Any]) -> str:
    words = [str(found.get(name, "?"))[:256] for name in ("pid", "host", "run_id")]
    if not all(word.isprintable() for word in words):
        return "an unknown process"
    return f"process {words[0]} on {words[1]}, run {words[2]!r}"
