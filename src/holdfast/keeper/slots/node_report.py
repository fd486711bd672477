"""Says what a keeper tells others of itself: its greeting, its job's descent, what it holds."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import Seal, Version
from holdfast.core.rank_runs import Runs, runs_of
from holdfast.keeper.rpc.messages import KEEPER, Assembly, Held, Hello, Inventory, pack, together
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.slot_pool import HeldSlot


def has_left(state: NodeState, assembly: Assembly) -> bool:
    """Return whether this node is no longer of the job of an assembly."""
    now = state.assembly
    return now is None or now.job_id != assembly.job_id


def greeting(state: NodeState, assembly: Assembly) -> Hello:
    """Return how this keeper introduces itself to others of its job."""
    return Hello(
        job=state.place.job,
        role=KEEPER,
        node=state.node,
        incarnation=assembly.incarnation,
        job_id=assembly.job_id,
    )


def descent(state: NodeState) -> tuple[str, tuple[tuple[int, Version | None], ...]]:
    """The job's id, and what its incarnations resumed from, the present one included once it has."""
    with state.lock:
        if state.assembly is None:
            return "", ()
        own = ((state.assembly.incarnation, state.resumed),) if state.is_resumed else ()
        return state.assembly.job_id, (*state.assembly.lineage, *own)


def inventory(state: NodeState) -> Inventory:
    """Return what this keeper holds, of whichever incarnation."""
    with state.lock:
        node = runs_of([state.node] if state.node >= 0 else [])
        rows = [
            Held(held.version, node, runs_of([] if held.replica else [held.rank]), held.preloaded, seals)
            for held in state.slot_pool.sealed()
            if held.version is not None and held.parity is None
            for seals in _by_group(held)
        ]
        pieces = (held.parity for held in state.slot_pool.sealed() if held.parity is not None and not held.condemned)
        condemned = {held.version for held in state.slot_pool.sealed() if held.version is not None and held.condemned}
        levels = {version: max(told.reached) for version, told in state.past.levels.items() if told.reached}
        return Inventory(
            held=tuple(rows),
            packed=together({version: bytes(pack(table)) for version, table in state.past.tables.items()}),
            suspects=tuple(state.past.suspects.items()),
            levels=tuple(levels.items()),
            reachable=(state.node,),
            parity=tuple(PieceCopy.of(state.node, piece) for piece in pieces),
            condemned=tuple(sorted(condemned)),
        )


def _by_group(held: HeldSlot) -> list[bytes]:
    """The seals of a slot's images by the group of ranks that has them, packed: alike on all nodes that hold the same."""
    groups: dict[Runs, list[Seal]] = {}
    for bundle_id, place in sorted(held.images.items()):
        if bundle_id not in held.condemned:
            groups.setdefault(place.ref.runs, []).append(replace(place.seal, chunk_digests=()))
    return [bytes(pack(seals)) for seals in groups.values()]
