"""A keeper that can be hurt while it runs: the production process, with a wound at every place that faults reach.

What is wrong with it stands in a control file, one line `<what>@<where>`, read at every place, so that a test says
when it begins and when it is over:

- what: an errno (`ENOSPC`, `EIO`, ..) that the call fails with; `stop` and `kill`: the keeper ends there by that signal;
  `stall`: the call waits until the line is gone; `slow`: storage takes SLOW_BYTES_PER_S. Of bytes to other keepers (at
  `wire`): `flip` changes one bit of each piece, `cut` ends the connection in the middle of one. Of bytes on their
  way from a slot to storage (at `persist`): `flip` changes one.
- where: a system call on the checkpoint directory (`write`, `fsync`, `rename`, `link`, `unlink`), `storage` for all of
  them; a step of the protocol in PLACES; `takeover`: it begins to write what another keeper should have written; `wire`;
  `line`: no other keeper can be reached, and the line to the coordinator is cut.

A line `stop` or `kill` is taken out of the file before it strikes, so that it strikes once. Used by tests and by
`holdfast drill faults`: python -m holdfast.testing.faults.inject CONTROL [arguments of a keeper].
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.base.errors import KeeperLost
from holdfast.core.versions import writer_failover
from holdfast.keeper.coordination import coordinator
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.coordination.coordinator_client import CoordinatorClient
from holdfast.keeper.fetch.fetch_bundles import BundleFetcher
from holdfast.keeper.fetch.prefetch import Preloader
from holdfast.keeper.replication.parity_builder import ParityBuilder
from holdfast.keeper.replication.replicator import Replicator
from holdfast.keeper.service import keeper_main
from holdfast.keeper.service.peer_requests import PeerRequests
from holdfast.keeper.service.save_requests import SaveRequests
from holdfast.keeper.slots.sealer import Sealer
from holdfast.keeper.storage import writer
from holdfast.keeper.storage.writer import Persister
from holdfast.testing.drill.shared import die_with
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.storage.stored_bundles import StoredBundles
from holdfast.tiers.storage.version_store import Storage
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.frames import Channel

SLOW_BYTES_PER_S = 5_000_000
LOOK_EVERY_S = 0.02
# Leases end sooner than in production, so that nobody has to wait for them. A wrong takeover would be harmless.
LEASE_S = 2.5
ABSENT_S = 1.0
SILENCE_S = 1.5

PLACES: dict[str, tuple[Any, str]] = {
    "pages": (memory_pages, "allocate"),
    "begin": (SaveRequests, "begin"),
    "seal": (Sealer, "_seal"),
    "send": (PeerRequests, "pull"),
    "receive": (Replicator, "_pull_rank"),
    "parity": (ParityBuilder, "_parts"),
    "persist": (StoredBundles, "write"),
    "part": (Storage, "write_part"),
    "commit": (Storage, "commit"),
    "retire": (Storage, "retire"),
    "announce": (Coordinator, "_announce"),
    "obtain": (BundleFetcher, "obtain"),
    "preload": (Preloader, "_fetch"),
}
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


class Wounds:
    """The control file of one keeper."""

    def __init__(self, control: Path, root: str) -> None:
        self._control = control
        self._root = root

    def strike(self, *where: str, size: int = 0) -> None:
        """Do what is to happen at these places now."""
        what, _, at = self._line().partition("@")
        if at not in where or what == "flip":
            return
        if what in SIGNALS:
            self._control.write_text("")
            os.kill(os.getpid(), SIGNALS[what])
        elif what == "stall":
            while self._line() == f"{what}@{at}":
                time.sleep(LOOK_EVERY_S)
        elif what == "slow":
            time.sleep(size / SLOW_BYTES_PER_S)
        else:
            raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))

    def open(self) -> None:
        """Puts a wound at every place."""
        for name, (owner, method) in PLACES.items():
            setattr(owner, method, self._at_place(name, getattr(owner, method)))
        for call, where in (("pwrite", "write"), ("fsync", "fsync")):
            setattr(os, call, self._at_descriptor(where, getattr(os, call)))
        for call in ("rename", "link", "unlink"):
            setattr(os, call, self._at_name(call, getattr(os, call)))
        self._open_takeover()
        self._open_way()
        self._open_wire()

    def _open_way(self) -> None:
        real = StoredBundles.write

        def write(bundles: StoredBundles, version: Any, ref: Any, seal: Any, view: memoryview, **more: Any) -> Any:
            if self._line() == "flip@persist":
                view = memoryview(bytearray(view))
                view[len(view) // 2] ^= 0x10
            return real(bundles, version, ref, seal, view, **more)

        setattr(StoredBundles, "write", write)  # noqa: B010

    def _open_takeover(self) -> None:
        real = Persister._write_parts

        def write_parts(persister: Persister, order: writer_failover.Order, *rest: Any) -> None:
            if order.term:
                self.strike("takeover")
            real(persister, order, *rest)

        setattr(Persister, "_write_parts", write_parts)  # noqa: B010  # mypy lets no method be assigned

    def _open_wire(self) -> None:
        send, connect, flush = Channel.send_bulk, frames.connect, CoordinatorClient._flush

        def send_bulk(channel: Channel, body: bytes, view: memoryview, **more: Any) -> None:
            what, _, at = self._line().partition("@")
            if at == "wire" and what == "flip":
                spoiled = bytearray(view)
                spoiled[len(spoiled) // 2] ^= 0x10
                view = memoryview(spoiled)
            if at == "wire" and what == "cut":
                send(channel, body, view[: len(view) // 2], **more)
                channel.abort()
                return
            send(channel, body, view, **more)

        def reach(address: str, **more: Any) -> Channel:
            self._require_line(address)
            return connect(address, **more)

        def flush_line(coordinator_client: CoordinatorClient) -> None:
            if coordinator_client.coordinator is None:
                self._require_line("the coordinator")
            flush(coordinator_client)

        setattr(Channel, "send_bulk", send_bulk)  # noqa: B010
        setattr(CoordinatorClient, "_flush", flush_line)  # noqa: B010
        frames.connect = reach

    def _require_line(self, where: str) -> None:
        if self._line().endswith("@line"):
            raise KeeperLost("no keeper can be reached: the line is cut on purpose", where=where)

    def _line(self) -> str:
        try:
            return self._control.read_text().strip()
        except FileNotFoundError:
            return ""

    def _at_place(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.strike(name)
            return real(*args, **kwargs)

        return call

    def _at_descriptor(self, where: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            if self._is_ours(fd):
                self.strike(where, "storage", size=len(args[0]) if args else 0)
            return real(fd, *args)

        return call

    def _at_name(self, where: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            directory = kwargs.get("src_dir_fd", kwargs.get("dir_fd"))
            if directory is not None and self._is_ours(directory):
                self.strike(where, "storage")
            return real(*args, **kwargs)

        return call

    def _is_ours(self, fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(self._root)


def main(arguments: Sequence[str], plant: Callable[[], None] = lambda: None) -> int:
    """Runs a keeper that is hurt as the file says; returns its exit status. `plant` is what a test does to it before."""
    control, *rest = arguments
    writer_failover.LEASE_S, coordinator.ABSENT_S, writer.SILENCE_S = LEASE_S, ABSENT_S, SILENCE_S
    plant()
    die_with(os.getppid())  # who is killed in the middle of a cell leaves nothing behind
    Wounds(Path(control), rest[rest.index("--root") + 1]).open()
    return keeper_main.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
