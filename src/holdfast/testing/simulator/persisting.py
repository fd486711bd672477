"""The way to storage in the simulation: parts, manifest, retention; modelled after node.persist. Called by simulator.job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.core.commit import Announcement, CommitOrder, Kind, PartReport, to_retire
from holdfast.core.ledger import Reports
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Version
from holdfast.testing.simulator.keeper import Held, Keeper

if TYPE_CHECKING:
    from holdfast.testing.simulator.job import Job

KEEP_LAST = 2
AGAIN_S = 0.8
ATTEMPTS = 20


def heard(job: Job, keeper: Keeper, news: Announcement) -> None:
    """A PERSIST order: this node writes what it represents, from slots that are pinned until that ends."""
    if news.kind is Kind.PERSIST and keeper.ledger is not None:
        plan = keeper.ledger.to_persist(news.version)
        if plan:
            _write(job, keeper, news.version, f"part-{keeper.node}", plan)


def take_in(job: Job, keeper: Keeper, node: int, facts: Reports) -> None:  # noqa: ARG001 - by node where parts fail
    """What a node reports of its writing."""
    assert keeper.desk is not None
    for part in facts.parts:
        job.carry_out(keeper, keeper.desk.board.written(part))


def tick(job: Job, keeper: Keeper) -> None:
    """Nothing is due by time alone."""


def _write(
    job: Job, keeper: Keeper, version: Version, part: str, plan: Sequence[tuple[int, BundleRef]], attempt: int = 0
) -> None:
    held = {ref.bundle_id: keeper.find(rank, version) for rank, ref in plan}
    sources = {name: slot for name, slot in held.items() if slot is not None}
    if len(sources) < len(held):
        job.clock.say(f"node {keeper.node} no longer holds {version}")
        return
    pinned = list({id(slot): slot for slot in sources.values()}.values())
    _pin(pinned, 1)
    life = keeper.life

    def finish() -> None:
        if keeper.life != life or not keeper.alive:
            return
        for slot in pinned:
            if slot.view.version != version:
                from_now = slot.view.version
                job.broken("S5", f"{version} is being written from a slot that holds {from_now} by now")
        _pin(pinned, -1)
        if job.storage.down:
            if attempt < ATTEMPTS:
                job.clock.after(AGAIN_S, again)
            return
        bad = [name for name, slot in sources.items() if not slot.intact]
        if bad:
            job.clock.say(f"node {keeper.node} does not write {bad[0]} of {version}: its digest is wrong")
            return
        digests = {name: slot.content[name] for name, slot in sources.items()}
        job.storage.parts[version, part] = digests
        report = PartReport(version, keeper.node, part, 1, "d", tuple(digests))
        if keeper.ledger is not None and keeper.ledger.incarnation == version.incarnation:
            keeper.ledger.wrote(report)
            job.report(keeper, Reports(parts=(report,)))

    def again() -> None:
        if keeper.life == life and keeper.alive:
            _write(job, keeper, version, part, plan, attempt + 1)

    job.clock.after(job.storage.seconds(), finish)


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
    """What retention removes; the manifest first."""
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
