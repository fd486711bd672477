"""Who works on a prefix of a bucket right now: an object that its holder renews, where the kernel has no lock to give.

`run.lock` is created once, names its holder, and is written again every few seconds with a higher beat. A holder of the
same machine whose process has ended is dead at once; any other is dead when its beat has not changed for LEASE_S of the
*challenger's* monotonic clock. A dead holder's object is removed and the challenger creates its own. Safety does not rest
on it, just as with `runlock`: a holder that sleeps past its lease is fenced by the next incarnation.

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
from holdfast.tiers.backend import Backend
from holdfast.tiers.procs import start_time
from holdfast.tiers.registry import machine_id, make_stamp

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
RENEW_S = 3.0
LEASE_S = 15.0
POLL_S = 0.5

_MAX_BYTES = 4096


class LeaseLock:
    """The lock of one prefix, as one user of it in this process sees it.

    Args:
        backend: where.
        renew_s: between two beats.
        lease_s: a beat that does not change for so long is that of a dead holder.
    """

    def __init__(self, backend: Backend, *, renew_s: float = RENEW_S, lease_s: float = LEASE_S) -> None:
        self._backend = backend
        self._renew_s = renew_s
        self._lease_s = lease_s
        self._words: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, run_id: str, *, timeout_s: float) -> None:
        """Takes the lock, or finds that this user has it; waits for a predecessor that shows no sign of life.

        Args:
            run_id: for whoever is refused.
            timeout_s: how long to wait for a holder that goes on beating; a silent one is waited for until its lease
                ends.

        Raises:
            InUse: another process has it; says which. StorageError: the store refuses.
        """
        if self._words and self._is_ours(self._words):
            return
        self.release()
        me = {"pid": os.getpid(), "started": start_time(os.getpid()), "machine": machine_id()}
        words = {**me, "host": socket.gethostname(), "run_id": run_id, "key": secrets.token_hex(8), "beat": 0}
        deadline = time.monotonic() + timeout_s
        seen: dict[str, Any] | None = None
        changed_s = time.monotonic()
        while not self._create(words):
            found, now = self._read(), time.monotonic()
            if found != seen:
                # The second sight of a beat that moves proves that somebody is there.
                if seen is not None and found is not None and now >= deadline:
                    raise self._refusal(found)
                seen, changed_s = found, now
            if found is not None and (_is_dead(found) or now - changed_s >= self._lease_s):
                logger.warning("the lock of %s is taken over: its holder is gone", _describe(found))
                self._backend.delete(LOCK_NAME)
                continue
            if found is not None and found.get("machine") == machine_id() and now >= deadline:
                raise self._refusal(found)
            time.sleep(min(POLL_S, self._renew_s / 4))
        self._words = words
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, args=(words,), name="holdfast run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives the lock back, if it is ours."""
        thread, self._thread = self._thread, None
        words, self._words = self._words, {}
        if thread is not None and words["pid"] == os.getpid():
            self._stop.set()
            thread.join()
            try:
                if self._is_ours(words):
                    self._backend.delete(LOCK_NAME)
            except HoldfastError as error:
                logger.warning("the run lock was not given back, it ends by itself: %s", error)

    def _renew(self, words: dict[str, Any]) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                if not self._is_ours(words):
                    logger.warning("the run lock of %s was taken by another job", self._backend.properties.where)
                    return
                words["beat"] += 1
                self._backend.put(LOCK_NAME, [memoryview(_encode(words))], stamp=make_stamp(0))
            except HoldfastError as error:
                logger.info("the run lock was not renewed: %s", error)

    def _is_ours(self, words: dict[str, Any]) -> bool:
        found = self._read()
        return found is not None and found.get("key") == words["key"]

    def _create(self, words: dict[str, Any]) -> bool:
        try:
            self._backend.create(LOCK_NAME, _encode(words), stamp=make_stamp(0))
        except Fenced:
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        try:
            data = self._backend.read(LOCK_NAME, length=_MAX_BYTES)
        except VersionNotFound:
            return None
        try:
            words = json.loads(data)
        except (ValueError, RecursionError):
            words = None
        return words if isinstance(words, dict) else {"unreadable": data.hex()}

    def _refusal(self, found: dict[str, Any]) -> InUse:
        return InUse(
            f"another job works on this path: {_describe(found)}",
            where=f"{self._backend.properties.where}/{LOCK_NAME}",
            remedy="stop it, or give this job another path; another run id does not help",
        )


def _encode(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode() + b"\n"


def _is_dead(found: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    pid = found.get("pid")
    if found.get("machine") != machine_id() or not isinstance(pid, int):
        return False
    return start_time(pid) is None or start_time(pid) != found.get("started")


def _describe(found: dict[str, Any]) -> str:
    words = [str(found.get(name, "?"))[:256] for name in ("pid", "host", "run_id")]
    if not all(word.isprintable() for word in words):
        return "an unknown process"
    return f"process {words[0]} on {words[1]}, run {words[2]!r}"
