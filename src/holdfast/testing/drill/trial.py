"""One trial of the crash drill under way: lives, deaths, and what is found after each.

The stage does what a launcher would do (starts trainers, ends those whose peer died), what an operator would do (starts
afresh when nothing was ever acknowledged), and what a fault would do (the strikes). What it sees goes into a Record;
it judges nothing itself, but for processes that hang, fail or stay.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from holdfast.core.model import Version
from holdfast.testing.checks import corrupt, evidence, invariants
from holdfast.testing.checks.invariants import Life
from holdfast.testing.checks.power_cut_disk import Disk
from holdfast.testing.drill.drill_keeper import commit_again, keeper
from holdfast.testing.drill.record import Measured, Record
from holdfast.testing.drill.shared import FAILED, NUM_ENTRIES, REFUSED, Ground, Setup
from holdfast.testing.drill.trial_plan import SHAPES, Aim, LifePlan, Trial
from holdfast.testing.drill.trial_processes import Cast, Member, slot_inodes

LIFE_S = 20.0
# A fresh interpreter imports PyTorch first, on a machine that may be busy.
FULL_LIFE_S = 90.0
END_S = 5.0
READ_BYTES = 1 << 16
STRANGER = "notes.txt"
# The scale of random instants of a fresh trainer: coming back (its keeper starts meanwhile), and its script of saves.
USUAL_START_S, USUAL_SCRIPT_S = 0.6, 0.035
# The part of the strikes that falls into the coming back.
EARLY = 0.4


class Stage:
    """One job and its trials. `run` leaves no process behind."""

    def __init__(self, trial: Trial, sandbox: str, cast: Cast, measured: Measured, disk: Disk | None = None) -> None:
        self.record = Record(trial, measured)
        self._trial = trial
        self._sandbox = sandbox
        self._cast = cast
        self._ground: Ground = cast.ground
        self._measured = measured
        self._disk = disk
        self._ranks = range(SHAPES[trial.shape])
        self._buffer = b""
        self._number = 0
        self._due: list[tuple[float, tuple[str, ...]]] = []
        self._lost: set[int] = set()
        self._renewed: set[int] = set()
        self._dead_before: set[int] = set()
        self._done: set[str] = set()
        self._doomed: list[Member] = []
        self._unfound = False
        self._ready: dict[int, int] = {}
        self._overstayed: list[str] = []

    @property
    def _plan(self) -> LifePlan:
        return self._trial.lives[self._number]

    def run(self) -> None:
        """All lives, or those up to the first that violates something; then the end."""
        try:
            for number in range(len(self._trial.lives)):
                self._live(number)
                if self._may_start_afresh():
                    self._live(number, fresh=True)
                if invariants.judge(self.record.course):
                    break
        finally:
            self.record.course.left_behind = tuple(self._finish())

    def _live(self, number: int, *, fresh: bool = False) -> None:
        before = self.record.course.lives[-1] if self.record.course.lives else None
        self._number = number
        aim = self._plan.aim
        self._ground.enter_life(number, self._measured.strike(aim, self._trial.shape) if aim is not None else None)
        self._ground.drain_answers()
        self._done, self._lost, self._renewed = set(), set(), set()
        self._due, self._doomed, self._unfound = [], [], False
        self._dead_before = {m.pid for m in self._cast.members.values() if m.status is not None}
        life = Life(len(self._ranks))
        life.spoiled = (before.spoiled if before else frozenset()) | self._damage()
        life.wanted = self._to_go_back_to(before) if self._plan.roll_back else None
        if before is not None and self._plan.stranger:
            self._put_stranger(before)
        self.record.begin(life, aimed=aim is not None and not fresh)
        for rank in self._ranks:
            setup = self._setup(rank, wanted=str(life.wanted or ""), fresh=fresh)
            if self._trial.full_start:
                self._cast.start_trainer(setup)
            else:
                self._cast.fork_trainer(setup)
        self._watch(time.monotonic() + (FULL_LIFE_S if self._trial.full_start else LIFE_S))
        self._look()
        if self._plan.late_writer and not life.faults:
            self._late_writer()

    def _to_go_back_to(self, before: Life | None) -> Version | None:
        """The oldest durable version; the newest, where a living keeper may still be removing the others."""
        durable = before.storage.committed if before and before.storage else ()
        return (max if list(self._cast.alive("k")) else min)(durable, default=None)

    def _setup(self, rank: int, *, wanted: str = "", fresh: bool = False) -> Setup:
        return Setup(self._trial, self._number, rank, self._sandbox, wanted, fresh)

    def _may_start_afresh(self) -> bool:
        """Nothing that was acknowledged is left unspoiled: the refusal is right, and so is an operator's new start."""
        standing = set(invariants.standing(self.record.course.lives)) - self.record.life.spoiled
        if self.record.life.resumed or not self._unfound:
            return False
        if standing:
            if not (self._plan.aim and self.record.struck) and not self._plan.roll_back:
                self.record.fault("S1", f"it refused to come back; {max(standing)} was acknowledged and survived")
            return False
        self.record.life.faults.clear()
        return True

    def _start_keeper(self, node: int) -> None:
        """Start a keeper as the first rank that finds none would."""
        known = self._cast.members.get(f"k{node}")
        if known is not None and self._cast.is_alive(known.name) and not self._cast.is_dying(known):
            os.write(self._ground.answers[node][1], b'{"pid": 0}\n')  # somebody else asked before
            return
        newcomer = known is not None and known.pid not in self._dead_before
        if newcomer:
            self._renewed.add(node)
            self._lose_early({node})
            self._ground.cancel_strike()  # it has come
        setup = self._setup(node)
        ready, theirs = os.pipe()
        self._cast.fork_keeper(setup, functools.partial(keeper, setup, self._ground, theirs))
        os.close(theirs)
        self._ready[ready] = node

    def _pass_on(self, ready: int) -> None:
        """A keeper says that it listens, or died before it could: the trainer that waits is told."""
        said = os.read(ready, READ_BYTES) or b'{"error": "it was killed"}\n'
        os.write(self._ground.answers[self._ready.pop(ready)][1], said)
        os.close(ready)

    # --- a life under way

    def _watch(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._ground.journal_r, select.POLLIN)
        watched: set[int] = set()
        while self._cast.alive("t"):
            for member in self._cast.alive():
                if member.pid not in watched:
                    watched.add(member.pid)
                    poll.register(member.pidfd, select.POLLIN)
            for ready in self._ready:
                poll.register(ready, select.POLLIN)
            pause = min([deadline, *(at for at, _ in self._due)]) - time.monotonic()
            for fd, _ in poll.poll(max(0, pause * 1000)):
                if fd == self._ground.journal_r:
                    continue
                poll.unregister(fd)
                if fd in self._ready:
                    self._pass_on(fd)
            self._read_journal()
            self._strike_due()
            self._react()
            if time.monotonic() > deadline:
                self._hang()
        self._read_journal()
        self._judge_exits()
        while self._ready:
            os.close(self._ready.popitem()[0])

    def _react(self) -> None:
        """Does what a launcher would do about the dead, and ends the life when its script is over."""
        plan = self._plan
        living = {member.name for member in self._cast.alive("t")}
        # A keeper lives longer than a life; one that died before it is replaced when a trainer asks.
        # One whose ranks have finished ends by itself, with 0.
        dead = {
            m.name
            for m in self._cast.members.values()
            if m.pid not in self._dead_before and (m.status if m.name.startswith("k") else m.status is not None)
        }
        self._lose_early({int(name[1:]) for name in dead if name.startswith("k")})
        victims = plan.aim.victims if plan.aim else ()
        if len(victims) > 1 and dead & set(victims):
            self._end_trainers(*victims)
        elif any(name.startswith("t") for name in dead):
            if plan.ends != "close" or not self._closing(dead):
                self._end_trainers()
        elif not plan.onward and any(name.startswith("k") for name in dead):
            self._end_trainers()
        elif plan.ends != "close" and living and living <= self._done:
            self._end_trainers(*([f"k{node}" for node in self._ranks] if plan.ends == "kill all" else []))

    def _lose_early(self, nodes: set[int]) -> None:
        """Keepers died; what they held is lost unless a rank of theirs had come back and maps it."""
        self.record.life.lost_early |= nodes - {resumed.rank for resumed in self.record.life.resumed}

    def _closing(self, dead: set[str]) -> bool:
        return all(self._cast.members[name].status == 0 for name in dead if name.startswith("t"))

    def _end_trainers(self, *others: str) -> None:
        """Kills the trainers and `others`; notes which node's memory goes with them."""
        self._find_keepers()
        for node in self._ranks:
            keeper_dies = f"k{node}" in others or not self._cast.is_alive(f"k{node}")
            if keeper_dies or (node in self._renewed and not self._adopted(node)):
                self._lost.add(node)
        names = [*(member.name for member in self._cast.alive("t")), *others]
        self.record.say(f"the lane kills {names}; memory lost on nodes {sorted(self._lost)}")
        self._cast.kill(names)

    def _adopted(self, node: int) -> bool:
        """Return whether the new keeper has all slots that the trainer has."""
        trainer, new = self._cast.members[f"t{node}"], self._cast.members[f"k{node}"]
        return trainer.status is None and slot_inodes(trainer.pid) <= slot_inodes(new.pid)

    def _strike_due(self) -> None:
        now = time.monotonic()
        for at, victims in [due for due in self._due if due[0] <= now]:
            self._due.remove((at, victims))
            self._find_keepers()
            self.record.struck = True
            self._cast.kill(victims)

    def _find_keepers(self) -> None:
        """Keepers that trainers started as fresh interpreters; their command line names the sandbox."""
        if not self._trial.full_start:
            return
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "holdfast.keeper" in words and f"{self._sandbox}/r" in words:
                node = int(words[words.index("--node") + 1][1:])
                known = self._cast.members.get(f"k{node}")
                if known is not None and known.pid != process.pid and known.pid not in self._dead_before:
                    self._renewed.add(node)
                self._cast.meet(f"k{node}", self._number, process.pid)

    def _hang(self) -> None:
        """The life does not end: every stack goes to the logs, and that is a violation."""
        living = self._cast.alive()
        for member in living:
            self._cast.send(member, signal.SIGUSR1)
        time.sleep(0.3)  # lets them write
        names = [member.name for member in living]
        self.record.fault("V2", f"it did not end in time; {', '.join(names)} were alive")
        self._cast.kill(names)

    def _judge_exits(self) -> None:
        killed = bool(self.record.struck or self._lost)
        for member in self._mine():
            code = os.waitstatus_to_exitcode(member.status or 0)
            if code == FAILED or code not in {0, REFUSED, -signal.SIGKILL}:
                if not (code == FAILED and killed):
                    self.record.fault("V2", f"{member.name} ended with {code}")
            elif code and self._plan.ends == "close" and self._plan.aim is None:
                self.record.fault("V2", f"{member.name} did not come to the end of its script ({code})")
            elif code == REFUSED and not killed:
                self.record.fault("V2", f"{member.name} gave up, although nothing was killed")

    def _mine(self) -> list[Member]:
        return [m for m in self._cast.members.values() if m.name.startswith("t") and m.life == self._number]

    # --- the journal

    def _read_journal(self) -> None:
        while True:
            try:
                data = os.read(self._ground.journal_r, READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                fact = json.loads(line)
                self.record.note(fact)
                self._obey(fact)

    def _obey(self, fact: dict[str, Any]) -> None:
        event, who = fact["e"], fact["who"]
        if event == "keeper wanted" and self._cast.is_alive(who):
            self._start_keeper(int(who[1:]))
        elif event in {"done", "closed"}:
            self._done.add(who)
        elif event == "refused":
            self._unfound |= fact["what"].startswith(("VersionNotFound", "CorruptError"))
        elif event in {"begins", "resumed"} and self._trial.full_start and self._plan.aim is not None:
            self._strike_at_random(self._plan.aim, early=event == "begins")
        elif event == "strike" and self._plan.aim is not None:
            victims = self._plan.aim.victims
            if "delay_s" not in fact or who in victims:
                doomed = victims if "delay_s" not in fact else (who,)
                self._doomed += [self._cast.members[name] for name in doomed if name in self._cast.members]
            else:
                self._due.append((time.monotonic() + fact["delay_s"], victims))

    def _strike_at_random(self, aim: Aim, *, early: bool) -> None:
        if early and aim.fraction < EARLY:
            self._due.append((time.monotonic() + aim.fraction / EARLY * USUAL_START_S, aim.victims))
        elif not early and aim.fraction >= EARLY:
            self._due.append((time.monotonic() + (aim.fraction - EARLY) / (1 - EARLY) * USUAL_SCRIPT_S, aim.victims))

    # --- what is found after a life

    def _look(self) -> None:
        """Reads memory and storage of one instant, past the keepers; after an orderly end when they have ended."""
        self._find_keepers()
        self._ground.end_life()
        for member in self._doomed:  # SIGKILL is on its way
            self._cast.await_end(member, END_S)
        if self._closed():
            self._await_keepers()
        if self._disk is not None and self._doomed:
            self._disk.power_on()
        frozen = self._cast.freeze("k")
        self._read_journal()
        holders = {node: [m.pid for m in frozen if m.name == f"k{node}"] for node in self._ranks}
        memory = evidence.read_memory(holders, num_entries=NUM_ENTRIES)
        self.record.life.memory = replace(memory, lost=memory.lost | self._lost)
        self.record.life.storage = evidence.read_storage(Path(self._sandbox, "c"), num_entries=NUM_ENTRIES)
        self._cast.thaw("k")
        # A strike may have come this late; what it took with it was there when we looked, or not.
        late = {int(m.name[1:]) for m in frozen if not self._cast.is_alive(m.name)} - self._lost
        self.record.life.memory = replace(self.record.life.memory, lost=self.record.life.memory.lost | late)
        lost = sorted(self.record.life.memory.lost)
        self.record.say(f"the lane looks: keepers {[m.name for m in frozen]}, memory lost on nodes {lost}")

    def _closed(self) -> bool:
        return self._plan.ends == "close" and all(member.status == 0 for member in self._mine())

    def _await_keepers(self) -> None:
        for member in self._cast.alive("k"):
            if not self._cast.await_end(member, END_S):
                self._overstayed.append(f"keeper {member.name}, {END_S:g} s after the job closed")
        for member in self._cast.members.values():
            if member.name.startswith("k") and member.pid not in self._dead_before and member.status:
                self.record.fault("V5", f"keeper {member.name} ended with {os.waitstatus_to_exitcode(member.status)}")
        self._lost = set(self._ranks)  # given back, not lost; there is nothing to find any more

    def _damage(self) -> frozenset[Version]:
        """Flips a byte in the newest version in memory or storage; returns what was spoiled."""
        spoiled: Version | None = None
        if self._plan.damage == "memory":
            spoiled = corrupt.damage_memory([member.pid for member in self._cast.alive("k")])
        elif self._plan.damage == "storage":
            spoiled = corrupt.damage_storage(Path(self._sandbox, "c"))
        return frozenset({spoiled}) if spoiled else frozenset()

    def _put_stranger(self, before: Life) -> None:
        """A file of somebody else in the directory that is retired next."""
        root = Path(self._sandbox, "c")
        for manifest in sorted(root.glob("*/manifest.json"))[:1]:
            manifest.with_name(STRANGER).write_text("not yours")
            self._cast.freeze("k")  # one that lives on may still be writing or retiring
            before.storage = evidence.read_storage(root, num_entries=NUM_ENTRIES)
            self._cast.thaw("k")

    def _late_writer(self) -> None:
        """A keeper of the first incarnation wakes up and commits; nothing may come of it."""
        setup = self._setup(0)
        member = self._cast.fork_keeper(setup, functools.partial(commit_again, setup))
        self._cast.await_end(member, END_S)
        storage = evidence.read_storage(Path(self._sandbox, "c"), num_entries=NUM_ENTRIES)
        before = self.record.life.storage
        for version, stored in storage.versions.items():
            known = before.versions.get(version) if before else None
            if stored.manifest != (known.manifest if known else ""):
                self.record.fault("S7", f"a writer of a dead incarnation changed the manifest of {version}")

    def _finish(self) -> list[str]:
        """Ends everybody; returns what outlived an orderly end."""
        orderly = bool(self.record.course.lives) and self._closed()
        survivors = self._cast.end()
        if not orderly:
            return []
        left = self._overstayed or survivors
        runtime = Path(self._sandbox, "r")
        left += [f"file {path.relative_to(self._sandbox)}" for path in sorted(runtime.rglob("*")) if not path.is_dir()]
        storage = self.record.life.storage
        if storage is not None:
            left += [f"temporary file {name}" for name in storage.temporary]
            newest = max(storage.incarnations, default=0)
            left += [
                f"{', '.join(stored.files)} of {version}, which was never committed"
                for version, stored in storage.versions.items()
                if version.incarnation < newest and not stored.manifest and set(stored.files) - {STRANGER}
            ]
        return left
