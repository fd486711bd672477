"""Faults x phases: real keepers are hurt at every place that bytes and messages pass, and the whole course is judged.

Each cell is one job of two nodes: it saves, one keeper is hurt at one place while it goes on saving and retiring, then
everything heals, all ranks come back as the next incarnation, and load. `testing.invariants.judge` looks at every
level that was named, at what lies in storage (read past holdfast) and at what was loaded. Six cells run by
default; all of them with --slow, and print their table with -s.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from holdfast.base.errors import CorruptError, HoldfastError
from holdfast.core.lineage import Lineage
from holdfast.core.model import Level, Version
from holdfast.core.recovery import Facts, Quarantine, Stored, choose_version, fetches
from holdfast.testing import evidence
from holdfast.testing.damage import damage_memory
from holdfast.testing.invariants import Ack, Course, Life, Resumed, judge
from holdfast.tiers import format as image_format
from holdfast.tiers.procs import start_time
from node.rig import Rig, Trainer, image_of, reached, save_all

MakeRig = Callable[..., Rig]

FIRST, LAST = 3, 6  # steps that are saved while something is wrong; the last one is due for storage
PATIENCE_S = 4.0
MAX_BAD_COPIES = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """`what` is wrong at `where` (testing.drill.hurt) with the keeper of `node`; or `what` happens to it at once."""

    what: str
    where: str
    node: int

    def __str__(self) -> str:
        return f"{self.what}@{self.where}-{self.node}"


KEEPER_PLACES = [
    ("begin", 1), ("seal", 1), ("send", 1), ("receive", 1), ("persist", 1), ("part", 1), ("persist", 0), ("commit", 0),
    ("retire", 0), ("announce", 0),
]  # fmt: skip
CELLS = [
    *(Cell("kill", where, node) for where, node in KEEPER_PLACES),
    *(Cell("stop", where, node) for where, node in KEEPER_PLACES),
    *(Cell(code, where, 1) for code in ("ENOSPC", "EIO") for where in ("write", "fsync", "rename")),
    *(Cell("EIO", where, 0) for where in ("link", "unlink", "storage")),
    *(Cell("stall", where, node) for where, node in (("write", 1), ("fsync", 1), ("rename", 0), ("link", 0))),
    *(Cell("slow", "storage", node) for node in (0, 1)),
    *(Cell("ENOENT", "storage", node) for node in (0, 1)),
    *(Cell("lost", "node", node) for node in (0, 1)),
    *(Cell("flip", "memory", node) for node in (0, 1)),
    *(Cell(what, "obtain", node) for what, node in (("kill", 1), ("stop", 0))),
]
DEFAULT = {
    "kill@commit-0", "stop@part-1", "ENOSPC@write-1", "EIO@storage-0", "lost@node-1", "flip@memory-1",
}  # fmt: skip


def test_there_are_cells_enough_and_the_default_ones_exist() -> None:
    names = [str(cell) for cell in CELLS]
    assert len(names) == len(set(names)) >= 40
    assert set(names) >= DEFAULT


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=() if str(c) in DEFAULT else pytest.mark.slow) for c in CELLS]
)
def test_no_fault_in_any_phase_breaks_a_promise(make_rig: MakeRig, cell: Cell) -> None:
    job = Judged(make_rig(num_nodes=2, begin_timeout_s=0.5))
    job.begin()
    job.strike(cell)
    job.heal()
    job.come_back(restrike=cell if cell.where == "obtain" else None)

    found = judge(job.course)

    print(f"{cell}: {len(job.life.acks)} levels named, came back with {job.back}, {len(found)} violations")
    assert [str(violation) for violation in found] == [], job.why


def test_the_judge_of_the_matrix_is_not_blind(make_rig: MakeRig) -> None:
    """What a bug would leave behind is put into the facts of a good course, and each is reported by its invariant."""
    job = Judged(make_rig(num_nodes=2))
    job.begin()
    job.heal()
    job.come_back()
    assert judge(job.course) == []
    assert job.life.storage is not None
    newest, older = max(job.life.storage.committed), Version(1, 1)
    one, other = job.resumed
    root = job.rig.base / "ck" / str(newest)

    def reported(*resumed: Resumed) -> set[str]:
        job.course.lives[-1].resumed, job.course.lives[-1].storage = list(resumed), job.look()
        return {violation.invariant for violation in judge(job.course)}

    def of(rank: Resumed, version: Version) -> Resumed:
        return replace(rank, version=version, digest=job.life.states[version, rank.rank])

    assert "S1" in reported(of(one, older), of(other, older)), "a durable version is passed over"
    assert "S10" in reported(of(one, older), other), "the ranks load two versions"
    assert "S5" in reported(replace(one, digest="other"), other), "other bytes are loaded"
    (root / "notes.txt").write_text("mine")
    assert reported(one, other) == set(), "what is not ours is nobody's business"
    file = next(root.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "S2" in reported(one, other), "a file is torn"
    file.unlink()
    assert "S2" in reported(one, other), "a file is gone"
    file.write_bytes(whole)
    manifest = (root / "manifest.json").read_bytes()
    (root / "manifest.json").write_bytes(manifest.replace(b'"layout"', b'"layouT"'))
    assert "S7" in reported(one, other), "a manifest has another content than before"
    (root / "manifest.json").unlink()
    assert reported(one, other) & {"S8", "S11", "S13"}, "the newest durable version goes back"


class _Wrong(Exception):
    """A copy does not have the bytes of its seal: (version, bundle, node)."""

    def __init__(self, version: Version, bundle_id: str, node: int | None) -> None:
        super().__init__(f"{bundle_id} of {version} from {node}")
        self.copy = (version, bundle_id, node)


class Judged:
    """A job of the rig, and the facts of its two lives."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pids = [rig.hurtable(node) for node in range(len(rig.labels))]
        self.life = Life(rig.topology.world_size)
        self.course = Course(keep_last=2, lives=[self.life])
        self.trainers: list[Trainer] = []
        self.resumed: list[Resumed] = []
        self.back: Version | None = None
        self.why = ""

    def begin(self) -> None:
        """Three versions are durable and two are kept: retention has had something to do."""
        self.trainers = self.rig.start()
        for step in range(FIRST):
            self._note(step)
            version = save_all(self.trainers, step, durable=True)
            reached(self.trainers, version, Level.REPLICATED)
            reached(self.trainers, version, Level.DURABLE)
        self._acknowledge()

    def strike(self, cell: Cell) -> None:
        """The fault, and saves that go on as well as they can."""
        rig, pid = self.rig, self.pids[cell.node]
        if cell.what == "lost":
            os.kill(pid, signal.SIGKILL)
            self.trainers[cell.node].client.close()
        elif cell.what != "flip" and cell.where != "obtain":
            rig.hurt(cell.node, f"{cell.what}@{cell.where}")
        for step in range(FIRST, LAST + 1):
            self._note(step)
            for trainer in self.trainers:
                with contextlib.suppress(HoldfastError):
                    slot = trainer.begin(step, durable=step in (FIRST, LAST), timeout_s=0.5)
                    trainer.client.copied(trainer.version(step), trainer.write(slot, step))
            self._until(lambda step=step: self._ended(Version(1, step), Level.CAPTURED), 0.4)
        self._until(lambda: self._ended(Version(1, LAST), Level.DURABLE), PATIENCE_S)
        self._acknowledge()
        if cell.what == "flip":
            assert damage_memory([pid]) == Version(1, LAST)

    def heal(self) -> None:
        """Nothing is wrong any more; who was stopped goes on, and says what it has to say."""
        for node, pid in enumerate(self.pids):
            self.rig.hurt(node, "")
            if start_time(pid) is not None:
                os.kill(pid, signal.SIGCONT)
        self._until(lambda: self._ended(Version(1, LAST), Level.DURABLE), 0.5)
        self._acknowledge()
        for trainer in self.trainers:
            trainer.client.close()
        self.life.storage = self.look()

    def come_back(self, restrike: Cell | None = None) -> None:
        """All ranks are new processes to the keepers, and load; once more if a keeper is struck while they do."""
        # With their trainers gone, keepers that died took their memory along.
        lost = frozenset(node for node, pid in enumerate(self.pids) if start_time(pid) is None)
        life = Life(self.rig.topology.world_size, lost_early=lost)
        self.course.lives.append(life)
        if restrike is not None:
            self.rig.hurt(restrike.node, f"{restrike.what}@obtain")
            with contextlib.suppress(HoldfastError):
                self._load(timeout_s=1.0)
            self.rig.hurt(restrike.node, "")
            if start_time(self.pids[restrike.node]) is not None:
                os.kill(self.pids[restrike.node], signal.SIGCONT)
        self.resumed = life.resumed = self._load(timeout_s=10.0)
        self.back = self.resumed[0].version
        life.storage = self.look()

    def _load(self, timeout_s: float) -> list[Resumed]:
        rig = self.rig
        rig.incarnation = rig.storage.register_incarnation()  # recorded only when all have loaded: here nobody goes on
        back = [rig.trainer(rank) for rank in range(rig.topology.world_size)]
        try:
            assembly = rig.assembly()
            for trainer in back:
                trainer.join(assembly)
            bad: set[tuple[Version, str, int | None]] = set()
            for _ in range(MAX_BAD_COPIES):
                try:
                    return self._load_all(back, self._facts(back[0], bad), timeout_s)
                except _Wrong as wrong:
                    bad.add(wrong.copy)
            raise AssertionError(f"nothing good was found: {bad}")
        finally:
            for trainer in back:
                trainer.client.close()

    def _load_all(self, back: list[Trainer], facts: Facts, timeout_s: float) -> list[Resumed]:
        """As train.restore does it: everybody verifies what it got, and one bad copy begins it anew."""
        decision = choose_version(facts)
        choice = decision.value
        assert choice is not None, decision.reason
        self.why = decision.reason
        found = []
        for trainer in back:
            plan = fetches(choice, trainer.rank, facts)
            located = trainer.client.obtain(choice.version, plan, timeout_s=timeout_s)
            for fetch, item in zip(plan, located, strict=True):
                try:
                    image_format.verify(item.view, item.seal, item.ref.bundle_id)
                except CorruptError as error:
                    copy = (choice.version, item.ref.bundle_id)
                    trainer.client.quarantine(*copy, node=fetch.node, reason=str(error))
                    raise _Wrong(choice.version, item.ref.bundle_id, fetch.node) from error
            images = {item.ref.bundle_id: bytes(item.view) for item in located}
            found.append(Resumed(trainer.rank, self.rig.incarnation, choice.version, _digest(images)))
        return found

    def _facts(self, trainer: Trainer, bad: set[tuple[Version, str, int | None]]) -> Facts:
        rig, inventory = self.rig, trainer.client.inventory()
        stored = {}
        for version in rig.storage.versions():
            files = rig.storage.manifest(version).bundles
            seals = {file.ref.bundle_id: file.seal for file in files}
            stored[version] = Stored(version, rig.topology.world_size, tuple(f.ref for f in files), seals)
        lineage, quarantine = Lineage(rig.storage.lineage()), Quarantine(frozenset(bad))
        return Facts(inventory.copies, dict(inventory.tables), stored, lineage, rig.topology, quarantine=quarantine)

    def look(self) -> evidence.StorageView:
        """The root, read past holdfast. That a version is whole is told by its bundles: the rig's entries are no model's."""
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

    def _note(self, step: int) -> None:
        for trainer in self.trainers:
            images = {bundle.bundle_id: image_of(bundle, step) for bundle in trainer.bundles}
            self.life.states[Version(1, step), trainer.rank] = _digest(images)

    def _acknowledge(self) -> None:
        for trainer in self.trainers:
            for step in range(LAST + 1):
                known = trainer.client.known(Version(1, step))
                for level in sorted(known.reached) if known is not None else ():
                    ack = Ack(Version(1, step), level, trainer.rank)
                    if ack not in self.life.acks:
                        self.life.acks.append(ack)

    def _ended(self, version: Version, level: Level) -> bool:
        for trainer in self.trainers:
            known = trainer.client.known(version)
            if trainer.client.alive and not (known is not None and (known.abandoned or level in known.reached)):
                return False
        return True

    def _until(self, fact: Callable[[], bool], timeout_s: float) -> None:
        """Waits for what may never come: the fault decides."""
        deadline = time.monotonic() + timeout_s
        while not fact() and time.monotonic() < deadline:
            time.sleep(0.02)


def _digest(images: dict[str, bytes]) -> str:
    state = hashlib.sha256()
    for name in sorted(images):
        state.update(name.encode() + images[name])
    return state.hexdigest()
