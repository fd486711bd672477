"""`plan`: what a job will cost before it runs: who holds, copies, writes and backs up what, and what a lost node takes.

The job comes from a description (`tools.description`) or from a checkpoint, whose mesh is read back from who held what
and may then be given other sizes. The numbers are those of `core.plan`, so they are those of the job: bytes of tensors,
to which image headers and values add a few KiB per file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.core.census import Census
from holdfast.core.inferred import infer, resized
from holdfast.core.layout import Form, JobLayout, Mesh, Tensor, offsets
from holdfast.core.plan import JobPlan, uniform
from holdfast.tiers.memory import slot_bytes
from holdfast.tiers.storage import open_storage
from holdfast.tools import description, output, picture
from holdfast.tools.groups import choose, saved_shards

MAX_ROWS = 20


def from_file(path: str, mesh: str | None) -> tuple[JobLayout, int | None]:
    """The layout that a file describes, with other mesh sizes if given; and its ranks per node."""
    described = description.load(Path(path))
    main = description.mesh_of(described.mesh)
    return description.layout_of(described, main if mesh is None else _mesh(mesh, main)), described.ranks_per_node


def from_checkpoint(root: str, version: str | None, mesh: str | None) -> JobLayout:
    """The layout behind a version, with other mesh sizes if given."""
    storage = open_storage(root, Events())
    manifest = storage.manifest(choose(storage, version))
    layout = infer(manifest.world_size, saved_shards(storage, manifest))
    return layout if mesh is None else resized(layout, _mesh(mesh, layout.meshes[0]))


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


def plan(layout: JobLayout, *, ranks_per_node: int, replicas: bool, as_json: bool) -> int:
    """`holdfast plan`; the exit code: 1 if some part of some tensor would be lost with one node."""
    costs = JobPlan(layout, uniform(layout.world_size, ranks_per_node))
    safe = replicas and len(costs.topology.nodes) > 1
    twins = costs.census.twins()
    if as_json:
        output.print_json(_document(costs, twins, safe=safe))
    else:
        _print_job(costs)
        picture.print_stand_ins(twins, costs.topology)
        _print_nodes(costs)
        _print_losses(costs, safe=safe)
    return output.GOOD if safe or not any(costs.nodes.alone) else output.PROBLEM


def _forms(layout: JobLayout) -> dict[Form, list[Tensor]]:
    found: dict[Form, list[Tensor]] = {}
    for tensor in layout.tensors:
        found.setdefault(layout.form(tensor), []).append(tensor)
    return found


def _print_job(costs: JobPlan) -> None:
    layout, num_nodes = costs.layout, len(costs.topology.nodes)
    meshes = ", ".join(map(str, layout.meshes))
    print(f"{layout.world_size} ranks on {num_nodes} nodes, mesh {meshes}")
    once, held = output.size_text(costs.unique_bytes), output.size_text(sum(costs.ranks.held))
    print(f"{len(layout.tensors)} tensors: {once} once, {held} in all ranks; {costs.num_bundles} files per version\n")
    rows = []
    for form, tensors in _forms(layout).items():
        groups = costs.census.groups[form]
        largest = max(_kind_bytes(costs.census, kind) for kind in set(groups.values()))
        members = [min(groups) + step for step in offsets(form)]
        rows.append(
            (
                len(tensors),
                len(members),
                len(groups),
                picture.ranks_text(members),
                output.size_text(largest),
                tensors[0].name,
            )
        )
    output.print_table(("tensors", "ranks alike", "groups", "the first", "at most", "tensors like"), rows)


def _kind_bytes(census: Census, kind: int) -> int:
    return census.kinds[kind].num_bytes


def _host_bytes(costs: JobPlan, node: int) -> int:
    """Memory of a node's slots as the keeper reserves it, replicas included."""
    slots = Config().num_slots
    own = sum(slots * slot_bytes(costs.ranks.copied[rank]) for rank in costs.topology.ranks_on(node))
    kept_for = (node - 1) % len(costs.topology.nodes)
    if not costs.nodes.kept[node]:
        return own
    sources = (costs.ranks.replicated[rank] for rank in costs.topology.ranks_on(kept_for))
    return own + sum(2 * slot_bytes(num_bytes) for num_bytes in sources if num_bytes)


def _print_nodes(costs: JobPlan) -> None:
    print()
    classes, nodes = costs.nodes_alike(), costs.nodes
    rows = []
    for alike in classes[:MAX_ROWS]:
        node = alike[0]
        held = max(costs.ranks.held[rank] for rank in costs.topology.ranks_on(node))
        sizes = (held, nodes.copied[node], nodes.written[node], nodes.kept[node], _host_bytes(costs, node))
        rows.append((picture.ranks_text(alike), *map(output.size_text, sizes)))
    output.print_table(("nodes", "a rank holds", "a save copies", "writes", "keeps replicas", "host memory"), rows)
    if len(classes) > MAX_ROWS:
        print(f"... and {len(classes) - MAX_ROWS} more kinds of nodes; --json shows all")


def _print_losses(costs: JobPlan, *, safe: bool) -> None:
    print()
    if not any(costs.nodes.alone):
        print("Any one node may die: every part of every tensor has a twin on another node.")
    for alike in costs.nodes_alike()[:MAX_ROWS]:
        node = alike[0]
        alone, back = costs.nodes.alone[node], costs.nodes.copied[node]
        where = f"node {picture.ranks_text(alike)}"
        sources = f"{output.size_text(back - alone)} from twins"
        if not alone:
            print(f"{where} dies: {sources}.")
            continue
        names = costs.alone_on(node)
        rescue = f"{output.size_text(alone)} from the replica on the next node" if safe else ""
        fate = rescue or f"{output.size_text(alone)} LOST, but for what is in storage"
        print(f"{where} dies: {sources}, {fate}: {len(names)} tensors live there only.")
        print(f"  {picture.names_text(names)}")


def _document(costs: JobPlan, twins: Sequence[tuple[int, ...]], *, safe: bool) -> dict[str, Any]:
    layout = costs.layout
    classes = costs.nodes_alike()
    alone = {alike: costs.alone_on(alike[0]) for alike in classes}
    return {
        "world_size": layout.world_size,
        "meshes": [dict(zip(mesh.names, mesh.sizes, strict=True)) for mesh in layout.meshes],
        "unique_bytes": costs.unique_bytes,
        "held_bytes": sum(costs.ranks.held),
        "files": costs.num_bundles,
        "entries": [_tensor_document(costs, tensor) for tensor in layout.tensors],
        "interchangeable": picture.stand_ins_document(twins),
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
        "if_it_dies": {
            "from_twins_bytes": back - alone_bytes,
            "from_replica_bytes": alone_bytes if safe else 0,
            "lost_bytes": 0 if safe else alone_bytes,
            "alone": alone,
        },
    }
