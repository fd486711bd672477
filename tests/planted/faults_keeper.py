"""Bugs of keepers that the matrix of faults has to find: each undoes one rule of replication, takeover, commit,
loading, retention or fencing. Planted in a keeper of a cell by faults_inject.py.

Which cell finds which, and by which invariants: faults.py. They are others than those of the crash drill.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from holdfast.base.errors import StorageError
from holdfast.core.model import Decision, Version
from holdfast.core.versions import retention
from holdfast.core.versions.coordinator_board import Action, Announcement, Board, Kind
from holdfast.core.versions.slot_guard import SlotView
from holdfast.core.versions.writer_failover import Order, Watch
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.replication import replicator
from holdfast.keeper.replication.image_transfer import PeerReader
from holdfast.keeper.replication.replicator import Replicator
from holdfast.keeper.service import dispatch
from holdfast.keeper.service.peer_requests import PeerRequests
from holdfast.keeper.service.save_requests import SaveRequests
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.storage import retention as retention_rules
from holdfast.keeper.storage import writer
from holdfast.keeper.storage.writer import Persister
from holdfast.keeper.storage.writer_failover import WRITING_PIN, WriteAttempt, WriterFailover
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.version_store import Storage
from planted.crash import always, put, unproved_writes

# --- replication ----------------------------------------------------------------------------------------------------


def _counted_before_it_is_here() -> None:
    pull = Replicator._pull

    def pull_late(self: Replicator, home: int, job: Any) -> None:
        self._state.replicated(job.version, job.bundle_ids)
        pull(self, home, job)

    put(Replicator, "_pull", pull_late)


def _wire_unchecked() -> None:
    put(image_format, "check_chunk", always(None))
    put(image_format, "image_digest", _last_seal(image_format.image_digest))
    read = PeerReader.read_into

    def read_into(self: PeerReader, version: Version, seal: Any, view: memoryview, *more: Any) -> None:
        _EXPECTED[:] = [seal.digest]
        try:
            read(self, version, seal, view, *more)
        finally:
            _EXPECTED.clear()

    put(PeerReader, "read_into", read_into)


_EXPECTED: list[str] = []


def _last_seal(real: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda digests: _EXPECTED[0] if _EXPECTED else real(digests)


def _safest_replica_overwritten() -> None:
    def newest(views: Sequence[SlotView], *_: Any) -> Decision[int | None]:
        sealed = [view for view in views if view.version is not None]
        if len(views) < replicator.NUM_REPLICA_SLOTS or not sealed:
            return Decision(None, "fewer than two")
        return Decision(max(sealed, key=lambda view: view.version or Version(0, 0)).index, "the newest")

    put(replicator, "choose_slot", newest)


def _no_replicas() -> None:
    put(Replicator, "put", always(None))


def _replicated_when_captured() -> None:
    captured = Board._captured

    def and_replicated(self: Board, version: Version, *more: Any) -> list[Action]:
        actions = captured(self, version, *more)
        return [*actions, Announcement(Kind.REPLICATED, version, "it will be")]

    put(Board, "_captured", and_replicated)


# --- takeover -------------------------------------------------------------------------------------------------------


def _nobody_takes_over() -> None:
    orders = Watch._orders

    def own_only(self: Watch, *args: Any) -> list[Order]:
        return [order for order in orders(self, *args) if order.term == 0]

    put(Watch, "_orders", own_only)


def _parts_differ_by_writer() -> None:
    write = Persister._write_parts

    def write_parts(self: Persister, order: Order, *more: Any) -> None:
        if order.term:
            _WRITERS.append(1)
        try:
            write(self, order, *more)
        finally:
            _WRITERS.clear()

    def write_part(self: Storage, version: Version, node: int, files: Any, *, stamp: str) -> tuple[str, int, str]:
        files = [replace(file, ref=replace(file.ref, num_bytes=file.ref.num_bytes + len(_WRITERS))) for file in files]
        return real(self, version, node, files, stamp=stamp)

    real = Storage.write_part
    put(Persister, "_write_parts", write_parts)
    put(Storage, "write_part", write_part)


_WRITERS: list[int] = []


def _signs_for_ever() -> None:
    put(writer, "SILENCE_S", 1e9)


def _pins_of_another_order() -> None:
    def done(self: WriterFailover, writing: WriteAttempt) -> None:
        for held in self._state.slot_pool:
            if held.version == writing.order.version:
                held.pins.pop(WRITING_PIN, None)

    put(WriterFailover, "done", done)
    unproved_writes()


# --- commit ---------------------------------------------------------------------------------------------------------


def _durable_when_ordered() -> None:
    commit = Coordinator._commit

    def and_say_so(self: Coordinator, order: Any) -> None:
        commit(self, order)
        self._announce(Announcement(Kind.DURABLE, order.version, "it is ordered"))

    put(Coordinator, "_commit", and_say_so)


def _failed_commit_is_success() -> None:
    commit = Storage.commit

    def swallow(self: Storage, *args: Any, **more: Any) -> None:
        try:
            commit(self, *args, **more)
        except StorageError:
            return

    put(Storage, "commit", swallow)


def _suspect_is_captured() -> None:
    abandon, persist_it = Board._abandon, Board._try_persist

    def keep(self: Board, version: Version, entry: Any, reason: str) -> list[Action]:
        return [] if entry.suspect else abandon(self, version, entry, reason)

    def try_persist(self: Board, version: Version, entry: Any) -> list[Action]:
        entry.suspect = ""
        return persist_it(self, version, entry)

    put(Board, "_abandon", keep)
    put(Board, "_try_persist", try_persist)


def _nothing_is_retried() -> None:
    put(writer._RetryState, "due", always(()))


# --- retention ------------------------------------------------------------------------------------------------------


def _one_is_kept() -> None:
    put(retention_rules, "to_retire", lambda durable, **_: tuple(sorted(durable)[:-1]))


def _unfinished_counts() -> None:
    def with_unfinished(durable: Any, **more: Any) -> tuple[Version, ...]:
        all_ = {*durable, *_STORAGES[-1].unfinished()}
        return tuple(v for v in retention.to_retire(all_, **more) if v in durable)

    look = Storage.look

    def remember(self: Storage, known: Collection[Version] = ()) -> tuple[list[Version], list[Version]]:
        _STORAGES[:] = [self]
        return look(self, known)

    put(Storage, "look", remember)
    put(retention_rules, "to_retire", with_unfinished)


_STORAGES: list[Storage] = []


# --- loading and fencing --------------------------------------------------------------------------------------------


def _inventory_of_one() -> None:
    inventory = PeerRequests.inventory
    put(PeerRequests, "inventory", lambda self, **_: inventory(self, wide=False))


def _past_assembles() -> None:
    assemble = NodeState.assemble

    def anything(self: NodeState, assembly: Any) -> None:
        if self.assembly is None or assembly.incarnation >= self.incarnation:
            assemble(self, assembly)

    put(NodeState, "assemble", anything)


def _past_saves() -> None:
    begin = SaveRequests.begin

    def anything(self: SaveRequests, connection: Any, request: Any) -> None:
        ledger = self._state.need_ledger()
        if request.version.incarnation < ledger.incarnation:
            request = _as_of(request, Version(ledger.incarnation, request.version.step))
        begin(self, connection, request)

    put(SaveRequests, "begin", anything)


def _as_of(request: Any, version: Version) -> Any:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return type(request)(**{**fields, "version": version})


def _past_is_served() -> None:
    put(PeerRequests, "_require_present", always(None))


def _everybody_may_say_everything() -> None:
    real = dispatch.Operations.__init__

    def init(self: dispatch.Operations, parts: dispatch.Parts) -> None:
        real(self, parts)
        everything = {message: what for table in self._table.values() for message, what in table.items()}
        self._table = dict.fromkeys(self._table, everything)

    put(dispatch.Operations, "__init__", init)


BUGS: dict[str, Callable[[], None]] = {
    "counted-before-it-is-here": _counted_before_it_is_here,
    "wire-unchecked": _wire_unchecked,
    "safest-replica-overwritten": _safest_replica_overwritten,
    "no-replicas": _no_replicas,
    "replicated-when-captured": _replicated_when_captured,
    "nobody-takes-over": _nobody_takes_over,
    "parts-differ-by-writer": _parts_differ_by_writer,
    "signs-for-ever": _signs_for_ever,
    "pins-of-another-order": _pins_of_another_order,
    "written-unproved": unproved_writes,
    "durable-when-ordered": _durable_when_ordered,
    "failed-commit-is-success": _failed_commit_is_success,
    "suspect-is-captured": _suspect_is_captured,
    "nothing-is-retried": _nothing_is_retried,
    "one-is-kept": _one_is_kept,
    "unfinished-counts": _unfinished_counts,
    "inventory-of-one": _inventory_of_one,
    "past-assembles": _past_assembles,
    "past-saves": _past_saves,
    "past-is-served": _past_is_served,
    "everybody-may-say-everything": _everybody_may_say_everything,
}
