"""Says what a keeper tells others of itself: its greeting, its job's descent, what it holds."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.layout.parity_stripes import PieceCopy
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import MemoryCopy
from holdfast.keeper.rpc.messages import KEEPER, Assembly, Hello, Inventory
from holdfast.keeper.slots.keeper_state import NodeState


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
        copies = [
            MemoryCopy(
                held.version,
                state.node,
                None if held.replica else held.rank,
                replace(place.seal, chunk_digests=()),
                held.preloaded,
            )
            for held in state.slot_pool.sealed()
            if held.version is not None and held.parity is None
            for bundle_id, place in held.images.items()
            if bundle_id not in held.condemned
        ]
        pieces = (held.parity for held in state.slot_pool.sealed() if held.parity is not None and not held.condemned)
        condemned = {held.version for held in state.slot_pool.sealed() if held.version is not None and held.condemned}
        levels = {version: max(told.reached) for version, told in state.past.levels.items() if told.reached}
        return Inventory(
            copies=tuple(copies),
            tables=tuple(state.past.tables.items()),
            suspects=tuple(state.past.suspects.items()),
            levels=tuple(levels.items()),
            reachable=(state.node,),
            parity=tuple(PieceCopy.of(state.node, piece) for piece in pieces),
            condemned=tuple(sorted(condemned)),
        )
