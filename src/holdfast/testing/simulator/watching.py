"""A hang, or a lost node, before the real Watch of core.elastic.failure_detector: random workers around it, in virtual time.

V4: who hangs is found, and within its limit; nobody healthy is condemned, whatever the others do meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.elastic.failure_detector import LATE_S, LOST_S, Kind, Verdict, Watch
from holdfast.core.elastic.watch_mode import CAREFUL, QUICK, Mode
from holdfast.core.elastic.worker_facts import Beat, Phase, WorkerSample
from holdfast.core.model import Topology
from holdfast.testing.simulator.clock import Violation

LOOK_S = 0.2
# Minutes pass before a careful watch; looks that are further apart would count as late.
CAREFUL_LOOK_S = LATE_S
# Healthy ways to make no progress, besides waiting for the one that hangs.
EXCUSES = ("evaluates", "reads", "starved", "traced")


def find_hang(chance: random.Random, culprit: int, topology: Topology) -> float:
    """Seconds until the culprit is condemned by the quick watch of its node. The careful one must find it too, later."""
    ranks = topology.ranks_on(topology.node_of[culprit])
    step_s = chance.choice([0.05, 0.4, 1.2])
    stopped = chance.random() < 0.5
    ways = dict.fromkeys(ranks, "waits")
    for rank in ranks:
        if rank != culprit and chance.random() < 0.3:
            ways[rank] = chance.choice(EXCUSES)
    ways[culprit] = "stopped" if stopped else "hangs"
    if "waits" in ways.values() and "starved" not in ways.values():  # else the others may go on: an hour
        _find(CAREFUL, culprit, ways, step_s, topology, CAREFUL_LOOK_S)
    return _find(QUICK, culprit, ways, step_s, topology, LOOK_S)


def _find(mode: Mode, culprit: int, ways: Mapping[int, str], step_s: float, topology: Topology, look_s: float) -> float:
    watch = Watch(mode)
    sights = {rank: _sight(rank, step_s, way) for rank, way in ways.items()}
    for rank in ways:
        watch.started(rank, 0.0)
    stopped = ways[culprit] == "stopped"
    limit = mode.stopped_s if stopped else mode.limit_s(sights[culprit].beat, Phase.STEP)
    now = 0.0
    while now < limit + 2.0 + look_s:
        now += look_s
        sights = {rank: _live(sight, ways[rank], look_s) for rank, sight in sights.items()}
        if _judge(watch.look(now, sights.values(), world_size=topology.world_size), culprit):
            return now
    raise Violation("V4", f"rank {culprit} {ways[culprit]} for {now:.1f} s, its limit ({mode.name}) is {limit:.1f} s")


def find_lost_node(chance: random.Random, lost: int, topology: Topology) -> float:
    """Seconds until another node's watch says that the lost one is to be replaced; never while steps go on."""
    home = chance.choice([node for node in range(len(topology.nodes)) if node != lost])
    ranks = topology.ranks_on(home)
    watch = Watch()
    sights = {rank: _sight(rank, 0.1, "waits") for rank in ranks}
    now, silent_since = 0.0, 0.0
    going_on = chance.uniform(0, 2 * LOST_S)  # at first only its heartbeats are lost
    for rank in ranks:
        watch.started(rank, now)
    while now < going_on + LOST_S + 2.0:
        now += LOOK_S
        if now < going_on:
            sights = {r: replace(s, beat=replace(s.beat, changes=s.beat.changes + 1)) for r, s in sights.items()}
        sights = {rank: _live(sight, "waits", LOOK_S) for rank, sight in sights.items()}
        silent = {lost: (now - silent_since, topology.ranks_on(lost))}
        for verdict in watch.look(now, sights.values(), silent, world_size=topology.world_size):
            if verdict.kind is Kind.REPLACE_NODE:
                if now < going_on:
                    raise Violation("V4", "a lost heartbeat alone interrupted steps that go on")
                return now - going_on
            _judge((verdict,), -1)
    raise Violation("V4", f"node {lost} was lost for {now:.1f} s and nobody said so")


def _sight(rank: int, step_s: float, way: str) -> WorkerSample:
    phase = Phase.EVALUATION if way == "evaluates" else Phase.DATA if way == "reads" else Phase.STEP
    known = dict.fromkeys(Phase, step_s)
    inside = way == "waits"
    beat = Beat(9, 9, phase, "all_reduce", 9, inside, known, dict.fromkeys(Phase, 99), step_s)
    return WorkerSample(rank, beat, wakes=1)


def _live(sight: WorkerSample, way: str, seconds: float) -> WorkerSample:
    if way == "stopped":
        return replace(sight, state="T")
    if way == "evaluates":
        return replace(sight, busy_s=sight.busy_s + 0.5 * seconds)
    if way == "traced":
        return replace(sight, state="t")
    if way == "reads":
        return replace(sight, file_bytes=sight.file_bytes + (1 << 20))
    if way == "starved":
        return replace(sight, state="R", starved_s=sight.starved_s + 0.97 * seconds)
    return sight


def _judge(verdicts: tuple[Verdict, ...], culprit: int) -> bool:
    """Return whether the culprit is condemned; somebody else must not be."""
    for verdict in verdicts:
        if verdict.kind in (Kind.RESTART_RANK, Kind.RESTART_ALL):
            wrong = [rank for rank in verdict.ranks if rank != culprit]
            if wrong:
                raise Violation("V4", f"rank {wrong[0]} is healthy and condemned: {verdict.reason}")
            return True
    return False
