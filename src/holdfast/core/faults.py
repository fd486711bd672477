"""From facts about the workers of a node to verdicts: wait, look closer, or replace what failed. With the reason.

Pure: `now_s` is an argument, what was seen of a worker is a value. Called by train.watchdog on what it reads, by the
simulator and by scenarios. One `Watch` serves one node.

- An exit is a fact by itself. Anything else that is healthy to look at is interrupted only on **two kinds of
  evidence**: no progress for longer than the limit, *and* what the kernel says of the process (stopped; neither computing
  nor waking nor reading; or busy for long while all others wait for it). A lost heartbeat alone never interrupts
  steps that go on: the heartbeat of a node that is silent counts only when ranks here are stuck as well.
- Limits are learned: a factor times the 99th percentile of what the rank's own phase took, not below a floor. Phases
  that may take long (start-up, compilation, evaluation, saving, loading) have floors of their own.
- Of ranks stuck in one collective the culprits are those that have *not* entered it. At half the limit the stuck are
  asked where they stand (LOOK: a stack dump); they are judged at the whole limit, dump in hand.
- Time that nobody could have used is not counted: while the watcher itself woke late, and while the worker waited
  for a processor. A process that a debugger holds, or that waits for a device (state D), is never killed here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FACTOR = 2.4  # p99 comes from buckets a fifth wide, so this is at most three times what was measured
ENOUGH_SAMPLES = 8
# A rank that computes while all others wait for it may be evaluating or building something: be slow to judge.
BUSY_FACTOR, BUSY_FLOOR_S = 3.0, 30.0
# In a wait for a device a process cannot be killed; its device and number are not to be used again.
DEVICE_FACTOR, DEVICE_FLOOR_S = 10.0, 120.0
# All stand in collectives, nobody is missing, and no thread of theirs computes: what one of them sent may be on its way.
# Where threads compute, bytes may be moving; or it waits for a device by spinning, which looks the same.
TOGETHER_FACTOR, MOVING_FACTOR, MOVING_FLOOR_S = 3.0, 10.0, 120.0
# A node of which nothing is heard for so long, while ranks elsewhere stand still for as long, is lost: longer than a
# virtual machine stands still when it is moved.
LOST_S = 8.0
# Below these a process is quiet: it does not compute, it wakes at most as often as a wait with a timeout does.
QUIET_SHARE, QUIET_WAKES_HZ, QUIET_READ_BYTES = 0.02, 1.5, 64 << 10
# A watcher that was to wake 20 times a second and wakes this late did not run either.
LATE_S = 0.25


class Phase(enum.IntEnum):
    """What a rank is doing, as far as it says."""

    START = 0
    COMPILE = 1
    STEP = 2
    COLLECTIVE = 3
    DATA = 4
    EVALUATION = 5
    SAVING = 6
    LOADING = 7


# Seconds without progress: (at least, while there are not enough samples to learn from).
FLOORS_S: Mapping[Phase, tuple[float, float]] = {
    Phase.START: (1800.0, 1800.0),
    Phase.COMPILE: (1800.0, 1800.0),
    Phase.STEP: (2.8, 300.0),
    Phase.COLLECTIVE: (2.8, 300.0),
    Phase.DATA: (2.8, 300.0),
    Phase.EVALUATION: (60.0, 600.0),
    # Beyond the ten minutes that holdfast itself gives a last save or a restore (close_timeout_s).
    Phase.SAVING: (900.0, 900.0),
    Phase.LOADING: (1800.0, 1800.0),
}
QUICK = (Phase.STEP, Phase.COLLECTIVE, Phase.DATA)


class Kind(str, enum.Enum):
    """What is to be done, mildest first. Compares equal to its text."""

    WAIT = "wait"
    LOOK = "look"  # ask for a stack dump
    RESTART_RANK = "restart_rank"
    REPLACE_NODE = "replace_node"
    RESTART_ALL = "restart_all"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker wrote into its page, and what its page tells of the past.

    Attributes:
        changes: grows with every sign of progress; 0 means that it never wrote.
        step: optimizer steps that it finished.
        collective: the one that it stands in or stood in last; empty if none is known.
        sequence: how many collectives it has entered, of whatever group.
        inside: whether it has not left it yet.
        p99_s, samples: per phase, what passed between two signs of progress.
        step_p99_s: what a whole step takes.
    """

    changes: int = 0
    step: int = 0
    phase: Phase = Phase.START
    collective: str = ""
    sequence: int = 0
    inside: bool = False
    p99_s: Mapping[Phase, float] = field(default_factory=dict)
    samples: Mapping[Phase, int] = field(default_factory=dict)
    step_p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of one worker at one moment.

    Attributes:
        state: the kernel's letter: R running, S sleeping, D waiting for a device, T stopped, t held by a debugger.
        busy_s: processor seconds of its main thread and its children, ever.
        spent_s: processor seconds of all its threads, ever: a collective that moves bytes spends some.
        starved_s: seconds that it was ready and got no processor, ever.
        wakes: how often its main thread went to sleep by itself, ever.
        read_bytes: what it and its children read, ever.
        stands: where its last stack dump shows it: a phase, or None if there is no dump of this silence.
    """

    rank: int
    beat: Beat
    state: str = "S"
    busy_s: float = 0.0
    spent_s: float = 0.0
    starved_s: float = 0.0
    wakes: int = 0
    read_bytes: int = 0
    stands: Phase | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: its exit code (negative: the signal), and whether the kernel ran out of memory then."""

    code: int
    out_of_memory: bool = False
    report: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done about which ranks, and why.

    Attributes:
        evidence: the facts that it rests on, one sentence each.
        missing: ranks that others wait for in a collective, with its name.
        found_after_s: from the last sign of progress to the verdict.
    """

    kind: Kind
    ranks: tuple[int, ...]
    reason: str
    evidence: tuple[str, ...] = ()
    missing: str = ""
    found_after_s: float = 0.0

    @property
    def rank(self) -> int:
        """The first rank that it is about; -1 if none."""
        return self.ranks[0] if self.ranks else -1


_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
# What survivors of a dead peer say; their exits follow from another one's.
_FOLLOWS = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def cause(exit_: Exit) -> str:
    """One phrase for how a process ended."""
    if exit_.out_of_memory:
        return "killed because memory ran out"
    if exit_.code < 0:
        name = _SIGNALS.get(-exit_.code, "")
        return f"killed by signal {-exit_.code}{f' ({name})' if name else ''}"
    first_line = exit_.report.strip().splitlines()[-1] if exit_.report.strip() else ""
    return f"ended with exit code {exit_.code}{f': {first_line}' if first_line else ''}"


def first_failure(exits: Sequence[tuple[int, Exit]]) -> int:
    """Of (rank, exit) in the order seen, the rank whose end is no consequence of another's."""

    def follows(exit_: Exit) -> bool:
        return any(phrase in exit_.report.lower() for phrase in _FOLLOWS)

    return min(exits, key=lambda item: (follows(item[1]), item[1].code >= 0 and not item[1].out_of_memory))[0]


@dataclass(slots=True)
class _Track:
    """A rank since its last sign of progress."""

    sight: Sight
    since_s: float
    start: Sight


class Watch:
    """The workers of one node, and the nodes beside it.

    Attributes:
        stuck: whether at the last look all ranks here stood in collectives, for three limits. Others are to know it.
    """

    def __init__(self) -> None:
        self.stuck = False
        self._tracks: dict[int, _Track] = {}
        self._looked_at_s: float | None = None
        self._said: frozenset[tuple[Kind, tuple[int, ...]]] = frozenset()

    def started(self, rank: int, now_s: float) -> None:
        """A new process has the rank; what was known of the old one is forgotten."""
        nothing = Sight(rank, Beat())
        self._tracks[rank] = _Track(nothing, now_s, nothing)

    def gone(self, rank: int) -> None:
        """The rank has no process here any more."""
        self._tracks.pop(rank, None)

    def look(
        self,
        now_s: float,
        sights: Iterable[Sight],
        silent_nodes: Mapping[int, tuple[float, tuple[int, ...]]] | None = None,
        *,
        world_size: int | None = None,
        stuck_elsewhere: Sequence[int] = (),
    ) -> tuple[Verdict, ...]:
        """Judges everything anew.

        Args:
            now_s: monotonic.
            sights: every worker here that has not ended.
            silent_nodes: other nodes: (seconds since last heard, their ranks).
            world_size: ranks of the job, if known.
            stuck_elsewhere: ranks of the nodes whose own watches are `stuck`.
        """
        late = 0.0 if self._looked_at_s is None else max(0.0, now_s - self._looked_at_s - LATE_S)
        self._looked_at_s = now_s
        for sight in sights:
            self._take(sight, now_s, late)
        verdicts = [*self._judge_nodes(now_s, silent_nodes or {}), *self._judge_ranks(now_s)]
        if self.stuck and {*self._tracks, *stuck_elsewhere} == set(range(world_size or 0)):
            verdicts.append(self._judge_all(now_s, stuck_elsewhere))
        return self._news(verdicts)

    def silence_s(self, rank: int, now_s: float) -> float:
        """Seconds without progress that the rank could have used."""
        track = self._tracks[rank]
        return max(0.0, now_s - track.since_s - (track.sight.starved_s - track.start.starved_s))

    def limit_s(self, rank: int) -> float:
        """How long the rank may go without progress where it is now."""
        sight = self._tracks[rank].sight
        return limit_s(sight.beat, _phase(sight))

    def _take(self, sight: Sight, now_s: float, late_s: float) -> None:
        track = self._tracks.get(sight.rank)
        if track is None or sight.beat.changes != track.sight.beat.changes:
            self._tracks[sight.rank] = _Track(sight, now_s, sight)
            return
        if not track.start.busy_s and not track.start.wakes:
            track.start = sight  # the first look at this process
        track.since_s = min(now_s, track.since_s + late_s)
        track.sight = sight

    def _news(self, verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
        """What was not said at the last look already: reasons to wait are told when they change, orders once."""
        said = {(verdict.kind, verdict.ranks): verdict for verdict in verdicts}
        fresh = tuple(verdict for key, verdict in said.items() if key not in self._said)
        self._said = frozenset(said)
        return fresh

    # --- nodes

    def _judge_nodes(self, now_s: float, nodes: Mapping[int, tuple[float, tuple[int, ...]]]) -> list[Verdict]:
        found = []
        stuck = [rank for rank in self._tracks if self.silence_s(rank, now_s) > LOST_S and self._stands(rank)]
        for node, (silent_s, ranks) in sorted(nodes.items()):
            if silent_s <= LOST_S:
                continue
            if stuck:
                evidence = (f"nothing was heard of it for {silent_s:.1f} s", f"{_waiting(stuck)} in a collective")
                reason = f"node {node} is lost: it is silent, and work has stopped"
                found.append(Verdict(Kind.REPLACE_NODE, ranks, reason, evidence, found_after_s=silent_s))
            else:
                reason = f"node {node} is silent and steps go on: only the channel is broken"
                found.append(Verdict(Kind.WAIT, ranks, reason, (f"nothing was heard of it for {silent_s:.1f} s",)))
        return found

    # --- ranks

    def _judge_ranks(self, now_s: float) -> list[Verdict]:
        found: list[Verdict] = []
        waiting: list[int] = []
        for rank in sorted(self._tracks):
            silence, limit = self.silence_s(rank, now_s), self.limit_s(rank)
            if self._tracks[rank].sight.state == "T":  # no phase stops by itself
                limit = min(limit, FLOORS_S[Phase.STEP][0])
            if silence > limit / 2:
                verdict = self._judge(rank, now_s, silence, limit)
                found += [verdict] if verdict else []
                waiting += [rank] if verdict is None else []
        culprits = [rank for verdict in found if verdict.kind is Kind.RESTART_RANK for rank in verdict.ranks]
        self.stuck = False
        if waiting and not culprits:  # for somebody who is not among them
            reason, where = f"{_waiting(waiting)} in a collective for others", self._where(waiting)
            found.append(Verdict(Kind.WAIT, tuple(waiting), reason, (where,)))
            self.stuck = len(waiting) == len(self._tracks) and self._longest(now_s) > self._together_s(now_s)
        return found

    def _judge(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict | None:
        """About one silent rank. None: it waits for others."""
        sight = self._tracks[rank].sight
        if sight.state == "t":
            return self._wait(rank, "a debugger holds it")
        if sight.state == "D":
            return self._judge_device(rank, silence, limit)
        if sight.state == "T":
            return self._judge_stopped(rank, now_s, silence, limit)
        if silence <= limit:
            return self._ask(rank, silence)
        if self._stands(rank):
            return None
        if self._is_quiet(rank, silence):
            return self._condemn(rank, now_s, silence, limit, "it neither computes nor wakes nor reads")
        return self._judge_busy(rank, now_s, silence, limit)

    def _ask(self, rank: int, silence: float) -> Verdict:
        """Half the limit is over: where does it stand?"""
        return Verdict(Kind.LOOK, (rank,), f"rank {rank} made no progress for {silence:.1f} s", found_after_s=silence)

    def _judge_stopped(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict:
        if silence <= limit:
            return self._wait(rank, "it is stopped; it may be continued")
        return self._condemn(rank, now_s, silence, limit, "its process is stopped")

    def _judge_device(self, rank: int, silence: float, limit: float) -> Verdict:
        if silence <= max(DEVICE_FACTOR * limit, DEVICE_FLOOR_S):
            return self._wait(rank, "it waits for a device or a file system")
        reason = (
            f"rank {rank} has waited for a device for {silence:.0f} s and cannot be killed: its node is to be replaced"
        )
        return Verdict(Kind.REPLACE_NODE, (rank,), reason, (f"no progress for {silence:.0f} s", "state D"), "", silence)

    def _judge_busy(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict:
        others = [other for other in self._tracks if other != rank]
        waiting = [r for r in others if self._stands(r) and self.silence_s(r, now_s) > self.limit_s(r)]
        if others and waiting == others and silence > max(BUSY_FACTOR * limit, BUSY_FLOOR_S):
            return self._condemn(rank, now_s, silence, limit, f"it computes, and {_waiting(waiting)} for it")
        return self._wait(rank, "it computes, reads or wakes: slow, not stuck")

    def _judge_all(self, now_s: float, elsewhere: Sequence[int]) -> Verdict:
        """All wait for each other."""
        longest = self._longest(now_s)
        reason = f"all ranks wait in collectives for {longest:.1f} s and none is missing"
        others = (f"{_waiting(elsewhere)} on other nodes, as their launchers say",) if elsewhere else ()
        ranks = (*self._tracks, *elsewhere)
        return Verdict(
            Kind.RESTART_ALL, ranks, reason, (self._where(sorted(self._tracks)), *others), found_after_s=longest
        )

    def _where(self, ranks: Iterable[int]) -> str:
        return "; ".join(f"rank {rank} in {_place(self._tracks[rank].sight.beat)}" for rank in ranks)

    def _together_s(self, now_s: float) -> float:
        """How long all may stand in collectives."""
        limit = max(self.limit_s(rank) for rank in self._tracks)
        for rank, track in self._tracks.items():
            if track.sight.spent_s - track.start.spent_s > _noise(self.silence_s(rank, now_s)):
                return max(MOVING_FACTOR * limit, MOVING_FLOOR_S)
        return TOGETHER_FACTOR * limit

    def _longest(self, now_s: float) -> float:
        return max(self.silence_s(rank, now_s) for rank in self._tracks)

    def _condemn(self, rank: int, now_s: float, silence: float, limit: float, second: str) -> Verdict:
        beat = self._tracks[rank].sight.beat
        phase = _phase(self._tracks[rank].sight).name.lower()
        first = f"no progress for {silence:.1f} s in phase {phase}, limit {limit:.1f} s, after step {beat.step}"
        missing = self._missing(rank)
        evidence = (first, second, *([missing] if missing else []))
        reason = f"rank {rank} is stuck: {second}"
        return Verdict(Kind.RESTART_RANK, (rank,), reason, evidence, missing, now_s - self._tracks[rank].since_s)

    def _wait(self, rank: int, why: str) -> Verdict:
        return Verdict(Kind.WAIT, (rank,), f"rank {rank} made no progress: {why}")

    def _missing(self, rank: int) -> str:
        """The collective that others stand in and `rank` does not."""
        names = {r: t.sight.beat for r, t in self._tracks.items() if r != rank and self._stands(r)}
        if not names:
            return ""
        beat = next(iter(names.values()))
        return f"rank {rank} is missing in {_place(beat)}, where {_waiting(names)}"

    def _stands(self, rank: int) -> bool:
        sight = self._tracks[rank].sight
        return sight.state != "T" and (sight.beat.inside or sight.stands is Phase.COLLECTIVE)

    def _is_quiet(self, rank: int, silence: float) -> bool:
        track = self._tracks[rank]
        now, then = track.sight, track.start
        computed = now.busy_s - then.busy_s > _noise(silence)
        woke = now.wakes - then.wakes > 3 + QUIET_WAKES_HZ * silence
        return not (computed or woke or now.read_bytes - then.read_bytes > QUIET_READ_BYTES)


def _noise(silence: float) -> float:
    """Processor seconds that are no computing."""
    return max(0.1, QUIET_SHARE * silence)


def limit_s(beat: Beat, phase: Phase) -> float:
    """Seconds without progress that are not yet strange in `phase`."""
    floor, unlearned = FLOORS_S[phase]
    quick = phase in QUICK
    if sum(beat.samples.get(p, 0) for p in QUICK) < ENOUGH_SAMPLES if quick else beat.samples.get(phase, 0) < 1:
        return unlearned
    known = max(beat.p99_s.get(phase, 0.0), beat.step_p99_s if quick else 0.0)
    return max(floor, FACTOR * known)


def _phase(sight: Sight) -> Phase:
    """Where it says it is, unless its stack shows something slower."""
    said, shown = sight.beat.phase, sight.stands
    return shown if shown is not None and FLOORS_S[shown][0] > FLOORS_S[said][0] else said


def _place(beat: Beat) -> str:
    if not beat.collective:
        return "a collective"
    return f"{beat.collective} no. {beat.sequence}"


def _names(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in sorted(ranks)]
    head = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"rank {head}" if len(listed) == 1 else f"ranks {head}"


def _waiting(ranks: Iterable[int]) -> str:
    listed = tuple(ranks)
    return f"{_names(listed)} {'waits' if len(listed) == 1 else 'wait'}"
