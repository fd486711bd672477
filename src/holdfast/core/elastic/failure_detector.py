"""Turns facts about the workers of a node into verdicts: wait, look closer, report, or replace what failed. With the
reason.

Pure: `now_s` is an argument, what was seen of a worker is a value. Called by elastic.watchdog.watchdog on what it reads, by the
simulator and by scenarios. One `Watch` serves one node; how patient it is says its core.elastic.watch_mode.

- An exit is a fact by itself, and so is a process that a signal stopped. Anything else is interrupted only on **two
  kinds of evidence**: no progress for longer than the phase deserves, *and* signs of life that are missing (core.elastic.worker_activity):
  its threads and all its descendants neither compute nor wake, and no byte of files, sockets or memory moves; or it
  computes for very long, its stack stays at one place, nothing moves, and all others wait for it.
- In careful mode the other ranks are asked first: minutes are enough only where all others stand still because of this
  one. A rank that waits for something of its own choice, or for which nobody waits, is given much longer, or left alone.
  So is one that waits in a system call which is no lock: `recv`, `flock`, `waitpid` prove nothing.
- A lost heartbeat alone never interrupts steps that go on: the heartbeat of a node that is silent counts only when ranks
  here are stuck as well.
- Of ranks stuck in one collective the culprits are those that have *not* entered it. At half the limit the stuck are
  asked where they stand (LOOK: a stack dump); they are judged at the whole limit, dump in hand.
- Time that nobody could have used is not counted: while the watcher itself woke late, and while the worker waited
  for a processor. A process that a debugger holds, or whose control group is frozen, is never killed here.
- A rank that was replaced and stops at the same place again was healthy, and so the limit wrong: careful mode reports it
  and leaves it alone. Its limit for that phase is doubled with every verdict.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.base.terminal import some_of
from holdfast.core.elastic.watch_mode import BUSY_FACTOR, CAREFUL, DEVICE_FACTOR, Mode
from holdfast.core.elastic.worker_activity import WINDOW_S, Activity
from holdfast.core.elastic.worker_facts import DEBUGGER, HELD, STEPPING, Beat, Phase, WorkerSample

LEFT_ALONE = "One more failure would end the job: left alone"
# A node of which nothing is heard for so long, while ranks elsewhere stand still for as long, is lost: longer than a
# virtual machine stands still when it is moved.
LOST_S = 8.0
# A watcher that was to wake 20 times a second and wakes this late did not run either.
LATE_S = 0.25
# So many stack dumps in a row must show a rank at one place before its loop is taken for endless.
SAME_PLACES = 3
# Looks in a row that must find a process in state D.
DISK_LOOKS = 20


class Kind(str, enum.Enum):
    """Names what is to be done, mildest first. Compares equal to its text."""

    WAIT = "wait"
    LOOK = "look"  # ask for a stack dump
    REPORT = "report"  # tell people, and do nothing
    RESTART_RANK = "restart_rank"
    REPLACE_NODE = "replace_node"
    RESTART_ALL = "restart_all"


@dataclass(frozen=True, slots=True)
class Exit:
    """Tells how a process ended: its exit code (negative: the signal), and whether the kernel ran out of memory then."""

    code: int
    out_of_memory: bool = False
    report: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what is to be done about which ranks, and why.

    Attributes:
        evidence: the facts that it rests on, one sentence each.
        found_after_s: from the last sign of progress to the verdict.
    """

    kind: Kind
    ranks: tuple[int, ...]
    reason: str
    evidence: tuple[str, ...] = ()
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
    """Return, of (rank, exit) in the order seen, the rank whose end is no consequence of another's."""

    def follows(exit_: Exit) -> bool:
        return any(phrase in exit_.report.lower() for phrase in _FOLLOWS)

    return min(exits, key=lambda item: (follows(item[1]), item[1].code >= 0 and not item[1].out_of_memory))[0]


@dataclass(slots=True)
class _Track:
    """A rank since its last sign of progress.

    Attributes:
        disk_s, num_disk: since when, and at how many looks, it has been in state D and nothing moved.
        num_asked: how often it was asked for its stacks after its limit.
    """

    sight: WorkerSample
    since_s: float
    starved_s: float
    activity: Activity
    disk_s: float = 0.0
    num_disk: int = 0
    num_asked: int = 0


@dataclass(slots=True)
class _Memory:
    """Holds what was decided about ranks in this job, whatever process has them.

    Attributes:
        places: (rank, step) at which a rank was replaced; rank -1: all were interrupted.
        doubled: how often the limit of a (rank, phase) is doubled.
    """

    places: set[tuple[int, int]] = field(default_factory=set)
    doubled: Counter[tuple[int, Phase]] = field(default_factory=Counter)


class Watch:
    """The workers of one node, and the nodes beside it.

    Args:
        mode: how patient it is.

    Attributes:
        stuck: whether at the last look all ranks here stood in collectives, for very long. Others are to know it.
    """

    def __init__(self, mode: Mode = CAREFUL) -> None:
        self.mode = mode
        self.stuck = False
        self._tracks: dict[int, _Track] = {}
        self._gone: set[int] = set()
        self._condemned: set[int] = set()
        self._interrupts = False  # all were to be interrupted, and nobody has begun anew yet
        self._memory = _Memory()
        self._looked_at_s: float | None = None
        self._said: frozenset[tuple[Kind, tuple[int, ...]]] = frozenset()
        self._world_size = 0
        self._elsewhere: Sequence[int] = ()
        self._may_replace = self._may_lose_node = True

    def begin_round(self) -> None:
        """This node may have other ranks from now on: none is known until it starts. What was learned of ranks stays."""
        self._tracks.clear()
        self._gone.clear()
        self._condemned.clear()
        self._interrupts = self.stuck = False

    def started(self, rank: int, now_s: float) -> None:
        """A new process has the rank, or it begins anew; what was seen of the old one is forgotten."""
        self._gone.discard(rank)
        self._condemned.discard(rank)
        self._interrupts = False
        self._track(WorkerSample(rank, Beat()), now_s)

    def gone(self, rank: int) -> None:
        """The rank has no process here any more that is to be judged."""
        self._tracks.pop(rank, None)
        self._gone.add(rank)

    def look(
        self,
        now_s: float,
        sights: Iterable[WorkerSample],
        silent_nodes: Mapping[int, tuple[float, tuple[int, ...]]] | None = None,
        *,
        world_size: int | None = None,
        stuck_elsewhere: Sequence[int] = (),
        may_replace: bool = True,
        may_lose_node: bool = True,
    ) -> tuple[Verdict, ...]:
        """Judges everything anew. A rank that is to be replaced is gone from then on: its verdict stands.

        Args:
            now_s: monotonic.
            sights: every worker here that has not ended.
            silent_nodes: other nodes: (seconds since last heard, their ranks).
            world_size: ranks of the job, if known.
            stuck_elsewhere: ranks of the nodes whose own watches are `stuck`.
            may_replace: False: one more failure would end the job, so in careful mode hangs are only reported.
            may_lose_node: False: a node that is lost would end the job, so one that is silent is only reported.
        """
        late = 0.0 if self._looked_at_s is None else max(0.0, now_s - self._looked_at_s - LATE_S)
        self._looked_at_s = now_s
        for sight in sights:
            if sight.rank not in self._gone:
                self._take(sight, now_s, late)
        self._world_size, self._elsewhere = world_size or len(self._tracks), stuck_elsewhere
        self._may_replace = may_replace or not self.mode.learns
        self._may_lose_node = may_lose_node and self._may_replace
        verdicts = [*self._judge_nodes(now_s, silent_nodes or {}), *self._judge_ranks(now_s)]
        everybody = {*self._tracks, *stuck_elsewhere} == set(range(world_size or 0))
        if self.stuck and everybody and not self._interrupts:
            verdicts.append(self._judge_all(now_s))
        verdicts += self._tell_of_devices(now_s)
        news = self._news(verdicts)
        for verdict in news:
            self._remember(verdict)
        return news

    def why_hopeless(self, now_s: float, sights: Sequence[WorkerSample]) -> str:
        """Returns why none of these workers will save or end any more, though told to; empty if one may.

        In quick mode: no progress for longer than the limit of its phase, and no byte or memory that moves. In careful mode
        nothing at all moves, neither computes nor wakes, and its stack and its calls show no wait that may end: a last
        save may hash, wait for its keeper, or stand in state D, and has the whole grace for that.
        """
        late = 0.0 if self._looked_at_s is None else max(0.0, now_s - self._looked_at_s - LATE_S)
        self._looked_at_s = now_s
        for sight in sights:
            self._take(sight, now_s, late)
        if not sights or not all(self._is_hopeless(sight.rank, now_s) for sight in sights):
            return ""
        ranks = [sight.rank for sight in sights]
        least = min(self.silence_s(rank, now_s) for rank in ranks)
        verb = "hangs" if len(ranks) == 1 else "hang"
        return f"{_names(ranks)} {verb}: no progress for {least:.0f} s, and nothing is read or written"

    def _is_hopeless(self, rank: int, now_s: float) -> bool:
        track = self._tracks[rank]
        sight, limit, silence = track.sight, self.limit_s(rank), self.silence_s(rank, now_s)
        if sight.waits_in or sight.state in "tFZX":
            return False
        if self.mode.learns:
            if self._stands(rank):
                return sight.state == "S" and self._is_past_hope(rank, now_s)
            at_rest = sight.state == "S" and sight.places and not sight.call and not sight.device
            return bool(at_rest) and silence > limit and self._is_quiet(rank, now_s, silence, limit)
        if self._stands(rank):
            limit = self.mode.together_limit_s(sight.beat, moving=False)
        return min(silence, now_s - track.activity.transferred_s) > limit

    def silence_s(self, rank: int, now_s: float) -> float:
        """Seconds without progress that the rank could have used."""
        track = self._tracks[rank]
        return max(0.0, now_s - track.since_s - (track.sight.starved_s - track.starved_s))

    def moved_s(self, rank: int) -> float:
        """Return when a sign of life of this rank was seen last."""
        return self._tracks[rank].activity.moved_s if rank in self._tracks else -math.inf

    def is_at_rest(self, rank: int, now_s: float) -> bool:
        """Return whether the rank gave no sign of life for half the time that it may go without progress."""
        return rank in self._tracks and now_s - self.moved_s(rank) > self.limit_s(rank) / 2

    def limit_s(self, rank: int) -> float:
        """Return how long the rank may go without progress where it is now."""
        sight = self._tracks[rank].sight
        phase = _phase(sight, self.mode)
        return float(self.mode.limit_s(sight.beat, phase) * 2 ** self._memory.doubled[rank, phase])

    def _track(self, sight: WorkerSample, now_s: float) -> None:
        self._tracks[sight.rank] = _Track(sight, now_s, sight.starved_s, Activity(now_s), disk_s=now_s)

    def _take(self, sight: WorkerSample, now_s: float, late_s: float) -> None:
        track = self._tracks.get(sight.rank)
        if track is None or sight.beat.changes != track.sight.beat.changes:
            self._track(sight, now_s)
            self._tracks[sight.rank].activity.take(sight, now_s)
            return
        if not track.sight.busy_s and not track.sight.wakes:
            track.starved_s = sight.starved_s  # the first look at this process
        if late_s:
            track.since_s = min(now_s, track.since_s + late_s)
            track.activity.slept(late_s)
        moved_s = track.activity.moved_s
        track.activity.take(sight, now_s)
        track.sight = sight
        if sight.state != "D" or track.activity.moved_s > moved_s or late_s:
            track.num_disk, track.disk_s = 0, now_s
        track.num_disk += sight.state == "D"

    def _news(self, verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
        """Return what was not said at the last look already: reasons to wait are told when they change, orders once."""
        said = {(verdict.kind, verdict.ranks): verdict for verdict in verdicts}
        fresh = tuple(verdict for key, verdict in said.items() if key not in self._said)
        self._said = frozenset(said)
        return fresh

    def _remember(self, verdict: Verdict) -> None:
        """An order was given. One that rests on a stopped or unkillable process proves itself, and teaches nothing."""
        if verdict.kind is Kind.RESTART_ALL:
            self._interrupts = True
            self._memory.places.add((-1, self._step()))
        if verdict.kind not in (Kind.RESTART_RANK, Kind.REPLACE_NODE) or verdict.rank not in self._tracks:
            return
        sight = self._tracks[verdict.rank].sight
        if sight.state not in "TD":
            self._memory.places.add((verdict.rank, sight.beat.step))
            if self.mode.learns:
                self._memory.doubled[verdict.rank, _phase(sight, self.mode)] += 1
        self.gone(verdict.rank)
        self._condemned.add(verdict.rank)

    # --- nodes

    def _judge_nodes(self, now_s: float, nodes: Mapping[int, tuple[float, tuple[int, ...]]]) -> list[Verdict]:
        found = []
        stuck = [rank for rank in self._tracks if self.silence_s(rank, now_s) > LOST_S and self._stands(rank)]
        for node, (silent_s, ranks) in sorted(nodes.items()):
            if silent_s <= LOST_S:
                continue
            if stuck:
                evidence = (f"nothing was heard of it for {silent_s:.1f} s", f"{_waiting(stuck)} in a collective")
                kind, reason = Kind.REPLACE_NODE, f"node {node} is lost: it is silent, and work has stopped"
                if not self._may_lose_node:
                    kind, reason = Kind.REPORT, f"node {node} is silent, and work has stopped. {LEFT_ALONE}"
                found.append(Verdict(kind, ranks, reason, evidence, found_after_s=silent_s))
            else:
                reason = f"node {node} is silent and steps go on: only the channel is broken"
                found.append(Verdict(Kind.WAIT, ranks, reason, (f"nothing was heard of it for {silent_s:.1f} s",)))
        return found

    # --- ranks

    def _judge_ranks(self, now_s: float) -> list[Verdict]:
        found: list[Verdict] = []
        waiting: list[int] = []
        for rank in sorted(self._tracks):
            sight, silence, limit = self._tracks[rank].sight, self.silence_s(rank, now_s), self.limit_s(rank)
            if sight.state == "T":  # no phase stops by itself
                limit = min(limit, self.mode.stopped_s)
            if silence <= limit / 2 or sight.state in "ZX":  # what ended, its parent sees
                continue
            verdict = self._judge(rank, now_s, silence, limit)
            found += [verdict] if verdict else []
            found += self._ask_again(rank, silence, limit) if verdict else []
            waiting += [rank] if verdict is None else []
        culprits = [rank for verdict in found if verdict.kind is Kind.RESTART_RANK for rank in verdict.ranks]
        self.stuck = False
        if waiting and not culprits:  # for somebody who is not among them
            reason, where = f"{_waiting(waiting)} in a collective for others", self._where(waiting)
            found.append(Verdict(Kind.WAIT, tuple(waiting), reason, (where,)))
            nobody_missing = len(waiting) == len(self._tracks) and not self._condemned
            self.stuck = nobody_missing and all(self._is_past_hope(rank, now_s) for rank in waiting)
        return found

    def _judge(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict | None:
        """About one silent rank. None: it waits for others."""
        sight = self._tracks[rank].sight
        if sight.state == "t" or sight.waits_in in HELD:
            return self._wait(rank, f"{sight.waits_in if sight.waits_in in HELD else DEBUGGER} holds it")
        if sight.state == "F":
            return self._wait(rank, "its control group is frozen; it will be continued")
        if sight.state == "D":
            return self._judge_disk(rank, now_s, limit)
        if sight.state == "T":
            return self._judge_stopped(rank, now_s, silence, limit)
        if silence <= limit:
            return Verdict(Kind.LOOK, (rank,), f"rank {rank} made no progress for {silence:.1f} s", (), silence)
        if self._stands(rank):
            return None
        if self._is_quiet(rank, now_s, silence, limit):
            return self._judge_quiet(rank, now_s, silence, limit)
        return self._judge_busy(rank, now_s, silence, limit)

    def _ask_again(self, rank: int, silence: float, limit: float) -> list[Verdict]:
        """Asks for more dumps: only several tell a loop that is endless from one that goes on. Then seldom."""
        track = self._tracks[rank]
        due = limit * (1.5 + track.num_asked / 2 if track.num_asked < SAME_PLACES else 2**track.num_asked)
        if not self.mode.learns or silence <= due or track.sight.state in "TDtF":
            return []
        track.num_asked += 1
        return [Verdict(Kind.LOOK, (rank,), f"rank {rank} made no progress for {silence:.1f} s", (), silence)]

    def _judge_stopped(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict:
        if silence <= limit:
            return self._wait(rank, "it is stopped; it may be continued")
        return self._condemn(rank, now_s, silence, limit, ("its process is stopped",))

    def _judge_disk(self, rank: int, now_s: float, limit: float) -> Verdict:
        """Judge a process in state D: there a process cannot be killed; its device and number are not to be used again."""
        track = self._tracks[rank]
        waited = now_s - track.disk_s
        if track.num_disk < DISK_LOOKS or waited <= max(DEVICE_FACTOR * limit, self.mode.disk_s):
            return self._wait(rank, "it waits for a device or a file system")
        reason = (
            f"rank {rank} has waited for a device for {waited:.0f} s and cannot be killed: its node is to be replaced"
        )
        evidence = (f"no progress for {self.silence_s(rank, now_s):.0f} s", f"state D at {track.num_disk} looks")
        return Verdict(Kind.REPLACE_NODE, (rank,), reason, evidence, waited)

    def _judge_quiet(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict:
        """Neither it nor anything that descends from it gives a sign of life."""
        sight, waiters = self._tracks[rank].sight, self._waiters(rank, now_s)
        if sight.state == "R":  # in what it waited a moment ago is not to be seen
            return self._wait(rank, "it is ready to run, and waits for a processor")
        patience, why = limit, "it is quiet; it may go on"
        if sight.device:
            patience, why = max(patience, self.mode.device_s), "it may wait for its accelerator"
        if sight.call or sight.waits_in:
            patience = max(patience, self.mode.chosen_s, self._granted_s())
            why = f"it waits for {sight.waits_in}" if sight.waits_in else f"it waits in {sight.call}"
        if not waiters and self.mode.learns:
            patience, why = self._unwaited_s(sight, patience), f"{why}, and nobody waits for it"
        if silence <= patience or not self._is_quiet(rank, now_s, silence, patience):
            return self._wait(rank, why)
        second = "it neither computes nor wakes nor reads"
        others = f"{_waiting(waiters)} for it, without progress" if waiters and self.mode.learns else ""
        called = f"it waits in {sight.call}" if sight.call else ""
        return self._condemn(rank, now_s, silence, patience, (second, called, others))

    def _unwaited_s(self, sight: WorkerSample, patience: float) -> float:
        """Return how long a quiet rank is left alone that harms nobody; for ever, if it is known what it waits for."""
        if sight.waits_in or sight.call:
            return math.inf
        return max(patience, self.mode.alone_s if self._world_size <= 1 else self.mode.unwaited_s)

    def _judge_busy(self, rank: int, now_s: float, silence: float, limit: float) -> Verdict:
        waiters, track = self._waiters(rank, now_s), self._tracks[rank]
        patience = max(BUSY_FACTOR * limit, self.mode.busy_s, self._granted_s())
        if self.mode.learns and now_s - track.activity.main_s > 2 * WINDOW_S:  # its threads or its children do
            patience = max(patience, self.mode.unwaited_s)
        still = now_s - track.activity.transferred_s
        if not waiters or not self._all_wait(rank, now_s) or min(silence, still) <= patience:
            return self._wait(rank, "it computes, reads or wakes: slow, not stuck")
        evidence = [f"it computes, and {_waiting(waiters)} for it"]
        places = track.sight.places[-SAME_PLACES:]
        if self.mode.learns:
            if len(places) < SAME_PLACES or len(set(places)) > 1:
                return self._wait(rank, "it computes at changing places: slow, not stuck")
            evidence.append(f"no byte moves, and {len(places)} stacks show it at {places[-1]}")
        return self._condemn(rank, now_s, silence, patience, evidence)

    def _granted_s(self) -> float:
        """Return how long the script lets ranks wait for one that does something else."""
        return max(self.mode.granted_s(track.sight.beat) for track in self._tracks.values())

    def _judge_all(self, now_s: float) -> Verdict:
        """All wait for each other."""
        longest = max(self.silence_s(rank, now_s) for rank in self._tracks)
        reason = f"all ranks wait in collectives for {longest:.1f} s and none is missing"
        others = (f"{_waiting(self._elsewhere)} on other nodes, as their launchers say",) if self._elsewhere else ()
        ranks, kind = (*self._tracks, *self._elsewhere), Kind.RESTART_ALL
        if self.mode.learns and (-1, self._step()) in self._memory.places:
            kind, reason = Kind.REPORT, f"{reason}, as before at this step: left alone"
        return Verdict(kind, ranks, reason, (self._where(sorted(self._tracks)), *others), found_after_s=longest)

    def _tell_of_devices(self, now_s: float) -> list[Verdict]:
        """All ranks here may hang on their accelerators. It is only told: one long kernel on each looks like that.

        A wait for a device computes or sleeps in the driver, and shows no collective. With the presets of `checkpoint.device.accelerator`
        torch ends nobody either.
        """
        tracks = self._tracks
        silent = [
            rank
            for rank, track in tracks.items()
            if track.sight.device
            and not track.sight.waits_in
            and track.sight.state not in "TtFZX"
            and not self._stands(rank)
            and min(self.silence_s(rank, now_s), now_s - track.activity.transferred_s)
            > max(self.limit_s(rank), self.mode.device_s)
        ]
        if not self.mode.learns or self._world_size < 2 or not silent or len(silent) < len(tracks):
            return []
        longest = max(self.silence_s(rank, now_s) for rank in silent)
        reason = f"no rank here made progress for {longest:.0f} s, and all may wait for their accelerators: left alone"
        advice = (
            "a hang in `.item()` looks like that; `--watchdog=quick` replaces, torch's own limit may be switched off"
        )
        return [Verdict(Kind.REPORT, tuple(silent), reason, (advice,), found_after_s=longest)]

    def _step(self) -> int:
        return max((track.sight.beat.step for track in self._tracks.values()), default=-1)

    def _where(self, ranks: Iterable[int]) -> str:
        return "; ".join(f"rank {rank} in {_place(self._tracks[rank].sight.beat)}" for rank in ranks)

    def _is_past_hope(self, rank: int, now_s: float) -> bool:
        """Return whether it stands in a collective for longer than all may, and no byte of it moves."""
        track = self._tracks[rank]
        moving = now_s - track.activity.threads_s < WINDOW_S
        limit = self.mode.together_limit_s(track.sight.beat, moving=moving)
        if track.sight.device and not track.sight.beat.inside:  # it may wait for a long kernel of its own
            limit = max(limit, self.mode.device_s)
        return min(self.silence_s(rank, now_s), now_s - track.activity.transferred_s) > limit

    def _condemn(self, rank: int, now_s: float, silence: float, limit: float, more: Iterable[str]) -> Verdict:
        sight = self._tracks[rank].sight
        phase = _phase(sight, self.mode).name.lower()
        first = f"no progress for {silence:.1f} s in phase {phase}, limit {limit:.1f} s, after step {sight.beat.step}"
        second, *others = (fact for fact in more if fact)
        missing = self._missing(rank)
        evidence = (first, second, *others, *([missing] if missing else []))
        kind, reason = Kind.RESTART_RANK, f"rank {rank} is stuck: {second}"
        if self.mode.learns and sight.state != "T":
            if (rank, sight.beat.step) in self._memory.places:
                kind, reason = Kind.REPORT, f"{reason}. It was replaced at this step before: left alone"
            elif not self._may_replace:
                kind, reason = Kind.REPORT, f"{reason}. {LEFT_ALONE}"
        return Verdict(kind, (rank,), reason, evidence, now_s - self._tracks[rank].since_s)

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
        return sight.state not in "TF" and (sight.beat.inside or sight.stands is Phase.COLLECTIVE)

    def _waiters(self, rank: int, now_s: float) -> list[int]:
        """Return who stands in a collective because of this rank; nobody, if any other rank here makes progress.

        Where no other rank is here, those of other nodes count: if all of them are stuck, this one is what they wait for.
        """
        others = [other for other in self._tracks if other != rank]
        if not others:
            return list(self._elsewhere) if 0 < self._world_size - 1 == len(set(self._elsewhere) - {rank}) else []
        least = self.mode.floors_s[Phase.COLLECTIVE][0]
        if any(self.silence_s(other, now_s) <= least for other in others):
            return []
        return [other for other in others if self._stands(other)]

    def _all_wait(self, rank: int, now_s: float) -> bool:
        """Return whether every other rank that is known stands in a collective, and has for its limit."""
        return all(
            self._stands(other) and self.silence_s(other, now_s) > self.mode.limit_s(track.sight.beat, Phase.COLLECTIVE)
            for other, track in self._tracks.items()
            if other != rank
        )

    def _is_quiet(self, rank: int, now_s: float, silence: float, limit: float) -> bool:
        """Return whether nothing has moved for as long as the limit, and for most of the time without progress."""
        return now_s - self._tracks[rank].activity.moved_s > max(limit, silence / 2)


def _phase(sight: WorkerSample, mode: Mode) -> Phase:
    """Return where it says it is, unless its stack shows something slower, or a collective inside a step."""
    said, shown = sight.beat.phase, sight.stands
    if shown is None:
        return said
    if shown is Phase.COLLECTIVE and said in STEPPING:
        return shown
    return shown if mode.floors_s[shown][0] > mode.floors_s[said][0] else said


def _place(beat: Beat) -> str:
    if not beat.collective:
        return "a collective"
    return f"{beat.collective} no. {beat.sequence}"


def _names(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) != 1)} {some_of(listed, 8)}"


def _waiting(ranks: Iterable[int]) -> str:
    listed = tuple(ranks)
    return f"{_names(listed)} {'waits' if len(listed) == 1 else 'wait'}"
