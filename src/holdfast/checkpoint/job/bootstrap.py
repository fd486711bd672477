"""The job comes together: who runs where, one incarnation, one keeper per node, all told the same.

Rank 0 claims the root, keeps other jobs out and registers the incarnation; the first rank of each node starts its keeper or finds it; then
every rank connects and tells its keeper about the job. A fault on one rank is raised by all. A second restore in the
same process is a new incarnation over the same keepers.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsIndex

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, CorruptError, KeeperNotStarted, StorageFull, UsageError, VersionNotFound
from holdfast.checkpoint.job import collectives, wait_for_storage
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.job.wait_for_storage import WaitLimit
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.core.layout import parity_groups
from holdfast.core.model import Topology, Version
from holdfast.core.recovery.broadcast_tree import RANKS_PER_READER
from holdfast.core.scheduling.cadence import Cadence
from holdfast.core.versions import step_numbers
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.rpc.client import Assembly
from holdfast.keeper.rpc.paths import absolute_root, place_of
from holdfast.tiers.storage.read_limit import ReadLimit
from holdfast.tiers.storage.version_store import Storage

logger = logging.getLogger(__name__)

FIRST_START = (
    "mount it, or correct the path; a first start goes without `required=True`, `--expect-checkpoint` and the setting "
    "expect_checkpoint"
)

# Incarnation -> what it resumed from.
Resumed = dict[int, Version | None]


@dataclass(frozen=True, slots=True)
class VersionOverride:
    """An operator's wish (`--from-version`), as it counts at this start.

    Attributes:
        version: the version to go back to; None: the newest.
        ends: the operator's last wish is over, for this start has none: the same one counts again.
    """

    version: Version | None = None
    ends: bool = False

    def record(self, storage: Storage, incarnation: int, resumed: Version | None) -> None:
        """Records that it was fulfilled, if it was. Rank 0, right before what was resumed from is recorded."""
        if self.ends or (self.version is not None and self.version == resumed):
            storage.incarnations.record_wished(incarnation, self.version)


@dataclass(frozen=True, slots=True)
class Job:
    """The job of one incarnation, as every rank knows it.

    Attributes:
        no_keeper: why no rank has a keeper; empty if all have.
        wish: what the operator's wish comes to.
    """

    group: Ranks
    assembly: Assembly
    ranks_per_reader: int = RANKS_PER_READER
    no_keeper: str = ""
    wish: VersionOverride = VersionOverride()

    @property
    def incarnation(self) -> int:
        return self.assembly.incarnation

    @property
    def topology(self) -> Topology:
        """Return who runs where."""
        return self.assembly.topology

    @property
    def lineage(self) -> Lineage:
        """Return what the incarnations before this one resumed from."""
        return Lineage(dict(self.assembly.lineage))

    def version(self, step: int) -> Version:
        """`step` of this incarnation.

        Raises:
            UsageError: no version can be named by it.
        """
        return Version(self.incarnation, whole_number(step))


def whole_number(step: SupportsIndex) -> int:
    """Return a step as a plain number.

    Raises:
        UsageError: it is none, or no version can be named by it.
    """
    number = step_numbers.as_number(step)
    if isinstance(number, step_numbers.Reason):
        raise UsageError(number.what, remedy=number.remedy)
    return number


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Says what a restore was asked for.

    Attributes:
        version: only this one.
        fresh: the job is begun anew, whatever was there.
        strict: objects that do not fit are refused.
        required: there is something to go on from.
        wish: what the operator named; see `open_checkpointers.VersionOverride.version`.
    """

    version: Version | None = None
    fresh: bool = False
    strict: bool = True
    required: bool = False
    wish: str = ""


def assemble(
    group: Ranks,
    root: str,
    config: Config,
    *,
    storage: Storage,
    link: KeeperLink,
    asked: RestoreRequest = RestoreRequest(),  # frozen
) -> Job:
    """Brings the job together. Collective.

    Raises:
        HoldfastError: what any rank met, on every rank.
    """
    topology = _meet(group, root, config, storage.key_id)
    known = _known(group, absolute_root(root), asked)
    # In the middle of a run a path that refuses may come back; at its first start the operator wants to know at once.
    patience_s = config.close_timeout_s if known else 0.0
    patience = WaitLimit(patience_s)
    required = asked.required and not known
    limit = ReadLimit(config.close_timeout_s, 0, storage.where)
    occupy = partial(_occupy, storage, config.run_id, known=known, required=required)
    job_id, trouble = json.loads(wait_for_storage.share(group, partial(limit.run, occupy), patience))
    open_checkpointers.wish.works_on(absolute_root(root), job_id)
    first = topology.ranks_on(topology.node_of[group.rank])[0] == group.rank
    no_keeper = _connect(group, link, first=first, required=config.require_memory, patience_s=patience_s)
    addresses = () if no_keeper else _addresses(group, topology, link)
    seen = _seen(group, job_id, link)
    register = partial(_register, storage, seen, trouble, asked.wish)
    registered = json.loads(wait_for_storage.share(group, partial(limit.run, register), patience))
    kept = Cadence.parse(config.keep_every)
    assembly = Assembly(
        incarnation=registered["incarnation"],
        root=absolute_root(root),
        job_id=job_id,
        topology=topology,
        addresses=addresses,
        keep_last=config.keep_last,
        keep_every=kept.steps or 0,
        keep_every_s=kept.seconds or 0.0,
        lineage=tuple((number, Version.parse(text) if text else None) for number, text in registered["lineage"]),
    )
    if not no_keeper:
        collectives.together(group, lambda: link.assemble(assembly, storage.key_id))
    link.assembled(assembly)
    wish = VersionOverride(Version.parse(registered["back"]), registered["ends"])
    return Job(group, assembly, config.ranks_per_reader, no_keeper, wish)


def _connect(group: Ranks, link: KeeperLink, *, first: bool, required: bool, patience_s: float) -> str:
    """All ranks find their keeper, or none uses one: then why.

    The first rank of a node starts the keeper while the others wait, instead of all starting one. One that does not answer is
    waited for, `patience_s` at most: what the job goes on from may be in its memory alone.

    Raises:
        KeeperNotStarted: on some node, and the level in memory is `required`.
    """
    try:
        collectives.together(group, lambda: link.open(patience_s=patience_s) if first and link.client is None else None)
        collectives.together(group, lambda: link.open() if link.client is None else None)
    except KeeperNotStarted as error:
        if required:
            raise
        link.go_without_keeper(finished=False)
        return str(error)
    link.recollect()
    return ""


def _known(group: Ranks, root: str, asked: RestoreRequest) -> str:
    """The id of the job that the path belonged to earlier in this run, as any rank's launcher knows; empty: to none.

    An empty path is then no beginning: it was unmounted, or removed.
    """
    mine = "" if asked.fresh else open_checkpointers.wish.jobs.get(root, "")
    return next((job for job in collectives.gather_json(group, mine) if job), "")


def _meet(group: Ranks, root: str, config: Config, key_id: str) -> Topology:
    """Return who runs where.

    Raises:
        UsageError: the ranks are not of one job or release, or name different redundancy or retention. ConfigError: they have different keys.
    """
    node, job = place_of(root, config).node, [absolute_root(root), config.run_id]
    kept = f"keep_last {config.keep_last}, keep_every {Cadence.parse(config.keep_every).text!r}"
    rows = collectives.gather_json(
        group, [*job, node, config.rack_label, config.backup_node, config.redundancy, key_id, kept]
    )
    if len({len(row) for row in rows}) > 1:
        raise UsageError("the ranks run different releases of holdfast", remedy="install the same one on every node")
    different = sorted({(row[0], row[1]) for row in rows})
    if len(different) > 1:
        raise UsageError(
            f"the ranks name different jobs: {' and '.join(f'{path} (run {run})' for path, run in different)}",
            remedy="give every rank the same path and run id",
        )
    for what, column in (("redundancy", 5), ("retention", 7)):
        if len(ways := sorted({row[column] for row in rows})) > 1:
            raise UsageError(
                f"the ranks name different {what}: {' and '.join(ways)}", remedy="give every rank the same"
            )
    _require_one_key([(row[2], row[6]) for row in rows])
    nodes = tuple(dict.fromkeys(row[2] for row in rows))
    firsts = [next(row for row in rows if row[2] == node) for node in nodes]
    racks = tuple(row[3] for row in firsts)
    topology = Topology(
        nodes,
        tuple(nodes.index(row[2]) for row in rows),
        racks if any(racks) else (),
        _named_backups(nodes, [row[4] for row in firsts]),
        config.redundancy,
    )
    if group.rank == 0 and (said := parity_groups.in_words(topology)):
        logger.warning("%s", said)
    return topology


def _require_one_key(rows: list[tuple[str, str]]) -> None:
    """Requires that all nodes encrypt alike: a version of several keys opens with none, and one without a key writes in the clear.

    Args:
        rows: node and id of its key, of every rank.

    Raises:
        ConfigError: they do not; names a node of each kind.
    """
    nodes = {key: node for node, key in reversed(rows)}
    if len(nodes) > 1:
        told = [f"node {node} has {f'key {key}' if key else 'none'}" for key, node in sorted(nodes.items())]
        raise ConfigError(
            f"the ranks have different encryption keys: {', '.join(told)}",
            where="encryption_key",
            remedy="give every node the same key, and settings that name it (HOLDFAST_CONFIG)",
        )


def _named_backups(nodes: tuple[str, ...], names: list[str]) -> tuple[int, ...]:
    """The nodes that were named as backups, by index.

    Raises:
        UsageError: a name that no node of the job bears, or a node's own.
    """
    for node, name in zip(nodes, names, strict=True):
        if name and (name not in nodes or name == node):
            raise UsageError(
                f"node {node} names {name!r} as its backup", remedy=f"name another node of the job: {', '.join(nodes)}"
            )
    return tuple(nodes.index(name) if name else -1 for name in names) if any(names) else ()


def _addresses(group: Ranks, topology: Topology, link: KeeperLink) -> tuple[str, ...]:
    """Return where the keepers find each other; each knows its own address, its port being the kernel's choice."""
    client = link.last_client
    assert client is not None, "this rank has found its keeper; that it ended since, all ranks hear together"
    rows = collectives.gather_json(group, client.welcome.address)
    return tuple(rows[topology.ranks_on(node)[0]] for node in range(len(topology.nodes)))


def _occupy(storage: Storage, run_id: str, *, known: str, required: bool) -> bytes:
    """Rank 0: the root is ours, and nobody else works on it. Before any keeper is asked: it may be another job's.

    Returns:
        the job's id, and why the lock could not be written, if it could not.

    Raises:
        VersionNotFound: a checkpoint is required, and the path is empty. StorageError: it was not empty earlier in this run.
    """
    if known:
        storage.require_job(known)
    elif required:
        try:
            storage.job_id()
        except VersionNotFound as error:
            what = "a checkpoint was expected, and nothing was ever saved here"
            raise VersionNotFound(what, where=storage.where, remedy=FIRST_START) from error
    job_id = storage.claim()
    try:
        storage.run_lock.take(run_id)
    except StorageFull as error:
        return json.dumps([job_id, str(error)]).encode()
    return json.dumps([job_id, ""]).encode()


def _seen(group: Ranks, job_id: str, link: KeeperLink) -> tuple[int, Resumed]:
    """The highest incarnation that any keeper has seen, and what they know of the lineage."""
    welcome = link.client.welcome if link.client is not None else None
    own, known = (welcome.incarnation, welcome.lineage) if welcome and welcome.job_id == job_id else (0, ())
    last = link.assembly
    if last is not None and last.job_id == job_id:  # a second restore in this process
        own = max(own, last.incarnation)
    rows = collectives.gather_json(group, [own, [[number, str(version or "")] for number, version in known]])
    lineage = {number: Version.parse(text) for _, records in rows for number, text in records}
    return max(number for number, _ in rows), lineage


def _register(storage: Storage, seen: tuple[int, Resumed], trouble: str, wish: str) -> bytes:
    """Rank 0: this incarnation has a number, and what the operator wishes is known.

    Higher than all that keepers have seen: an incarnation that began while nothing could be written is known to them
    alone. If nothing can be written now and there is something in memory to come back to, that is what this one does:
    it is registered before anything of it is committed (`tiers.storage.incarnations.Incarnations.enlist`).
    """
    highest, known = seen
    lineage = {**known, **storage.incarnations.lineage()}
    back, ends = _wish(storage, wish)
    try:
        if trouble:
            raise StorageFull(trouble, where=storage.where, remedy="free space")
        _warn_of_unknown(storage, highest)
        number = storage.incarnations.register(above=highest)
    except StorageFull as error:
        if not highest:
            raise
        number = max(highest, storage.incarnations.highest()) + 1
        logger.warning(
            "incarnation %d cannot be registered yet (%s): the job comes back from memory, and nothing becomes durable "
            "until there is space",
            number,
            error,
        )
    facts: dict[str, Any] = {
        "incarnation": number,
        "lineage": [[n, str(version) if version else ""] for n, version in sorted(lineage.items()) if n < number],
        "back": back,
        "ends": ends,
    }
    return json.dumps(facts).encode()


def _warn_of_unknown(storage: Storage, highest: int) -> None:
    """Says that memory is of an incarnation which the path does not know. The path was full when that began, or it is an older
    copy of what was there: nothing tells which, and what is in memory may be all that is left. So it counts.
    """
    if storage.incarnations.highest() >= highest:
        return
    stored = storage.versions()
    newest = str(stored[-1]) if stored else ""
    back = f"--from-version {newest}, or restore(version={newest!r})" if newest else "restore(fresh=True)"
    logger.warning(
        "keepers hold incarnation %d, which %s does not know: it could not be written there, or the path was replaced by an "
        "older copy. The job goes on from the newest version, which may be in memory alone; the newest in storage is %s. To "
        "go on from storage instead: %s",
        highest,
        storage.where,
        newest or "none",
        back,
    )


def _wish(storage: Storage, text: str) -> tuple[str, bool]:
    """Returns the version to go back to (empty: none), and whether the wish that stands is over.

    A job that its scheduler starts again has the same command: its wish was fulfilled by the first start.
    """
    if not text:
        return "", False
    if text == NO_WISH:
        try:
            return "", storage.incarnations.fulfilled() is not None
        except CorruptError:
            return "", True
    done = storage.incarnations.fulfilled()
    if done is None or str(done[1]) != text:
        return text, False
    logger.warning(
        "--from-version %s was fulfilled by incarnation %d: this start goes on from the newest version. To go back there once "
        "more, start the job once without --from-version, or call restore(version=%r)",
        text,
        done[0],
        text,
    )
    return "", False
