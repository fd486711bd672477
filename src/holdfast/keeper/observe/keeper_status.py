"""Tells what the keeper says about itself: plain values, for `holdfast status` and for tests. Fields:
docs/spec/keeper.md.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holdfast.base.events import Events
from holdfast.core.model import Level
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import Activities
from holdfast.keeper.slots.sessions import Trainer
from holdfast.keeper.slots.slot_pool import HeldSlot


def report(
    state: NodeState,
    events: Events,
    *,
    activities: Activities,
    leader: int,
    trainers: Mapping[int, Trainer],
    started_s: float,
) -> dict[str, Any]:
    """The status, taken under the state's lock so that it is one moment's."""
    with state.lock:
        assembly, ledger = state.assembly, state.ledger
        local = ledger.ranks if ledger else ()
        return {
            "node": state.place.node,
            "index": state.node,
            "pid": os.getpid(),
            "job": state.place.job,
            "uptime_s": time.monotonic() - started_s,
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "root": assembly.root if assembly else "",
            "incarnation": state.incarnation,
            "resumed_from": str(state.resumed) if state.resumed else None,
            "nodes": list(assembly.topology.nodes) if assembly else [],
            "coordinator": leader,
            "ranks": {str(rank): _rank(state, rank, trainers.get(rank)) for rank in sorted({*local, *trainers})},
            "replicas": [
                _slot(held) | {"rank": held.rank} for held in state.slot_pool if held.replica and not held.preloaded
            ],
            "newest": {level.name.lower(): _newest(state, level) for level in Level if level is not Level.NONE},
            "suspects": {str(version): why.reason for version, why in (ledger.suspects() if ledger else {}).items()},
            "versions": [
                {
                    "version": str(message.version),
                    "reached": [level.name.lower() for level in message.reached],
                    "abandoned": message.abandoned,
                    "reason": message.reason,
                }
                for message in state.progress()
            ],
            "activities": activities.report(),
            "memory": {"used_bytes": state.slot_pool.budget.used, "allowed_bytes": state.slot_pool.budget.allowed},
            "alarms": [
                {"key": key, "text": alarm.text, "age_s": time.monotonic() - alarm.at_s, "count": alarm.count}
                for key, alarm in state.alarms.raised.items()
            ],
            "counters": events.counters(),
        }


def _rank(state: NodeState, rank: int, trainer: Trainer | None) -> dict[str, Any]:
    restored = trainer.restored if trainer else None
    return {
        "pid": trainer.connection.pid if trainer else None,
        "restored": {"version": str(restored[0]), "bytes": dict(restored[1])} if restored else None,
        "finished": rank in state.finished,
        "cadence": state.cadences.get(rank, ""),
        "waits": asdict(state.idle[rank]) if rank in state.idle else None,
        "slots": [_slot(held) for held in state.slot_pool.of_rank(rank)],
    }


def _slot(held: HeldSlot) -> dict[str, Any]:
    return {
        "slot": held.slot.slot_id,
        "version": str(held.version) if held.version else None,
        "state": held.state.value,
        "bytes": held.slot.total_bytes,
        "sealed_bytes": sum(place.seal.length for place in held.images.values()),
        "bundles": len(held.images),
        "pins": dict(held.pins),
    }


def _newest(state: NodeState, level: Level) -> str | None:
    version = state.ledger.newest(level) if state.ledger else None
    return str(version) if version else None
