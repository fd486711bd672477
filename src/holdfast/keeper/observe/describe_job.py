"""Tells what the job is made of, as this keeper knows it: who runs where, every bundle, and what is in those that lie
here.

Bundles of the whole job are known from the first version on, which the coordinator's table names; before, those of the
local ranks are. What tensors are in a bundle is read from the headers of sealed images, so a bundle whose ranks all live
elsewhere has no names here. Plain values, for `groups` and `plan` of a job that runs; fields: docs/spec/keeper.md.
"""

from __future__ import annotations

from typing import Any

from holdfast.base.errors import CorruptError
from holdfast.core.model import BundleRef, Level
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import Entry


def describe(state: NodeState) -> dict[str, Any]:
    """The answer, taken under the state's lock: while it is held no sealed image is overwritten."""
    with state.lock:
        assembly = state.assembly
        return {
            "root": assembly.root if assembly else "",
            "incarnation": state.incarnation,
            "nodes": list(assembly.topology.nodes) if assembly else [],
            "node_of": list(assembly.topology.node_of) if assembly else [],
            "redundancy": assembly.topology.redundancy if assembly else "",
            "bundles": [
                {
                    "bundle": ref.bundle_id,
                    "runs": ref.runs,
                    "index": ref.index,
                    "count": ref.count,
                    "bytes": ref.num_bytes,
                }
                for ref in _bundles(state).values()
            ],
            "entries": _entries(state),
            "slots": [
                {"rank": held.rank, "replica": held.replica, "bytes": held.slot.total_bytes} for held in state.slot_pool
            ],
        }


def _bundles(state: NodeState) -> dict[str, BundleRef]:
    found = {ref.bundle_id: ref for layout in state.layouts.values() for ref in layout.bundles}
    newest = state.ledger.newest(Level.CAPTURED) if state.ledger else None
    if state.ledger is not None and newest is not None:
        found.update((ref.bundle_id, ref) for ref in state.ledger.bundles_of(newest).refs)
    return found


def _entries(state: NodeState) -> dict[str, list[list[Any]]]:
    """Return by bundle: name, dtype, global shape, offsets, lengths of every piece in it."""
    found: dict[str, list[list[Any]]] = {}
    for held in state.slot_pool:
        if held.parity is not None:
            continue
        for bundle_id, place in held.images.items():
            if held.state is not SlotState.SEALED or bundle_id in found or bundle_id in held.condemned:
                continue
            view = held.slot.view[place.offset : place.offset + place.seal.length]
            try:
                found[bundle_id] = [_row(entry) for entry in image_format.read_image(view, bundle_id).entries]
            except CorruptError:
                continue  # memory that changed under us: whoever restores from it will find that too
    return found


def _row(entry: Entry) -> list[Any]:
    return [entry.name, entry.dtype, entry.global_shape, entry.offsets, entry.shape]
