"""A launcher's claim to its node's name, in the rendezvous store: made before every meeting, renewed every second.

A meeting may last for minutes, while a replacement of another node is waited for: then a thread renews the claim.

Decisions are `core.elastic.node_lease`. Keys: `holdfast.nodes/<name>`. A launcher whose node has no name of its own (two may run
on one host) makes no claim, and a rendezvous without a store that outlives its rounds has none.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError

from holdfast.base.errors import InUse
from holdfast.core.elastic.node_lease import Claim, admit, stands
from holdfast.tiers.memory.processes import has_ended, machine_id, start_time

logger = logging.getLogger(__name__)

PREFIX = "holdfast.nodes"
BEAT_S = 1.0
LOOK_S = 0.2
JOIN_S = 2.0


class Identity:
    """Is the identity of one launcher.

    Args:
        guard_s: how long a silent holder of the name is waited for.
    """

    def __init__(self, store: Store, name: str, *, guard_s: float) -> None:
        self._store, self._name, self._guard_s = PrefixStore(PREFIX, store), name, guard_s
        pid = os.getpid()
        self._mine = Claim(uuid.uuid4().hex, machine_id(), pid, start_time(pid) or 0)
        self._held = False
        self._beat_at = 0.0

    def at(self, store: Store) -> None:
        """The claim stands in this store from now on; a name that was ours and is free there is still ours."""
        self._store = PrefixStore(PREFIX, store)

    def claim(self) -> None:
        """Waits until the name is ours.

        Raises:
            InUse: another launcher has it and lives, or it was taken from us.
        """
        first: Claim | None = None
        since = time.monotonic()
        while True:
            asked_s = time.monotonic()
            raw, known = self._read()
            if self._held and not stands(known, self._mine):
                raise self._replaced(known)
            if first is None or known is None or first.nonce != known.nonce:
                first, since = known, time.monotonic()  # whoever is new there has the whole guard time
            moved = known is not None and first is not None and known.beat != first.beat
            # It stood still from the end of its first sight to the beginning of the last one.
            still_s = -1.0 if moved else max(0.0, asked_s - since)
            decision = admit(known, self._mine, gone=_is_gone(known), still_s=still_s, guard_s=self._guard_s)
            if decision.value is None:
                raise InUse(
                    decision.reason,
                    where=f"node {self._name}",
                    remedy="stop it, or give this one another --node-label",
                )
            if decision.value and self._write(raw):
                if known is not None and known.nonce != self._mine.nonce:
                    logger.warning("node %s: %s", self._name, decision.reason)
                self._held = True
                return
            time.sleep(LOOK_S)

    def holds(self, now: float) -> bool:
        """Renews the claim once a second; False: another launcher has the name now."""
        if not self._held or now - self._beat_at < BEAT_S:
            return True
        self._beat_at = now
        try:
            raw, known = self._read()
            if not stands(known, self._mine):
                return False
            self._mine = replace(self._mine, beat=self._mine.beat + 1)
            self._write(raw)
        except (DistError, RuntimeError) as error:
            logger.info("the claim to node %s was not renewed: %s", self._name, error)
        return True

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """While the block lasts a thread renews the claim, as soon as there is one. Whether it still stands `holds` tells later."""
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), name="holdfast claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(JOIN_S)  # a store that says nothing may keep it; it ends with its next answer

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S / 2):
            if not self.holds(time.monotonic()):
                return

    def leave(self) -> None:
        """The name is free. Does not raise: the store may be gone with the job."""
        if not self._held:
            return
        self._held = False
        try:
            raw, known = self._read()
            if known is not None and stands(known, self._mine):
                self._write(raw, replace(self._mine, left=True))
        except (DistError, RuntimeError) as error:
            logger.info("the name of node %s was not given back: %s", self._name, error)

    def _replaced(self, by: Claim | None) -> InUse:
        pid = by.pid if by is not None else 0
        return InUse(
            f"this launcher was silent for too long; process {pid} took its place",
            where=f"node {self._name}",
            remedy="start it again under another --node-label if the node is wanted",
        )

    def _read(self) -> tuple[str, Claim | None]:
        if not self._store.check([self._name]):
            return "", None
        raw = self._store.get(self._name).decode()
        return raw, Claim(**json.loads(raw))

    def _write(self, before: str, claim: Claim | None = None) -> bool:
        """Return whether nobody was quicker. `claim`: what is written; None: ours."""
        text = json.dumps(asdict(claim or self._mine))
        return bool(self._store.compare_set(self._name, before, text).decode() == text)


def _is_gone(known: Claim | None) -> bool:
    """Return whether the process behind the claim is proven to be gone: it was on this machine, and is not there."""
    return known is not None and known.machine == machine_id() and has_ended(known.pid, known.started or None)
