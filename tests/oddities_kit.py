"""Lives of ranks as facts for the real Watch, with its true limits and in virtual time: what a second of each costs.

A life begins with steps that go well, then comes what the case is about, then steps again. `kills` tells what the watch
would have ended, `found_s` when it ended the one that hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.elastic.failure_detector import Kind, Verdict, Watch
from holdfast.core.elastic.watch_mode import Mode
from holdfast.core.elastic.worker_facts import Beat, Phase, WorkerSample

LOOK_S = 0.25
STEP_S = 0.1
WARM_S = 5.0
MB = 1 << 20


@dataclass(frozen=True)
class Way:
    """What one second costs, and what a look shows meanwhile.

    Attributes:
        flickers: two states that alternate from look to look.
        places: that the stack dumps show in turn.
        late_s: the watcher itself does not run for so long at first.
        group_s: the time limit that the script gave its group.
    """

    busy: float = 0.0
    spent: float = 0.0
    family: float = 0.0
    wakes: float = 0.2
    file: float = 0.0
    sockets: float | None = 0.0
    memory: float = 0.0
    starved: float = 0.0
    state: str = "S"
    flickers: str = ""
    phase: Phase | None = None
    inside: bool = False
    stands: Phase | None = None
    waits_in: str = ""
    call: str = ""
    device: bool = False
    places: tuple[str, ...] = ("forward (model.py)",)
    steps: bool = False
    settled: bool = True
    learned: bool = True
    late_s: float = 0.0
    group_s: float = 0.0


STEPS = Way(busy=0.5, wakes=50, steps=True)
WAITS = Way(inside=True, phase=Phase.COLLECTIVE)


@dataclass
class Rank:
    """One rank and how it lives at this moment."""

    sight: WorkerSample
    way: Way = STEPS
    since_s: float = 0.0
    looks: int = 0
    dumps: int = 0
    longest: dict[Phase, float] = field(default_factory=dict)


class Node:
    """The ranks of one node before their watch."""

    def __init__(self, mode: Mode, world: int, here: int) -> None:
        self.now_s, self.world = 0.0, world
        self.watch = Watch(mode)
        self.elsewhere: Sequence[int] = ()
        self.ranks = {rank: Rank(WorkerSample(rank, Beat(phase=Phase.STEP), wakes=1)) for rank in range(here)}
        for rank in self.ranks:
            self.watch.started(rank, 0.0)

    def turn(self, ways: Mapping[int, Way]) -> None:
        """Ranks begin to live in another way: what they did until now ended well."""
        for number, way in ways.items():
            rank = self.ranks[number]
            before = rank.sight.beat
            if not rank.way.steps:
                paused = self.now_s - rank.since_s
                rank.longest[before.phase] = max(rank.longest.get(before.phase, 0.0), paused)
            phase = way.phase if way.phase is not None else Phase.STEP
            known = dict.fromkeys((Phase.STEP, Phase.COLLECTIVE, Phase.DATA), 0.05) if way.learned else {}
            beat = Beat(
                before.changes + 1, before.step, phase, "all_reduce", before.sequence + way.inside, way.inside,
                known, dict.fromkeys(known, 300), STEP_S if way.learned else 0.0, dict(rank.longest), way.settled,
                way.group_s,
            )  # fmt: skip
            rank.sight = replace(rank.sight, beat=beat, stands=None, places=())
            rank.way, rank.since_s, rank.looks, rank.dumps = way, self.now_s, 0, 0

    def live(self, seconds: float) -> Iterator[Verdict]:
        """Time passes; what is said meanwhile."""
        end = self.now_s + seconds
        step = LOOK_S + max(rank.way.late_s for rank in self.ranks.values())
        while self.now_s < end - 1e-9:
            self.now_s += step
            for rank in self.ranks.values():
                _live(rank, min(step, LOOK_S))
            sights = [rank.sight for rank in self.ranks.values()]
            said = self.watch.look(self.now_s, sights, world_size=self.world, stuck_elsewhere=self.elsewhere)
            for verdict in said:
                if verdict.kind is Kind.LOOK:
                    self._dump(self.ranks[verdict.rank])
                yield verdict
            step = LOOK_S

    def _dump(self, rank: Rank) -> None:
        way = rank.way
        place = way.places[rank.dumps % len(way.places)]
        rank.dumps += 1
        rank.sight = replace(rank.sight, stands=way.stands, places=(*rank.sight.places, place)[-8:])


def _live(rank: Rank, seconds: float) -> None:
    way, sight = rank.way, rank.sight
    rank.looks += 1
    state = way.flickers[rank.looks % len(way.flickers)] if way.flickers else way.state
    changed: dict[str, Any] = {
        "busy_s": sight.busy_s + way.busy * seconds,
        "spent_s": sight.spent_s + (way.busy + way.spent) * seconds,
        "family_s": sight.family_s + way.family * seconds,
        "wakes": int(1 + way.wakes * rank.looks * LOOK_S),
        "file_bytes": sight.file_bytes + int(way.file * seconds),
        "socket_bytes": None if way.sockets is None else (sight.socket_bytes or 0) + int(way.sockets * seconds),
        "memory_bytes": sight.memory_bytes + int(way.memory * seconds),
        "starved_s": sight.starved_s + way.starved * seconds,
        "state": state,
        "waits_in": way.waits_in if rank.dumps or way.waits_in == "a time that it has set itself" else "",
        "call": "" if state == "R" else way.call,  # who is ready to run is in no call
        "device": way.device,
    }
    if way.steps:
        made = max(1, round(seconds / STEP_S))
        changed["beat"] = replace(sight.beat, changes=sight.beat.changes + made, step=sight.beat.step + made)
    rank.sight = replace(sight, **changed)


@dataclass(frozen=True)
class Case:
    """A job in which some ranks live in a way of their own for a while.

    Attributes:
        ways: of the ranks that the case is about; all others live like `others`.
        seconds: for how long; each entry is one time, with steps in between.
        here: ranks of this node; None: all. The others' watches say that theirs are stuck, if `stuck`.
        gone: ranks that have finished.
    """

    name: str
    ways: Mapping[int, Way]
    seconds: tuple[float, ...]
    others: Way = WAITS
    world: int = 2
    here: int | None = None
    stuck: bool = False
    gone: tuple[int, ...] = ()


def play(case: Case, mode: Mode) -> Iterator[tuple[float, Verdict]]:
    """What is ended, with the seconds since the case began."""
    here = case.here if case.here is not None else case.world
    node = Node(mode, case.world, here)
    list(node.live(WARM_S))
    for rank in case.gone:
        node.watch.gone(rank)
        del node.ranks[rank]
    for seconds in case.seconds:
        began = node.now_s
        node.turn({rank: case.ways.get(rank, case.others) for rank in node.ranks})
        node.elsewhere = range(here, case.world) if case.stuck else ()
        for verdict in node.live(seconds):
            if verdict.kind in (Kind.RESTART_RANK, Kind.RESTART_ALL, Kind.REPLACE_NODE):
                yield node.now_s - began, verdict
        node.elsewhere = ()
        node.turn(dict.fromkeys(node.ranks, STEPS))
        list(node.live(WARM_S))


def kills(case: Case, mode: Mode) -> list[str]:
    """Why the watch would have ended or interrupted somebody."""
    return [f"after {after:.0f} s: {verdict.reason} {verdict.evidence}" for after, verdict in play(case, mode)]


def found_s(case: Case, mode: Mode) -> float | None:
    """Seconds until a rank of the case, or all ranks if it is about all, are to be replaced; None if they never are.

    Raises:
        AssertionError: somebody else was to be replaced first.
    """
    after, verdict = next(play(case, mode), (0.0, None))
    if verdict is None:
        return None
    assert verdict.kind is Kind.RESTART_ALL or set(verdict.ranks) <= set(case.ways), f"{case.name}: {verdict}"
    return after
