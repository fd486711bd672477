"""One cell of the matrix, from its first save to the first one after it came back, and the facts of its two lives.

begin: three versions are durable, one more is in two nodes. strike: four saves while something is wrong. heal: nothing
is wrong any more, who was stopped says what it has to say. come back: all ranks are new processes to the keepers, decide
as those of a training do (`checkpoint.restore.version_decision`, in threads), load, are refused as members of the past, and save once more,
which has to reach every level (V1, V3). What is observed goes to `testing.checks.invariants.judge`; storage is read past holdfast.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from holdfast.base.errors import CorruptError, Fenced, HoldfastError
from holdfast.checkpoint.job import bootstrap, collectives
from holdfast.checkpoint.restore.fetcher import Fault, Fetcher
from holdfast.checkpoint.restore.version_decision import Decisions
from holdfast.core.model import Level, Version
from holdfast.core.recovery import version_choice
from holdfast.core.recovery.version_choice import Choice, Facts
from holdfast.keeper.replication.image_transfer import PeerReader
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.client import Assembly
from holdfast.testing.checks import evidence
from holdfast.testing.checks.invariants import Ack, Course, Life, Resumed, StorageView, Violation, judge
from holdfast.testing.faults import injections
from holdfast.testing.faults.cells import Cell
from holdfast.testing.faults.rank import RankProcess
from holdfast.testing.faults.ranks import Apart, Here, Rank
from holdfast.testing.faults.rig import Rig, Trainer, image_of, reached, save_all
from holdfast.testing.room import Room
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.processes import start_time

# Durable versions before the fault, the one that is only replicated, and those that are saved while something is wrong:
# the first and the last of these are due for storage.
NUM_DURABLE = 3
SAFE = NUM_DURABLE
FIRST, LAST = SAFE + 1, SAFE + 4
PATIENCE_S = 6.0
REACH_S = 20.0
LOAD_S = 60.0
# How long what refuses does so while the job comes back.
REFUSES_S = 1.0
KEEP_LAST = 2
LOG_LINES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """Says what became of a cell.

    Attributes:
        acknowledged: levels that were named.
        back: the version that all came back from.
        violations: (invariant, what).
        evidence: the end of the keepers' logs, if something was violated.
    """

    cell: str
    phase: str
    group: str
    acknowledged: int
    back: str
    why: str
    seconds: float
    violations: tuple[tuple[str, str], ...]
    evidence: tuple[str, ...] = ()


def run(cell: Cell, base: Path) -> Outcome:
    """Runs a cell in a directory of its own, and judges it."""
    started = time.monotonic()
    rig = Rig(base, num_nodes=cell.num_nodes, begin_timeout_s=0.5)
    with contextlib.closing(Job(rig)) as job:
        with job.promised("V1"):
            job.begin(apart=cell.node if cell.of_trainer else None)
            job.strike(cell)
            job.heal(cell)
            job.come_back(cell)
        found = judge(job.course)
    violations = tuple((violation.invariant, violation.what) for violation in found)
    seconds = time.monotonic() - started
    told, back = len(job.life.acks), str(job.back or "")
    evidence = _logs(base) if violations else ()
    return Outcome(str(cell), cell.phase, cell.group, told, back, job.why, seconds, violations, evidence)


def _logs(base: Path) -> tuple[str, ...]:
    found = sorted(base.glob("rt/*/*/keeper.log"))
    return tuple(f"{log.parent.name}: {line}" for log in found for line in log.read_text().splitlines()[-LOG_LINES:])


@dataclass(slots=True)
class Job:
    """A job of the rig, and the facts of its lives."""

    rig: Rig
    life: Life = field(init=False)
    course: Course = field(init=False)
    pids: list[int] = field(init=False)
    ranks: list[Rank] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)
    back: Version | None = None
    why: str = ""
    _past: Assembly | None = None
    _spoiled: frozenset[Version] = frozenset()
    _undo: Callable[[], None] = lambda: None
    _relent: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.life = Life(self.rig.topology.world_size)
        self.course = Course(keep_last=KEEP_LAST, lives=[self.life])
        self.pids = [self.rig.hurtable(node) for node in range(len(self.rig.labels))]

    @contextlib.contextmanager
    def promised(self, invariant: str) -> Iterator[None]:
        """Make it a violation, and not the end of the drill, if what has to work does not."""
        try:
            yield
        except (HoldfastError, AssertionError) as error:
            self.course.lives[-1].faults.append(Violation(invariant, f"{type(error).__name__}: {error}"))

    def begin(self, *, apart: int | None = None) -> None:
        """Three versions are durable and two are kept, so retention has had something to do; one more is replicated."""
        rig = self.rig
        rig.next_incarnation()
        self._past = rig.assembly()
        for rank in range(rig.topology.world_size):
            if rank != apart:
                trainer = rig.trainer(rank)
                trainer.join(self._past)
                trainer.client.resume(rig.incarnation, None)
                self.ranks.append(Here(trainer))
            else:
                self.ranks.append(Apart(RankProcess(rig, rank)))
        for step in range(SAFE + 1):
            self._save(step, durable=step < NUM_DURABLE)
            version = Version(1, step)
            for level in (Level.REPLICATED, *([Level.DURABLE] if step < NUM_DURABLE else [])):
                if not self._until(partial(self._ended, version, level), REACH_S):
                    raise AssertionError(f"{version} never became {level.name.lower()}, and nothing is wrong")
        self._acknowledge()

    def strike(self, cell: Cell) -> None:
        """The fault, and saves that go on as well as they can."""
        if cell.where != "obtain":
            self._undo = injections.arm(cell, self.rig, self.pids, self.ranks)
        for step in range(FIRST, LAST + 1):
            self._save(step, durable=step in (FIRST, LAST) and not cell.lost, cell=cell)
            if cell.where == "socket":
                self.life.faults += injections.meanwhile(cell, self.rig)
            if cell.finished and step == FIRST:  # the next save's bytes may take the place of what nobody wrote yet
                self._until(partial(self._ended, Version(1, FIRST), Level.DURABLE), PATIENCE_S)
            self._until(partial(self._ended, Version(1, step), Level.CAPTURED), 0.4)
        due = [Version(1, LAST), *([Version(1, FIRST)] if cell.finished else [])]
        level = Level.REPLICATED if cell.lost else Level.DURABLE
        self._until(lambda: all(self._ended(version, level) for version in due), PATIENCE_S / (1 + cell.lost))
        self._acknowledge()
        named = {ack.version.step for ack in self.life.acks if ack.level is Level.DURABLE}
        if cell.finished and FIRST not in named:
            self.life.faults.append(Violation("V1", f"nobody finished what node {cell.node} could not write"))

    def heal(self, cell: Cell) -> None:
        """Nothing is wrong any more; then what lies at rest is damaged, if that is the cell."""
        self._undo()
        injections.heal(self.rig, self.pids)
        for rank in self.ranks:
            rank.wake()
        done = self._until(partial(self._ended, Version(1, LAST), Level.DURABLE), REACH_S if cell.caught_up else 0.5)
        self._acknowledge()
        if cell.caught_up and not done:
            self.life.faults.append(Violation("V1", f"storage serves again, and {Version(1, LAST)} is not durable"))
        self._settle()
        for rank in self.ranks:
            rank.close()
        if cell.lost:
            self._lose(cell.node)
        self.life.storage = self.look()
        if cell.where in ("file", "manifest"):
            for node in range(len(self.pids)):
                self._lose(node)
        if cell.what == "refuses":
            self._relent = injections.refuse(cell, Path(self.rig.root))
        elif cell.where in injections.AT_REST:
            spoiled = injections.at_rest(cell, Path(self.rig.root), self.pids)
            self._spoiled = frozenset([spoiled]) if spoiled and cell.where != "memory" else frozenset()

    def come_back(self, cell: Cell) -> None:
        """All ranks load, once more if a keeper is struck while they do; then the job goes on."""
        # With their trainers gone, keepers that died took their memory along.
        lost = frozenset(node for node, pid in enumerate(self.pids) if start_time(pid) is None)
        life = Life(self.rig.topology.world_size, lost_early=lost, spoiled=self._spoiled)
        self.course.lives.append(life)
        if cell.where == "obtain":
            self.rig.hurt(cell.node, f"{cell.what}@obtain")
            with contextlib.suppress(HoldfastError, AssertionError):
                self._load(timeout_s=1.0)
            injections.heal(self.rig, self.pids)
        with self.promised("V2"):
            trainers, self.resumed = self._load(timeout_s=10.0)
            life.resumed, self.back = self.resumed, self.resumed[0].version
            try:
                with self.promised("V1"):
                    self._go_on(life, trainers)
            finally:
                for trainer in trainers:
                    trainer.client.close()
                if cell.where != "manifest":  # which is not as it was before, and that is the cell's own doing
                    life.storage = self.look()

    def close(self) -> None:
        """Ends all processes."""
        for rank in self.ranks:
            rank.close()
        self.rig.close()

    def look(self) -> StorageView:
        """The root, read past holdfast. That a version is whole is told by its bundles: the rig's entries are no model's."""
        with self.rig.still():
            view = evidence.read_storage(Path(self.rig.root), num_entries=0)
        whole = {b.bundle_id for rank in range(self.rig.topology.world_size) for b in self.rig.trainer_bundles(rank)}
        versions = {}
        for version, stored in view.versions.items():
            problems = [text for text in stored.problems if "does not hold the whole state" not in text]
            names = {name.rpartition("-")[0] for name in stored.files if name.endswith(".safetensors")}
            if stored.manifest and not names >= whole:
                problems.append(f"bundles are missing: {sorted(whole - names)}")
            versions[version] = replace(stored, problems=tuple(problems))
        return replace(view, versions=versions)

    # --- the first life

    def _save(self, step: int, *, durable: bool, cell: Cell | None = None) -> None:
        for rank in self.ranks:
            mine, strike, salt = (
                injections.saves(cell, rank.rank, step, first=FIRST, last=LAST) if cell else (step, "", 0)
            )
            if mine is None:
                continue
            self.life.states[Version(1, mine), rank.rank] = self._digest(rank.rank, mine, salt)
            if salt:
                self.life.suspects |= {Version(1, mine)}
            rank.save(mine, durable=durable, strike=strike, salt=salt)

    def _digest(self, rank: int, step: int, salt: int = 0) -> str:
        return _digest({b.bundle_id: image_of(b, step, salt) for b in self.rig.trainer_bundles(rank)})

    def _acknowledge(self) -> None:
        for rank in self.ranks:
            for step in range(10 * LAST + 1):
                for level in sorted(rank.told(Version(1, step))):
                    ack = Ack(Version(1, step), level, rank.rank)
                    if ack not in self.life.acks:
                        self.life.acks.append(ack)

    def _ended(self, version: Version, level: Level) -> bool:
        for rank in self.ranks:
            standing = rank.standing(version)
            if standing is not None and not (standing[1] or level in standing[0]):
                return False
        return True

    def _until(self, fact: Callable[[], bool], timeout_s: float, *, every_s: float = 0.02) -> bool:
        """Waits for what may never come: the fault decides. Whether it came."""
        deadline = time.monotonic() + timeout_s
        while not (came := fact()) and time.monotonic() < deadline:
            time.sleep(every_s)
        return came

    def _settle(self) -> None:
        """Retention runs after the last word: waits until the root does not change for a moment."""
        seen: list[set[str]] = [set()]

        def quiet() -> bool:
            walked = os.walk(self.rig.root)  # which passes over what is removed meanwhile
            names = {os.path.join(top, name) for top, below, files in walked for name in (*below, *files)}
            same, seen[0] = names == seen[0], names
            return same

        self._until(quiet, REACH_S, every_s=0.15)

    def _lose(self, node: int) -> None:
        """A node's keeper ends, and its memory with it."""
        self.rig.hurt_keepers[node].kill()
        self.rig.hurt_keepers[node].wait()

    # --- the second one

    def _load(self, timeout_s: float) -> tuple[list[Trainer], list[Resumed]]:
        rig = self.rig
        rig.incarnation = rig.storage.incarnations.register()  # recorded only when all have loaded
        back = [rig.trainer(rank) for rank in range(rig.topology.world_size)]
        try:
            assembly = rig.assembly()
            for trainer in back:
                trainer.join(assembly)
            room = Room(len(back), timeout_s=LOAD_S)
            jobs = [bootstrap.Job(room.rank(trainer.rank), assembly) for trainer in back]
            relenting = threading.Timer(REFUSES_S, self._relent)
            relenting.start()
            with ThreadPoolExecutor(len(back)) as pool:
                resumed = list(pool.map(lambda job, trainer: self._load_rank(job, trainer, timeout_s), jobs, back))
            relenting.join()
            return back, resumed
        except BaseException:
            for trainer in back:
                trainer.client.close()
            raise

    def _load_rank(self, job: bootstrap.Job, trainer: Trainer, timeout_s: float) -> Resumed:
        """Load as checkpoint.restore.restorer does: everybody verifies what it got, side by side, and one NO begins it
        anew.
        """
        client = trainer.client
        decisions = Decisions(job, client, self.rig.storage, timeout_s=timeout_s)
        fetcher = Fetcher(client, timeout_s=timeout_s)
        while True:
            found = decisions.choose(None)
            if found.choice is None:
                raise AssertionError(f"nothing to come back from: {found.reason}")
            self.why = found.reason
            images, faults = collectives.together(
                job.group, partial(self._read, found.choice, decisions.facts, fetcher, trainer.rank)
            )
            if decisions.vote(found.choice, faults):
                return Resumed(trainer.rank, self.rig.incarnation, found.choice.version, _digest(images))
            client.release()

    def _read(self, choice: Choice, facts: Facts, fetcher: Fetcher, rank: int) -> tuple[dict[str, bytes], list[Fault]]:
        """Return what the rank gets of its bundles, and the copies that cannot be used."""
        plan = {fetch.ref.bundle_id: fetch for fetch in version_choice.fetches(choice, rank, facts)}
        images: dict[str, bytes] = {}
        faults: list[Fault] = []
        for item in fetcher.obtain(choice.version, plan.values(), faults):
            name = item.ref.bundle_id
            try:
                image_format.verify(item.view, item.seal, name)
                if item.seal.digest != plan[name].seal.digest:
                    raise CorruptError("the copy is not the one that was agreed on")
            except CorruptError as error:
                faults.append(Fault(name, plan[name].node, error.what))
            images[name] = bytes(item.view)
        return images, faults

    def _go_on(self, life: Life, trainers: list[Trainer]) -> None:
        """Training goes on: every level is reached again, and the past has no say."""
        rig = self.rig
        rig.storage.incarnations.record_resumed(rig.incarnation, self.back)
        for trainer in trainers:
            trainer.client.resume(rig.incarnation, self.back)
        version = save_all(trainers, 100, durable=True)
        for trainer in trainers:
            life.states[version, trainer.rank] = self._digest(trainer.rank, 100)
        for level in (Level.REPLICATED, Level.DURABLE):
            reached(trainers, version, level, REACH_S)
            life.acks += [Ack(version, level, trainer.rank) for trainer in trainers]
        life.faults += self._from_the_past(trainers)

    def _from_the_past(self, trainers: list[Trainer]) -> list[Violation]:
        """Checks that whoever speaks for the first incarnation is fenced: a launcher, a trainer, a keeper (S7)."""
        past, place = self._past, self.rig.keeper(0)
        found = []
        if past is None:
            raise AssertionError("begin comes first")

        def pull() -> None:
            hello = messages.Hello(
                job=place.job, role=messages.KEEPER, node=1, incarnation=past.incarnation, job_id=past.job_id
            )
            PeerReader(self.rig.address(0), hello, lambda: False).close()

        attempts: dict[str, Callable[[], object]] = {
            "assembled": lambda: trainers[0].client.assemble(past),
            "given a slot": lambda: trainers[0].client.begin(Version(1, 999), 4096, durable=False, timeout_s=0.5),
            "served as a keeper": pull,
        }
        for what, attempt in attempts.items():
            with contextlib.suppress(Fenced):
                attempt()
                found.append(Violation("S7", f"a member of incarnation {past.incarnation} was {what}"))
        return found


def _digest(images: dict[str, bytes]) -> str:
    state = hashlib.sha256()
    for name in sorted(images):
        state.update(name.encode() + images[name])
    return state.hexdigest()
