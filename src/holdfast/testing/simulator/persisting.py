"""The way to storage in the simulation: lines of writers, parts, manifest, retention; modelled after keeper.storage.writer_failover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from holdfast.core.model import Version
from holdfast.core.versions.coordinator_board import Action, Announcement, CommitOrder, Kind, PartReport, WriteFailure
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import Reports
from holdfast.core.versions.retention import to_retire
from holdfast.core.versions.slot_guard import SlotState
from holdfast.core.versions.writer_failover import Order, Part
from holdfast.testing.simulator.clock import Clock
from holdfast.testing.simulator.network import Storage
from holdfast.testing.simulator.observer import Observer
from holdfast.testing.simulator.simulated_keeper import Held, Keeper

KEEP_LAST = 2
AGAIN_S = 0.8
ATTEMPTS = 20
ABSENT_S = 2.0


class Job(Protocol):
    """The job, as far as storage is concerned."""

    clock: Clock
    storage: Storage
    observer: Observer
    keepers: list[Keeper]
    takeovers: int

    @property
    def incarnation(self) -> int:
        """The one that trains."""

    def report(self, keeper: Keeper, reports: Reports) -> None:
        """Facts to the coordinator."""

    def carry_out(self, keeper: Keeper, actions: Sequence[Action]) -> None:
        """Carry out what the board concluded."""

    def broken(self, invariant: str, what: str) -> None:
        """A promise does not hold."""


def heard(job: Job, keeper: Keeper, news: Announcement) -> None:
    """Hear what the coordinator says of a version on its way to storage, and of those who write it."""
    now, version, ledger = job.clock.now_s, news.version, keeper.ledger
    if ledger is None or version.incarnation != ledger.incarnation:
        return
    if news.kind is Kind.PERSIST:
        _carry_out(job, keeper, keeper.line.persist(version, ledger.bundles_of(version).parts, now))
    elif news.kind is Kind.DURABLE:
        keeper.line.forget(version)
    elif news.kind is Kind.AT_WORK:
        keeper.line.sign(version, news.node, now)
    elif news.kind is Kind.WRITTEN:
        keeper.line.written(version, news.node, news.parts)
        if news.report is not None:
            ledger.wrote(news.report)
    elif news.kind is Kind.FAILED and news.node != keeper.node:
        _carry_out(job, keeper, keeper.line.failed(version, news.node, news.parts, news.reason, now))


def take_in(job: Job, keeper: Keeper, node: int, facts: Reports) -> None:
    """Take in what a node reports of its writing."""
    assert keeper.desk is not None
    board = keeper.desk.board
    for part in facts.parts:
        job.carry_out(keeper, board.written(part))
    for failure in facts.failures:
        job.carry_out(keeper, board.failed(node, failure))
    job.carry_out(keeper, board.at_work(node, facts.at_work))


def tick(job: Job, keeper: Keeper) -> None:
    """Leases end; the coordinator says of nodes that are missing that they write nothing."""
    now, desk = job.clock.now_s, keeper.desk
    _carry_out(job, keeper, keeper.line.tick(now))
    if desk is None:
        return
    missing = set(range(len(job.keepers))) - desk.followers
    for node in missing:
        since = desk.missing.setdefault(node, now)
        if now - since > ABSENT_S and node not in desk.absent:
            desk.absent.add(node)
            job.carry_out(keeper, desk.board.lost(node))
    desk.missing = {node: since for node, since in desk.missing.items() if node in missing}
    desk.absent &= missing


def _carry_out(job: Job, keeper: Keeper, orders: Iterable[Order]) -> None:
    for order in orders:
        if order.term:
            job.clock.say(f"node {keeper.node} takes over {order.version} in term {order.term}")
            job.takeovers += 1
        for part in order.parts:
            _write(job, keeper, order.version, part)


def _write(job: Job, keeper: Keeper, version: Version, part: Part, attempt: int = 0) -> None:
    sources = {ref.bundle_id: _find(keeper, version, ref.bundle_id) for ref in part.refs}
    held = {name: slot for name, slot in sources.items() if slot is not None}
    if len(held) < len(sources):
        _failed(job, keeper, version, part, "it does not hold the bytes any more")
        return
    pinned = list({id(slot): slot for slot in held.values()}.values())
    _pin(pinned, 1)
    life = keeper.life

    def finish() -> None:
        if keeper.life != life or not keeper.alive:
            return
        for slot in pinned:
            if slot.view.version != version or slot.view.state is not SlotState.SEALED:
                job.broken("S5", f"{version} is being written from a slot that holds {slot.view.version} by now")
        _pin(pinned, -1)
        if job.storage.down:
            if attempt < ATTEMPTS:
                job.clock.after(AGAIN_S, again)
            return
        bad = [name for name, slot in held.items() if slot.seals[name] != slot.content[name]]
        if bad:
            _failed(job, keeper, version, part, f"the digest of {bad[0]} is wrong")
            return
        digests = {name: slot.content[name] for name, slot in held.items()}
        job.storage.parts[version, f"part-{part.index}"] = digests
        report = PartReport(version, keeper.node, f"part-{part.index}", 1, "d", tuple(digests), part.index)
        if keeper.ledger is not None and keeper.ledger.incarnation == version.incarnation:
            keeper.line.written(version, keeper.node, (part.index,))
            keeper.ledger.wrote(report)
            job.report(keeper, Reports(parts=(report,)))

    def again() -> None:
        if keeper.life == life and keeper.alive:
            job.report(keeper, Reports(at_work=(version,)))
            _write(job, keeper, version, part, attempt + 1)

    job.report(keeper, Reports(at_work=(version,)))
    job.clock.after(job.storage.seconds(), finish)


def _failed(job: Job, keeper: Keeper, version: Version, part: Part, reason: str) -> None:
    job.clock.say(f"node {keeper.node} does not write part {part.index} of {version}: {reason}")
    if keeper.ledger is not None and keeper.ledger.incarnation == version.incarnation:
        keeper.line.failed(version, keeper.node, (part.index,), reason, job.clock.now_s)
        job.report(keeper, Reports(failures=(WriteFailure(version, (part.index,), reason, True),)))


def _find(keeper: Keeper, version: Version, bundle_id: str) -> Held | None:
    """A slot of the node, own or replica, with the bundle."""
    return next((held for v, _, name, held in keeper.copies() if v == version and name == bundle_id), None)


def _pin(slots: Sequence[Held], more: int) -> None:
    for slot in slots:
        slot.view = replace(slot.view, pins=max(0, slot.view.pins + more))


def commit(job: Job, keeper: Keeper, order: CommitOrder) -> None:
    """The coordinator's node writes the root manifest; afterwards retention may run."""
    life = keeper.life

    def finish() -> None:
        desk = keeper.desk
        if keeper.life != life or not keeper.alive or desk is None:
            return
        content = {b: d for part in order.parts for b, d in job.storage.parts[order.version, part.part].items()}
        job.observer.check_manifest(order.version, content)
        if job.storage.commit(order.version, content):
            job.clock.say(f"node {keeper.node} committed {order.version}")
            _retire(job)
            job.carry_out(keeper, desk.board.committed(order.version))
            return
        desk.board.commit_failed(order.version)
        job.clock.after(AGAIN_S, again)

    def again() -> None:
        desk = keeper.desk
        if keeper.life == life and keeper.alive and desk is not None and order.version.incarnation == job.incarnation:
            job.carry_out(keeper, desk.board.written(order.parts[0]))

    job.clock.after(job.storage.seconds() / 2, finish)


def _retire(job: Job) -> None:
    """Remove what retention removes; the manifest first."""
    storage = job.storage
    lineage = Lineage(dict(storage.resumed))
    start = storage.resumed.get(storage.incarnation)
    retired = to_retire(
        storage.manifests, keep_last=KEEP_LAST, keep_every=0, protected=[start] if start else [], lineage=lineage
    )
    job.observer.check_retention(retired, storage, lineage)
    for version in retired:
        del storage.manifests[version]
        storage.removed.add(version)
