"""A job that runs on this machine, as its keepers know it: asks their sockets, joins what they say.

Keepers of other machines are not asked: of bundles whose ranks all live there only group and bytes are known, and they
are named by their id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import msgspec

from holdfast.base.errors import HoldfastError, KeeperError, UsageError
from holdfast.cli.status import ASK_TIMEOUT_S, places
from holdfast.core.layout.parity_groups import REPLICA
from holdfast.core.model import Extent, Shard, Topology
from holdfast.core.rank_runs import Runs, spread
from holdfast.keeper.rpc.paths import absolute_root
from holdfast.keeper.rpc.viewer import KeeperViewer


class _Bundle(msgspec.Struct, frozen=True):
    bundle: str
    runs: Runs
    index: int
    count: int
    bytes: int


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class _Inside(msgspec.Struct, frozen=True):
    """Holds what is needed here of one keeper's answer; docs/spec/keeper.md, section 6."""

    root: str
    incarnation: int
    nodes: tuple[str, ...]
    node_of: tuple[int, ...]
    bundles: tuple[_Bundle, ...]
    entries: dict[str, tuple[_Piece, ...]]
    redundancy: str = ""


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A running job.

    Attributes:
        incarnation: its recovery.
        shards: every different part of every tensor.
    """

    root: str
    incarnation: int
    topology: Topology
    shards: tuple[Shard, ...]


def live_job(root: str | None) -> LiveJob:
    """The job that saves to `root`, or the only one that runs here.

    Raises:
        UsageError: no such job, several, or one whose ranks have not come together yet.
    """
    answers = list(_answers())
    jobs = sorted({answer.root for _, answer in answers})
    wanted = absolute_root(root) if root is not None else jobs[0] if len(jobs) == 1 else None
    if wanted is None or wanted not in jobs:
        running = f"running: {', '.join(jobs)}" if jobs else "no keeper of a job answers here"
        what = "no job is named" if root is None else f"no job that saves to {wanted} runs here"
        raise UsageError(f"{what}; {running}", remedy="give --job ROOT; for a checkpoint or a plan see --help")
    here = [(label, answer) for label, answer in answers if answer.root == wanted]
    newest = max(answer.incarnation for _, answer in here)
    here = [(label, answer) for label, answer in here if answer.incarnation == newest]
    first = here[0][1]
    return LiveJob(
        wanted,
        newest,
        Topology(first.nodes, first.node_of, redundancy=first.redundancy or REPLICA),
        tuple(_shards([answer for _, answer in here])),
    )


def _answers() -> list[tuple[str, _Inside]]:
    """Return what every keeper of this machine says that serves a job."""
    found = []
    for place in places(None):
        try:
            client = KeeperViewer.connect(place.socket, job=place.job, timeout_s=ASK_TIMEOUT_S)
        except HoldfastError:
            continue  # `holdfast status` tells of keepers that do not answer
        try:
            answer = msgspec.msgpack.decode(client.inside(timeout_s=ASK_TIMEOUT_S), type=_Inside)
        except msgspec.MsgspecError as error:
            raise KeeperError(f"the keeper of node {place.node} speaks otherwise: {error}") from error
        finally:
            client.close()
        if answer.root:
            found.append((place.node, answer))
    return found


def _shards(answers: list[_Inside]) -> list[Shard]:
    """Pieces put together again, per tensor and group."""
    bundles = {one.bundle: one for answer in answers for one in answer.bundles}
    entries = {bundle: pieces for answer in answers for bundle, pieces in answer.entries.items()}
    pieces: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], _Piece]] = defaultdict(dict)
    found = []
    for bundle_id, bundle in sorted(bundles.items()):
        for piece in entries.get(bundle_id, ()):
            pieces[piece.name, spread(bundle.runs)][piece.offsets] = piece
        if bundle_id not in entries and bundle.bytes:
            extent = Extent((0,), (bundle.bytes,))
            found.append(Shard(f"bundle {bundle_id}", "U8", (bundle.bytes,), extent, spread(bundle.runs)))
    for (_, ranks), parts in sorted(pieces.items()):
        first = parts[min(parts)]
        rows = () if not first.lengths else (sum(piece.lengths[0] for piece in parts.values()),)
        extent = Extent(first.offsets, (*rows, *first.lengths[1:]))
        found.append(Shard(first.name, first.dtype, first.global_shape, extent, ranks))
    return found
