"""A lane of the crash drill: a warm process that runs trials one after the other and says what it found.

Everything is imported once; a trainer or keeper is then a fork away. Per trial the lane starts trainers, starts the
keepers that they ask for, listens to the journal, carries out the strikes on other processes, stops the keepers to
look at memory and storage at one instant, and gives all of it to testing/invariants.py. It has no threads of its own,
or forking would not be safe.

Run as `python -m holdfast.testing.drill_lane <directory>`: trials come in as JSON lines on standard input, outcomes go
out as JSON lines on standard output.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.core.model import Level, Version
from holdfast.testing import damage, drill_hooks, evidence, invariants, planted, write_order
from holdfast.testing.crash_points import Journal, Probe, Strike
from holdfast.testing.drill_cast import Cast, Member, slot_inodes
from holdfast.testing.drill_outcome import Outcome
from holdfast.testing.drill_plan import SHAPES, Aim, LifePlan, Trial, dry_runs
from holdfast.testing.drill_process import FAILED, KEEP_LAST, NUM_ENTRIES, REFUSED, Setup, enter, trainer
from holdfast.testing.invariants import Ack, Course, Life, Resumed, Violation
from holdfast.testing.write_order import FileOp, NamedDurable

LIFE_S = 20.0
END_S = 10.0
READ_BYTES = 1 << 16


@dataclass(slots=True)
class Measured:
    """How long phases last: (shape, actor kind, phase) -> what was seen in trials without a strike."""

    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    points: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    passes: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def strike(self, aim: Aim, shape: str) -> Strike:
        """The planned strike in seconds and numbers."""
        key = (shape, aim.actor, aim.phase)
        passes = max(1, round(statistics.median(self.passes.get(key, [1]))))
        seconds = statistics.median(self.seconds.get(key, [0.002]))
        points = round(statistics.median(self.points.get(key, [4])))
        return Strike(
            phase=aim.phase,
            actor=aim.actor,
            victim=aim.victim,
            occurrence=1 + min(passes - 1, int(aim.turn * passes)),
            stepped=aim.stepped and points > 0,
            fraction=aim.fraction,
            seconds=seconds * 1.1,
            points=points,
        )


class Stage:
    """One trial under way."""

    def __init__(self, trial: Trial, sandbox: str, measured: Measured) -> None:
        self.trial = trial
        self.sandbox = sandbox
        self.course = Course(KEEP_LAST)
        self.cast = Cast()
        self.struck = False
        self.refused = 0
        self.history: list[FileOp | NamedDurable] = []
        self.lines: list[str] = []
        self._measured = measured
        self._world = SHAPES[trial.shape]
        self._journal_r, self._journal_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._journal_w, True)
        self._buffer = b""
        self._began = time.monotonic()
        self._life = Life(self._world)
        self._number = 0
        self._due: list[tuple[float, str]] = []
        self._lost: set[int] = set()
        self._renewed: set[int] = set()
        self._overstayed: list[str] = []
        self._incarnation = 0
        self._unfound = False
        self._dead_before: set[int] = set()
        self._done: set[str] = set()
        self._answers: dict[str, tuple[int, int]] = {}

    # --- one trial

    def run(self) -> Course:
        """All lives, then the end; nothing of the trial is left when this returns."""
        try:
            for number, plan in enumerate(self.trial.lives):
                self._live(number, plan)
                if self._nothing_to_come_back_to():
                    # What a user would do: nothing was acknowledged, so the refusal is right, and so is a new start.
                    self._live(number, plan, fresh=True)
                if self._life.faults:
                    break
        finally:
            left = self._finish()
            for fd in (self._journal_r, self._journal_w, *(fd for pair in self._answers.values() for fd in pair)):
                os.close(fd)
        self.course.left_behind = tuple(left)
        return self.course

    def _nothing_to_come_back_to(self) -> bool:
        if self._life.resumed or not self._unfound:
            return False
        self._life.faults.clear()
        return not invariants.standing(self.course.lives)

    def _live(self, number: int, plan: LifePlan, *, fresh: bool = False) -> None:
        self._number, self._life = number, Life(self._world)
        self._done, self._lost, self._renewed, self._due = set(), set(), set(), []
        self._incarnation = 0
        self._unfound = False
        self._dead_before = {m.pid for m in self.cast.members.values() if m.status is not None}
        self.course.lives.append(self._life)
        self._life.spoiled = self._spoiled() | self._damage(plan.damage)
        wanted = self._oldest_durable() if plan.roll_back else None
        self._life.wanted = wanted
        strike = self._measured.strike(plan.aim, self.trial.shape) if plan.aim else None
        for rank in range(self._world):
            setup = Setup(self.trial, number, rank, self.sandbox, str(wanted or ""), fresh=fresh)
            self._start_trainer(setup, strike)
        self._watch(plan, time.monotonic() + LIFE_S)
        self._look()

    def _start_trainer(self, setup: Setup, strike: Strike | None) -> None:
        name = f"t{setup.rank}"
        if name not in self._answers:
            self._answers[name] = os.pipe()
        self.cast.fork(name, setup.life, functools.partial(self._trainer_body, setup, strike))

    def _trainer_body(self, setup: Setup, strike: Strike | None) -> int:
        name = f"t{setup.rank}"
        enter(self.sandbox, name, setup.life)
        journal = Journal(self._journal_w, name, setup.life)
        planted.apply(self.trial.plant, planted.TRAINER)
        drill_hooks.answer_from(self._answers[name][0], journal)
        self._probe(name, journal, strike).watch(drill_hooks.TRAINER_PHASES, drill_hooks.TRAINER_POINTS)
        return trainer(setup, journal)

    def _start_keeper(self, node: int, ready: int) -> None:
        plan = self.trial.lives[self._number]
        strike = self._measured.strike(plan.aim, self.trial.shape) if plan.aim else None
        name = f"k{node}"
        if name in self.cast.members and self.cast.members[name].life == self._number:
            strike = None  # the newcomer is not the one that was to die
            self._renewed.add(node)
        setup = Setup(self.trial, self._number, node, self.sandbox)
        self.cast.fork(name, self._number, functools.partial(self._keeper_body, setup, strike, ready))

    def _keeper_body(self, setup: Setup, strike: Strike | None, ready: int) -> int:
        name = f"k{setup.rank}"
        enter(self.sandbox, name, setup.life)
        journal = Journal(self._journal_w, name, setup.life)
        planted.apply(self.trial.plant, planted.KEEPER)
        self._probe(name, journal, strike).watch(drill_hooks.KEEPER_PHASES, drill_hooks.KEEPER_POINTS)
        return drill_hooks.keeper(setup.root, setup.config(setup.rank), ready)

    def _probe(self, name: str, journal: Journal, strike: Strike | None) -> Probe:
        return Probe(name, journal, strike=strike, pid_of=self.cast.pid_of, record_files=self.trial.record_files)

    # --- a life under way

    def _watch(self, plan: LifePlan, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._journal_r, select.POLLIN)
        watched: dict[int, Member] = {}
        while self.cast.alive("t"):
            for member in self.cast.alive():
                if member.pidfd not in watched:
                    watched[member.pidfd] = member
                    poll.register(member.pidfd, select.POLLIN)
            pause = min([deadline, *(at for at, _ in self._due)]) - time.monotonic()
            for fd, _ in poll.poll(max(0, pause * 1000)):
                if fd != self._journal_r:
                    poll.unregister(fd)
                    watched.pop(fd)
            self._read_journal()
            self._strike_due()
            self._react(plan)
            if time.monotonic() > deadline:
                self._hang()
        self._read_journal()
        self._judge_exits()

    def _react(self, plan: LifePlan) -> None:
        """Does what a launcher would do about the dead, and ends the life when its script is over."""
        living = {member.name for member in self.cast.alive("t")}
        # A keeper lives longer than a life; one that died before it is replaced when a trainer asks.
        dead = {m.name for m in self.cast.members.values() if m.status is not None and m.pid not in self._dead_before}
        victim = plan.aim.victim if plan.aim else ""
        if victim.startswith("n") and {f"t{victim[1:]}", f"k{victim[1:]}"} & dead:
            self._end_trainers(f"k{victim[1:]}")
        elif any(name.startswith("t") for name in dead):
            if plan.ends != "close" or not self._all_closing(dead):
                self._end_trainers()
        elif not plan.onward and any(name.startswith("k") for name in dead):
            self._end_trainers()
        elif plan.ends != "close" and living and living <= self._done:
            self._end_trainers(*(["k0", "k1"][: self._world] if plan.ends == "kill all" else []))

    def _all_closing(self, dead: set[str]) -> bool:
        return all(self.cast.members[name].status == 0 for name in dead if name.startswith("t"))

    def _end_trainers(self, *others: str) -> None:
        """Kills the trainers and `others`; notes which node's memory goes with them."""
        for node in range(self._world):
            keeper_dies = f"k{node}" in others or not self.cast.is_alive(f"k{node}")
            if keeper_dies or (node in self._renewed and not self._adopted(node)):
                self._lost.add(node)
        self.cast.kill(*[member.name for member in self.cast.alive("t")], *others)

    def _adopted(self, node: int) -> bool:
        """Whether the new keeper has all slots that the trainer has."""
        return slot_inodes(self.cast.pid_of(f"t{node}")) <= slot_inodes(self.cast.pid_of(f"k{node}"))

    def _strike_due(self) -> None:
        now = time.monotonic()
        for at, victim in [due for due in self._due if due[0] <= now]:
            self._due.remove((at, victim))
            names = [f"t{victim[1:]}", f"k{victim[1:]}"] if victim.startswith("n") else [victim]
            for name in names:
                if self.cast.is_alive(name):
                    os.kill(self.cast.pid_of(name), signal.SIGKILL)

    def _hang(self) -> None:
        """The life does not end: every stack goes to the logs, and that is a violation."""
        living = self.cast.alive()
        for member in living:
            os.kill(member.pid, signal.SIGUSR1)
        time.sleep(0.3)  # lets them write
        names = ", ".join(member.name for member in living)
        self._fault("V2", f"life {self._number + 1} did not end within {LIFE_S:g} s; {names} were alive")
        self.cast.kill(*[member.name for member in living])

    def _judge_exits(self) -> None:
        plan = self.trial.lives[self._number]
        expected = self.struck or self._lost
        for member in self.cast.members.values():
            if not member.name.startswith("t") or member.life != self._number or member.status is None:
                continue
            code = os.waitstatus_to_exitcode(member.status)
            died = code == -signal.SIGKILL
            if code == FAILED or (code not in {0, REFUSED} and not died):
                self._fault("V2", f"life {self._number + 1}: {member.name} ended with {code}")
            elif (plan.ends == "close" and plan.aim is None and code != 0) or (code == REFUSED and not expected):
                self._fault(
                    "V2", f"life {self._number + 1}: {member.name} gave up ({code}) although nothing was killed"
                )

    def _fault(self, invariant: str, what: str) -> None:
        self._life.faults.append(Violation(invariant, what))

    # --- the journal

    def _read_journal(self) -> None:
        while True:
            try:
                data = os.read(self._journal_r, READ_BYTES)
            except BlockingIOError:
                return
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._note(json.loads(line))

    def _note(self, fact: dict[str, Any]) -> None:
        event, who, rank = fact["e"], fact["who"], int(fact["who"][1:])
        if event not in {"file", "phase"}:
            self.lines.append(f"{(time.monotonic() - self._began) * 1000:.0f} ms {json.dumps(fact)}")
        if event == "resumed":
            self._incarnation = fact["incarnation"]
            version = Version.parse(fact["version"])
            self._life.resumed.append(Resumed(rank, fact["incarnation"], version, fact["digest"]))
        elif event == "saving":
            self._life.states[Version(fact["incarnation"], fact["step"]), rank] = fact["digest"]
        elif event == "ack":
            self._acknowledged(fact, rank)
        elif event == "refused":
            self.refused += 1
            self._unfound |= fact["what"].startswith("VersionNotFound")
        elif event == "failed":
            if not self.struck:
                self._fault("V2", f"life {fact['life'] + 1}: {who} failed: {fact['what']}")
        elif event == "strike":
            self._strikes(fact)
        elif event == "keeper wanted":
            self._start_keeper(rank, self._answers[who][1])
        elif event in {"done", "closed"}:
            self._done.add(who)
        elif event == "phase":
            self._measure(fact)
        elif event == "file":
            self.history.append(
                FileOp(fact["call"], fact["path"], fact.get("source", ""), fact["failed"], fact.get("replaces", False))
            )

    def _acknowledged(self, fact: dict[str, Any], rank: int) -> None:
        version = Version.parse(fact["version"])
        if version is None:
            return
        level = Level(fact["level"])
        self._life.acks.append(Ack(version, level, rank))
        if level is Level.DURABLE:
            self.history.append(NamedDurable(version))

    def _strikes(self, fact: dict[str, Any]) -> None:
        self.struck = True
        aim = self.trial.lives[fact["life"]].aim
        if aim is not None and "delay_s" in fact and aim.victim != aim.actor:
            self._due.append((time.monotonic() + fact["delay_s"], aim.victim))

    def _measure(self, fact: dict[str, Any]) -> None:
        key = (self.trial.shape, fact["who"], fact["phase"])
        self._measured.seconds[key].append(fact["seconds"])
        self._measured.points[key].append(fact["points"])
        if self._number == 0 or fact["phase"] == "restore":
            self._measured.passes[key].append(fact["pass"])

    # --- what is found after a life

    def _look(self) -> None:
        """Reads memory and storage of one instant, past the keepers; after an orderly end when they have ended."""
        if self._closed_in_order():
            for member in self.cast.alive("k"):
                if not self.cast.await_end(member, END_S):
                    self._overstayed.append(f"keeper {member.name}, {END_S:g} s after the job closed")
                elif member.status:
                    self._fault("V5", f"keeper {member.name} ended with {os.waitstatus_to_exitcode(member.status)}")
            self._lost = set(range(self._world))  # given back, not lost; there is nothing to find any more
        frozen = self.cast.freeze("k")
        self._read_journal()
        holders = {node: [m.pid for m in frozen if m.name == f"k{node}"] for node in range(self._world)}
        memory = evidence.read_memory(holders, num_entries=NUM_ENTRIES)
        self._life.memory = invariants.MemoryView(memory.copies, memory.contents, memory.lost | self._lost)
        self._life.storage = evidence.read_storage(Path(self.sandbox, "c"), num_entries=NUM_ENTRIES)
        self.cast.thaw("k")

    def _spoiled(self) -> frozenset[Version]:
        return self.course.lives[-2].spoiled if len(self.course.lives) > 1 else frozenset()

    def _oldest_durable(self) -> Version | None:
        storage = self.course.lives[-2].storage if len(self.course.lives) > 1 else None
        committed = storage.committed if storage else ()
        return min(committed, default=None)

    def _damage(self, where: str) -> frozenset[Version]:
        """Flips a byte in the newest version in memory or storage; returns what was spoiled."""
        spoiled: Version | None = None
        if where == "memory":
            spoiled = damage.damage_memory([member.pid for member in self.cast.alive("k")])
        elif where == "storage":
            spoiled = damage.damage_storage(Path(self.sandbox, "c"))
        return frozenset({spoiled}) if spoiled else frozenset()

    def _closed_in_order(self) -> bool:
        trainers = [member for member in self.cast.members.values() if member.name.startswith("t")]
        return self.trial.lives[self._number].ends == "close" and all(member.status == 0 for member in trainers)

    def _finish(self) -> list[str]:
        """Ends everybody; returns what outlived an orderly end."""
        orderly = bool(self.course.lives) and self._closed_in_order()
        survivors = self.cast.end()
        if not orderly:
            return []
        left = self._overstayed or survivors
        runtime = Path(self.sandbox, "r")
        left += [f"file {path.relative_to(self.sandbox)}" for path in sorted(runtime.rglob("*")) if not path.is_dir()]
        storage = self._life.storage
        return left + [f"temporary file {name}" for name in (storage.temporary if storage else ())]


class Lane:
    """Runs trials in a directory of its own."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._measured = Measured()

    def warm_up(self) -> list[Outcome]:
        """Loads what is loaded lazily, and measures the phases by trials without a strike."""
        drill_hooks.warm()
        return [self.run(trial) for trial in dry_runs()]

    def run(self, trial: Trial) -> Outcome:
        """One trial and the verdict on it."""
        began = time.monotonic()
        sandbox = tempfile.mkdtemp(prefix="", dir=self._directory)
        stage = Stage(trial, sandbox, self._measured)
        course = stage.run()
        found = invariants.judge(course) + write_order.check(f"{sandbox}/c", stage.history)
        outcome = Outcome(
            number=trial.number,
            phase=trial.phase,
            victim=trial.victim,
            plant=trial.plant,
            struck=stage.struck,
            acknowledged=sum(len(life.acks) for life in course.lives),
            refused=stage.refused,
            seconds=time.monotonic() - began,
            violations=tuple((violation.invariant, violation.what) for violation in found),
            evidence=(*stage.lines, *_logs(sandbox)) if found else (),
        )
        shutil.rmtree(sandbox, ignore_errors=True)
        return outcome


def _logs(sandbox: str) -> list[str]:
    lines = []
    for path in sorted(Path(sandbox).glob("*.log")):
        lines += [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-60:]]
    return lines


def main() -> int:
    """Serves trials until standard input ends."""
    torch.set_num_threads(1)
    lane = Lane(sys.argv[1])
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    for outcome in lane.warm_up():
        out.write(msgspec.json.encode(outcome) + b"\n")
    out.write(b"ready\n")
    for line in sys.stdin.buffer:
        out.write(msgspec.json.encode(lane.run(msgspec.json.decode(line, type=Trial))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
