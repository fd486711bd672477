"""`plan`: what a job will cost before it runs: who holds, copies, writes and backs up what, and what a lost node takes.

The job comes from a description (`cli.planning.job_file`), from a script that is rehearsed without memory
(`cli.planning.script_layout`), from a checkpoint, or from a job that runs (`cli.running_job`). The mesh of all but the first is read back from who holds what and may
then be given other sizes. The numbers are those of `core.layout.cost_plan`, so they are those of the job: bytes of tensors,
to which image headers and values add a few KiB per file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.base.config import MAX_SLOTS, Config
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.cli import console, rank_ranges
from holdfast.cli.command_options import Json, LikeRun, RanksPerNode, Redundancy, RunningJob
from holdfast.cli.groups_command import saved_shards
from holdfast.cli.planning import interval_advice, job_file, loss_report
from holdfast.cli.planning.script_layout import layout_of_script
from holdfast.cli.running_job import live_job
from holdfast.cli.stored.versions import choose
from holdfast.core.layout.cost_plan import JobPlan, uniform
from holdfast.core.layout.job_layout import Form, JobLayout, Mesh, Tensor, offsets
from holdfast.core.layout.mesh_inference import infer, resized
from holdfast.core.layout.parity_groups import REPLICA, in_words, is_unprotected, members_wanted
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.memory.memory_budget import DEFAULT_SHARE
from holdfast.tiers.memory.slots import SPARE_BYTES, slot_bytes
from holdfast.tiers.storage.version_store import open_storage

MAX_ROWS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """Says where the layout comes from (a description, a script, a checkpoint, a running job), and what is asked of it.

    Attributes:
        file: a description, or a script if its name ends in `.py`.
        nnodes: on which the script runs.
        job: where a running job saves to; without any source the only one that runs here.
    """

    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="A description (TOML, JSON), or a training script (.py).")
    ] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of the training script.")
    ] = None
    checkpoint: Annotated[str | None, typer.Option("--from", metavar="ROOT", help="Use a checkpoint's layout.")] = None
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Version of that checkpoint.")] = None
    mesh: Annotated[str | None, typer.Option(metavar="SIZES", help="Use mesh sizes: 4x2, or dp=4,tp=2.")] = None
    ranks_per_node: RanksPerNode = None
    job: RunningJob = None
    nnodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes that the script runs on.")] = 1
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Mean time between failures of one node.")] = "5000h"
    step_time: Annotated[str, typer.Option(metavar="TIME", help="Duration of one training step.")] = "1s"
    save_time: Annotated[
        str, typer.Option(metavar="TIME", help="Time that a save stops training; by default what it copies at 5 GB/s.")
    ] = ""
    like: LikeRun = None
    without_replicas: Annotated[bool, typer.Option("--without-replicas", help="Assume no replicas.")] = False
    redundancy: Redundancy = None
    lost_nodes: Annotated[str, typer.Option(metavar="0,4-6", help="Show what is lost with these nodes.")] = ""
    lost_ranks: Annotated[str, typer.Option(metavar="0,4-6", help="Show what is lost with these ranks.")] = ""
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan the step of a pipeline (TOML, JSON), and a checkpoint in its bubbles."),
    ] = None
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write that step as a page.")] = None
    json: Json = False

    @property
    def is_live(self) -> bool:
        """Return whether a running job is asked."""
        return self.file is None and self.checkpoint is None and self.version is None


def _layout(source: Options) -> tuple[JobLayout, int | None]:
    """The layout, and the ranks per node if the source says so."""
    if (source.file is None) == (source.checkpoint is None) or (
        source.version is not None and source.checkpoint is None
    ):
        raise UsageError(
            "a plan is made of a description, of a script, or of a checkpoint",
            remedy="`holdfast plan job.toml`, `holdfast plan train.py --ranks-per-node 8`, or `holdfast plan --from ROOT`",
        )
    if source.file is not None and source.file.endswith(".py"):
        return _of_script(source), source.ranks_per_node
    if source.file is not None:
        described = job_file.load(Path(source.file))
        main = job_file.mesh_of(described.mesh)
        main = main if source.mesh is None else _mesh(source.mesh, main)
        return job_file.layout_of(described, main), described.ranks_per_node
    assert source.checkpoint is not None  # one of them is given
    storage = open_storage(source.checkpoint, Events())
    manifest = storage.manifest(choose(storage, source.version))
    layout = infer(manifest.world_size, saved_shards(storage, manifest))
    return layout if source.mesh is None else resized(layout, _mesh(source.mesh, layout.meshes[0])), None


def _of_script(source: Options) -> JobLayout:
    ranks_per_node = source.ranks_per_node
    if ranks_per_node is None:
        raise UsageError("how many ranks the script has is not known", remedy="give --ranks-per-node, and --nnodes")
    assert source.file is not None
    world_size = source.nnodes * ranks_per_node
    arguments = source.arguments or ()
    layout = layout_of_script(source.file, arguments, world_size=world_size, ranks_per_node=ranks_per_node)
    return layout if source.mesh is None else resized(layout, _mesh(source.mesh, layout.meshes[0]))


def _mesh(text: str, like: Mesh) -> Mesh:
    """`4x2` (all sizes, outermost first) or `dp=4,tp=2` (those that change)."""
    try:
        if "=" not in text:
            sizes = tuple(map(int, text.split("x")))
            names = like.names if len(sizes) == len(like.sizes) else tuple(f"dim{i}" for i in range(len(sizes)))
            return Mesh(names, sizes)
        pairs = (part.split("=") for part in text.split(","))
        changed = {name.strip(): int(size) for name, size in pairs}
    except ValueError:
        raise UsageError(f"{text!r} is no mesh", remedy="write 4x2, or dp=4,tp=2") from None
    if strange := sorted(set(changed) - set(like.names)):
        raise UsageError(f"the mesh {like} has no axis {strange[0]!r}")
    return Mesh(like.names, tuple(changed.get(n, size) for n, size in zip(like.names, like.sizes, strict=True)))


def plan(options: Options, assumed: interval_advice.Assumptions) -> int:
    """`holdfast plan`; the exit code: 1 if some part of some tensor would be lost with one node, or with those in question."""
    lost = loss_report.Question(options.lost_nodes, options.lost_ranks)
    redundancy, replicas = options.redundancy, not options.without_replicas
    if options.is_live and options.mesh is None:
        live = live_job(options.job)
        topology = live.topology if redundancy is None else replace(live.topology, redundancy=_known(redundancy))
        costs = JobPlan(infer(topology.world_size, live.shards), topology)
    else:
        layout, described = _layout(options)
        per_node = options.ranks_per_node or described
        if per_node is None:
            raise UsageError("how many ranks share a node is not known", remedy="give --ranks-per-node")
        costs = JobPlan(layout, uniform(layout.world_size, per_node, _known(redundancy or REPLICA)))
    safe = replicas and not is_unprotected(costs.topology)
    twins = costs.census.twins()
    advice = interval_advice.advise(costs, assumed)
    gone = loss_report.answer(costs, lost, replicas=replicas)
    if options.json:
        console.print_json(
            _document(costs, twins, safe=safe)
            | loss_report.document(gone)
            | {"cadence": interval_advice.document(advice)}
        )
    else:
        _print_job(costs)
        rank_ranges.print_stand_ins(twins, costs.topology)
        _print_nodes(costs)
        _print_memory(costs)
        _print_losses(costs, safe=safe)
        loss_report.print_answer(gone, costs.topology)
        interval_advice.print_advice(advice, assumed)
    if gone is not None:
        return console.PROBLEM if gone.losses else console.GOOD
    return console.GOOD if safe or not any(costs.nodes.alone) else console.PROBLEM


def _known(redundancy: str) -> str:
    try:
        members_wanted(redundancy)
    except ValueError as error:
        raise UsageError(str(error), remedy="give --redundancy replica, parity:8 or none") from None
    return redundancy


def _forms(layout: JobLayout) -> dict[Form, list[Tensor]]:
    found: dict[Form, list[Tensor]] = {}
    for tensor in layout.tensors:
        found.setdefault(layout.form(tensor), []).append(tensor)
    return found


def _print_job(costs: JobPlan) -> None:
    layout, num_nodes = costs.layout, len(costs.topology.nodes)
    meshes = ", ".join(map(str, layout.meshes))
    counted = [rank_ranges.count_text(layout.world_size, "rank"), rank_ranges.count_text(num_nodes, "node")]
    console.say(f"{' on '.join(counted)}, mesh {meshes}")
    once, held = console.size_text(costs.unique_bytes), console.size_text(sum(costs.ranks.held))
    files = rank_ranges.count_text(costs.num_bundles, "file")
    console.say(f"{len(layout.tensors)} tensors: {once} once, {held} in all ranks; {files} per version\n")
    rows = []
    for form, tensors in _forms(layout).items():
        groups = costs.census.groups[form]
        base = min(groups)
        members = [base + step for step in offsets(form)]
        size = console.size_text(costs.census.kinds[groups[base]].num_bytes)
        rows.append(
            (
                len(tensors),
                len(members),
                len(groups),
                rank_ranges.ranks_text(members),
                size,
                tensors[0].name,
            )
        )
    console.print_table(("tensors", "ranks alike", "groups", "the first", "its bytes", "tensors like"), rows)


def _host_bytes(costs: JobPlan, node: int, num_slots: int = Config().num_slots) -> int:
    """Memory of a node's slots as its keeper reserves it, replicas included."""
    return sum(map(slot_bytes, costs.slots(node, num_slots, spare_bytes=SPARE_BYTES)))


def _print_nodes(costs: JobPlan) -> None:
    """A row per kind of node; kinds that read the same are one."""
    console.say()
    nodes = costs.nodes
    rows: dict[tuple[str, ...], list[int]] = {}
    for alike in costs.nodes_alike():
        node = alike[0]
        held = max(costs.ranks.held[rank] for rank in costs.topology.ranks_on(node))
        sizes = (held, nodes.copied[node], nodes.written[node], nodes.kept[node], _host_bytes(costs, node))
        rows.setdefault(tuple(map(console.size_text, sizes)), []).extend(alike)
    labels = costs.topology.nodes
    shown = [(rank_ranges.nodes_text(sorted(alike), labels), *cells) for cells, alike in rows.items()]
    keeps = "keeps parity" if costs.parity_groups else "keeps replicas"
    titles = ("nodes", "a rank holds", "a save copies", "writes", keeps, "host memory")
    console.print_table(titles, shown[:MAX_ROWS])
    if len(shown) > MAX_ROWS:
        console.say(f"... and {len(shown) - MAX_ROWS} more kinds of nodes; --json shows all")


def _print_memory(costs: JobPlan) -> None:
    """Print what a node has to allow, and what its kernel may do for it."""
    needed = max(_host_bytes(costs, alike[0]) for alike in costs.nodes_alike())
    console.say(
        f"\nA node allows a quarter of its memory, so host memory of {console.size_text(needed)} fits from "
        f"{console.size_text(DEFAULT_SHARE * needed)} on; with less set HOLDFAST_MEMORY_BUDGET, or the job saves to storage only."
    )
    most = max(_host_bytes(costs, alike[0], MAX_SLOTS) for alike in costs.nodes_alike())
    console.say(
        f"A third slot for each rank makes it {console.size_text(most)}. One is added where saves come faster than storage or "
        "replicas, if the budget has room for three more; with num_slots=3 it is there from the start."
    )
    if memory_pages.shared_memory_policy() not in memory_pages.HUGE_POLICIES:
        console.say(
            f"Nodes like this one make it by 4 KiB. As root: {memory_pages.HUGE_ADVICE} ({memory_pages.HUGE_GAIN})."
        )


def _print_losses(costs: JobPlan, *, safe: bool) -> None:
    """Print what is gone with any one node, and where it comes back from; nodes that lose the same in one line."""
    console.say()
    if not any(costs.nodes.alone):
        console.say("Any one node may die: every part of every tensor has a twin on another node.")
    found: dict[tuple[int, int, tuple[str, ...]], list[int]] = {}
    classes = costs.nodes_alike()
    for alike in classes[:MAX_ROWS]:
        alone = costs.nodes.alone[alike[0]]
        back = costs.nodes.copied[alike[0]] - alone
        found.setdefault((back, alone, tuple(costs.alone_on(alike[0]))), []).extend(alike)
    for (back, alone, names), nodes in found.items():
        way = "parity on the other nodes of its group" if costs.parity_groups else "the replica on the next node"
        fate = f"from {way}" if safe else "LOST, but for what is in storage"
        parts = [f"{console.size_text(back)} from twins"] if back or not alone else []
        parts += [f"{console.size_text(alone)} {fate}"] if alone else []
        which = rank_ranges.nodes_text(sorted(nodes), costs.topology.nodes)
        console.say(f"If {'' if len(nodes) == 1 else 'any one of nodes '}{which} dies: {', '.join(parts)}")
        if names:
            console.say(f"  {len(names)} tensors live there only: {rank_ranges.names_text(names)}")
    if len(classes) > MAX_ROWS:
        console.say("Further kinds of nodes: --json")
    if said := in_words(costs.topology):
        console.say(f"{said[0].upper()}{said[1:]}.")


def _document(costs: JobPlan, twins: Sequence[tuple[int, ...]], *, safe: bool) -> dict[str, Any]:
    layout = costs.layout
    classes = costs.nodes_alike()
    alone = {alike: costs.alone_on(alike[0]) for alike in classes}
    told = {} if costs.topology.redundancy == REPLICA else {"redundancy": costs.topology.redundancy}
    return told | {
        "world_size": layout.world_size,
        "meshes": [dict(zip(mesh.names, mesh.sizes, strict=True)) for mesh in layout.meshes],
        "unique_bytes": costs.unique_bytes,
        "held_bytes": sum(costs.ranks.held),
        "files": costs.num_bundles,
        "entries": [_tensor_document(costs, tensor) for tensor in layout.tensors],
        "interchangeable": rank_ranges.stand_ins_document(twins),
        "ranks": _ranks_document(costs),
        "nodes": [_node_document(costs, alike, alone[alike], safe=safe) for alike in classes],
        "unprotected": [] if safe else sorted({name for names in alone.values() for name in names}),
    }


def _tensor_document(costs: JobPlan, tensor: Tensor) -> dict[str, Any]:
    layout = costs.layout
    mesh = layout.meshes[tensor.mesh]
    first = next(layout.slices(tensor))
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "placements": {axis: str(p) for axis, p in zip(mesh.names, tensor.placements, strict=True)},
        "first_group": first.ranks,
        "first_bytes": first.num_bytes,
    }


def _ranks_document(costs: JobPlan) -> list[dict[str, Any]]:
    """Ranks with the same costs together."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank, row in enumerate(zip(costs.ranks.held, costs.ranks.copied, costs.ranks.replicated, strict=True)):
        found.setdefault(row, []).append(rank)
    return [
        {"ranks": ranks, "held_bytes": held, "copied_bytes": copied, "replicated_bytes": replicated}
        for (held, copied, replicated), ranks in found.items()
    ]


def _node_document(costs: JobPlan, alike: tuple[int, ...], alone: list[str], *, safe: bool) -> dict[str, Any]:
    node = alike[0]
    alone_bytes, back = costs.nodes.alone[node], costs.nodes.copied[node]
    return {
        "nodes": alike,
        "copied_bytes": back,
        "written_bytes": costs.nodes.written[node],
        "kept_replica_bytes": costs.nodes.kept[node],
        "host_bytes": _host_bytes(costs, node),
        "host_bytes_with_third_slots": _host_bytes(costs, node, MAX_SLOTS),
        "if_it_dies": {
            "from_twins_bytes": back - alone_bytes,
            "from_replica_bytes": alone_bytes if safe else 0,
            "lost_bytes": 0 if safe else alone_bytes,
            "alone": alone,
        },
    }
