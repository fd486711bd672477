"""What goes from storage after a commit, and what must not: versions that somebody still writes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, Fenced, InUse, StorageError, UsageError
from holdfast.base.events import Events
from holdfast.core.model import Topology, Version
from holdfast.core.versions.coordinator_board import CommitOrder, PartReport
from holdfast.keeper.rpc.messages import Assembly
from holdfast.keeper.storage.retention import RetentionRunner, make_room
from holdfast.keeper.storage.writer import CommitJob, Committer
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from keeper.rig import eventually
from tiers.samples import JOB_LAYOUT, new_store, save, tree, verify


def test_halves_of_dead_incarnations_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = new_store(root)
    save(store, Version(1, 1))
    assert store.incarnations.register() == 2
    save(store, Version(2, 3))
    for version in (Version(1, 2), Version(2, 4)):  # everything but the commit
        shutil.copytree(root / str(Version(2, 3)), root / str(version))
        (root / str(version) / "manifest.json").unlink()
    being_written = tree(root / str(Version(2, 4)))

    assembly = Assembly(2, str(root), store.job_id(), Topology(("n",), (0,)), ())
    RetentionRunner(Events()).after(store, Version(2, 3), assembly, Version(1, 1))

    assert store.unfinished() == [Version(2, 4)]
    assert tree(root / str(Version(2, 4))) == being_written
    assert store.versions() == [Version(1, 1), Version(2, 3)]


def test_where_storage_is_full_halves_of_dead_incarnations_go_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = new_store(root)
    for step in range(1, 5):
        save(store, Version(1, step))
    assert store.incarnations.register() == 2
    for version in (Version(1, 9), Version(2, 10)):  # everything but the commit
        shutil.copytree(root / str(Version(1, 4)), root / str(version))
        (root / str(version) / "manifest.json").unlink()
    before, job = tree(root), store.job_id()

    for incarnation in (1, 3):  # one that a newer one has replaced, and one that could not be registered yet
        with pytest.raises(Fenced):
            make_room(store, Assembly(incarnation, str(root), job, Topology(("n",), (0,)), ()))
    assert tree(root) == before
    assert make_room(store, Assembly(2, str(root), job, Topology(("n",), (0,)), ())) == [Version(1, 9)]
    assert tree(root) == {name: data for name, data in before.items() if str(Version(1, 9)) not in name}


@pytest.mark.parametrize("by", ["storage that is full", "a commit"])
def test_room_is_not_made_of_what_is_pinned_while_another_node_retires_it(tmp_path: Path, by: str) -> None:
    """The other one finds the pin when the commit is gone, and brings the commit back; without its files it would be none."""
    root = tmp_path / "root"
    store, other = new_store(root), open_storage(root, Events())
    for step in range(1, 4):
        save(store, Version(1, step))
    assert store.incarnations.register() == 2
    assembly = Assembly(2, str(root), store.job_id(), Topology(("n", "m"), (0, 1)), ())
    pins, look, removed = store.marks.pins, other.look, list[Version]()

    def looks(*known: Collection[Version]) -> tuple[list[Version], list[Version]]:
        other.marks.pin(Version(1, 1))
        return look(*known)

    other.look = looks  # type: ignore[method-assign]

    def pinned() -> set[Version]:
        if Version(1, 1) in store.unfinished():
            if by == "a commit":
                RetentionRunner(Events()).after(other, Version(1, 3), assembly, Version(1, 3))
            else:
                removed.extend(make_room(other, assembly))
        return pins()

    store.marks.pins = pinned  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="is pinned"):
        store.retire(Version(1, 1))
    assert not removed
    assert verify(open_storage(root, Events()), Version(1, 1))


def test_a_damaged_version_stays_and_keeps_no_other(tmp_path: Path) -> None:
    """Nothing proves which of its files are ours. That is said, and the others go all the same."""
    root = tmp_path / "root"
    store = new_store(root)
    for step in range(1, 6):
        save(store, Version(1, step))
    part = root / str(Version(1, 1)) / "manifest-0.json"
    part.write_bytes(b"{}")
    damaged = tree(root / str(Version(1, 1)))

    assembly = Assembly(1, str(root), store.job_id(), Topology(("n",), (0,)), ())
    with pytest.raises(CorruptError, match="not the part that was committed"):
        RetentionRunner(Events()).after(store, Version(1, 5), assembly, None)

    assert store.versions() == [Version(1, 1), Version(1, 4), Version(1, 5)]
    assert tree(root / str(Version(1, 1))) == damaged


def test_a_link_to_what_was_moved_away_stops_nothing(tmp_path: Path) -> None:
    """Whoever moves a version of `keep_every` to a cheaper disk leaves a link. The disk would fill from then on."""
    root = tmp_path / "root"
    store, retention = new_store(root), RetentionRunner(Events())

    def commit(*steps: int) -> list[int]:
        for step in steps:
            save(store, Version(1, step))
            assembly = Assembly(1, str(root), store.job_id(), Topology(("n",), (0,)), (), keep_every=5)
            retention.after(store, Version(1, step), assembly, None)
        return [version.step for version in store.look()[0]]

    assert commit(*range(1, 7)) == [1, 4, 5, 6]
    moved = root / str(Version(1, 4))
    moved.rename(tmp_path / "moved")
    moved.symlink_to("../moved")
    before = tree(tmp_path / "moved")
    assert commit(7, 8) == [1, 5, 7, 8]
    assert moved.is_symlink()
    assert tree(tmp_path / "moved") == before


def test_what_is_pinned_is_not_even_tried(tmp_path: Path) -> None:
    """Storage would refuse to remove it, and every commit from then on would be told as a fault of retention."""
    store = new_store(tmp_path / "root")
    for step in range(1, 5):
        save(store, Version(1, step))
    store.marks.pin(Version(1, 1))

    assembly = Assembly(1, str(tmp_path / "root"), store.job_id(), Topology(("n",), (0,)), ())
    RetentionRunner(Events()).after(store, Version(1, 4), assembly, None)

    assert store.versions() == [Version(1, 1), Version(1, 3), Version(1, 4)]


def test_what_is_held_stays_until_it_is_released_or_its_holder_is_dead(tmp_path: Path) -> None:
    """A holder of an incarnation before is dead: who goes on holds anew."""
    store = new_store(tmp_path / "root")
    for step in range(1, 5):
        save(store, Version(1, step))
    mine, theirs = make_stamp(1), "i000001-t000000-h000000000000-p1"
    store.marks.hold(Version(1, 1), mine)
    store.marks.hold(Version(1, 2), theirs)

    def commit(version: Version, resumed: Version | None) -> list[Version]:
        save(store, version)
        assembly = Assembly(version.incarnation, str(tmp_path / "root"), store.job_id(), Topology(("n",), (0,)), ())
        RetentionRunner(Events()).after(store, version, assembly, resumed)
        return store.versions()

    assert commit(Version(1, 5), None) == [Version(1, step) for step in (1, 2, 4, 5)]
    store.marks.release(Version(1, 1), mine)
    assert commit(Version(1, 6), None) == [Version(1, step) for step in (2, 5, 6)]
    assert store.incarnations.register() == 2
    assert commit(Version(2, 7), Version(1, 6)) == [Version(1, 6), Version(2, 7)]
    assert store.marks.held() == {}


def test_a_committer_that_slept_removes_nothing_of_a_newer_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decided, slept, and meanwhile the job was told to resume from the version that it wants to remove."""
    root = tmp_path / "root"
    store = new_store(root)
    for step in range(1, 5):
        save(store, Version(1, step))
    assembly = Assembly(1, str(root), store.job_id(), Topology(("n",), (0,)), ())
    read = Storage.manifest

    def slept(self: Storage, version: Version) -> Manifest:
        found = read(self, version)
        monkeypatch.setattr(Storage, "manifest", read)
        newer = open_storage(root, Events())
        assert newer.incarnations.register() == 2
        newer.incarnations.record_resumed(2, Version(1, 1))
        return found

    monkeypatch.setattr(Storage, "manifest", slept)
    with pytest.raises(Fenced, match="newer incarnation"):
        RetentionRunner(Events()).after(store, Version(1, 4), assembly, None)

    assert store.versions() == [Version(1, step) for step in range(1, 5)]
    for version in store.versions():
        assert verify(store, version)


def test_a_pin_that_was_set_meanwhile_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    store = new_store(root)
    for step in range(1, 4):
        save(store, Version(1, step))
    assembly = Assembly(1, str(root), store.job_id(), Topology(("n",), (0,)), ())
    read = Storage.manifest

    def slept(self: Storage, version: Version) -> Manifest:
        found = read(self, version)
        self.marks.pin(version)
        return found

    monkeypatch.setattr(Storage, "manifest", slept)
    with pytest.raises(UsageError, match="is pinned"):
        RetentionRunner(Events()).after(store, Version(1, 3), assembly, None)
    assert Version(1, 1) in store.versions()


def test_what_another_job_writes_in_a_replaced_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was removed and begun anew while the committer slept; the new job's incarnation is a lower one."""
    root = tmp_path / "root"
    store = new_store(root)
    assert store.incarnations.register() == 2
    save(store, Version(2, 3))
    shutil.copytree(root / str(Version(2, 3)), root / str(Version(1, 2)))
    (root / str(Version(1, 2)) / "manifest.json").unlink()
    assembly = Assembly(2, str(root), store.job_id(), Topology(("n",), (0,)), ())
    look = Storage.look

    def slept(self: Storage, known: Collection[Version]) -> tuple[list[Version], list[Version]]:
        found = look(self, known)
        shutil.rmtree(root)
        save(new_store(root), Version(1, 2))
        (root / str(Version(1, 2)) / "manifest.json").unlink()  # not committed yet
        (root / ".tmp" / "i000001-t000000-h000000000000-p1.0a").write_bytes(b"half")
        return found

    monkeypatch.setattr(Storage, "look", slept)
    with pytest.raises(InUse, match="belongs to job"):
        RetentionRunner(Events()).after(store, Version(2, 3), assembly, None)
    monkeypatch.undo()
    assert new_store(root).unfinished() == [Version(1, 2)]
    assert len(tree(root / str(Version(1, 2)))) == 4
    assert len(tree(root / ".tmp")) == 1


@pytest.mark.parametrize(
    ("keep_every", "removed", "kept"), [(0, 5, [4, 6]), (4, 3, [1, 4, 5, 6])], ids=["newest", "first of 4 steps"]
)
def test_what_somebody_removed_meanwhile_keeps_no_place_of_the_last_good_ones(
    tmp_path: Path, keep_every: int, removed: int, kept: list[int]
) -> None:
    """Retention remembers what was committed, and looks anew at what a removal rests on."""
    root = tmp_path / "root"
    store, retirement = new_store(root), RetentionRunner(Events())
    assembly = Assembly(1, str(root), store.job_id(), Topology(("n",), (0,)), (), keep_every=keep_every)
    for step in range(1, 7):
        save(store, Version(1, step))
        if step == 6:  # by hand, or `holdfast rm` that was ended in the middle: the files stand, the commit does not
            (root / str(Version(1, removed)) / "manifest.json").unlink()
        retirement.after(store, Version(1, step), assembly, None)
    assert store.versions() == [Version(1, step) for step in kept]


def test_nothing_is_removed_before_what_has_to_stay_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another keeper may have been killed between the commit of the version before and the synchronisation of its directory."""
    store = new_store(tmp_path / "root")
    for step in range(1, 5):
        save(store, Version(1, step))
    assembly = Assembly(1, store.where, store.job_id(), Topology(("n",), (0,)), ())

    def refused(_: LocalBackend, directory: str) -> None:
        raise StorageError("the disk failed", where=directory)

    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "settle", refused)
        with pytest.raises(StorageError, match="the disk failed") as raised:
            RetentionRunner(Events()).after(store, Version(1, 4), assembly, None)
    assert raised.value.where == str(Version(1, 3))
    assert store.versions() == [Version(1, step) for step in range(1, 5)]
    RetentionRunner(Events()).after(store, Version(1, 4), assembly, None)
    assert store.versions() == [Version(1, 3), Version(1, 4)]


def test_a_mark_that_could_not_be_made_is_made_for_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keep_every` by time: else no version of those minutes would stay."""
    store, retirement = new_store(tmp_path / "root"), RetentionRunner(Events())
    assembly = Assembly(1, store.where, store.job_id(), Topology(("n",), (0,)), (), keep_every_s=3600.0)
    save(store, Version(1, 1))

    def refused(_: Version) -> None:
        raise StorageError("of a moment")

    with monkeypatch.context() as patch:
        patch.setattr(store.marks, "keep", refused)
        with pytest.raises(StorageError, match="of a moment"):
            retirement.after(store, Version(1, 1), assembly, None)
    save(store, Version(1, 2))
    retirement.after(store, Version(1, 2), assembly, None)
    assert store.marks.kept() == {Version(1, 2)}


def _job(store: Storage, step: int, done: Callable[[Version, bool], None]) -> CommitJob:
    """A version of which all but the commit stands."""
    version = Version(1, step)
    whole = save(store, version)
    store._backend.delete(f"{version}/manifest.json")
    parts = tuple(
        PartReport(version, index, name, length, digest, (), index)
        for index, (name, (length, digest)) in enumerate(whole.parts.items())
    )
    assembly = Assembly(1, store.where, store.job_id(), Topology(("n",), (0, 0)), ())
    return CommitJob(CommitOrder(version, JOB_LAYOUT, parts), assembly, None, done)


def _committer(store: Storage, told: list[tuple[Any, ...]]) -> Committer:
    alarms = SimpleNamespace(warn=lambda *said: told.append(said), calm=lambda _: None)
    state: Any = SimpleNamespace(lock=threading.RLock(), changed=lambda: None, alarms=alarms)
    return Committer(state, SimpleNamespace(open=lambda: store), Events())  # type: ignore[arg-type]


def test_the_next_commit_waits_for_no_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket that answers late the removal of thousands of files takes minutes."""
    store, told = new_store(tmp_path / "root"), list[tuple[Any, ...]]()
    committer = _committer(store, told)
    jobs = [_job(store, step, lambda *said: told.append(said)) for step in (1, 2, 3, 4)]
    removing, go_on, retire = threading.Event(), threading.Event(), store.retire

    def slow(version: Version, **permit: Any) -> None:
        removing.set()
        assert go_on.wait(60)
        retire(version, **permit)

    monkeypatch.setattr(store, "retire", slow)
    try:
        assert all(committer.put(job) for job in jobs[:3])
        assert removing.wait(60)
        assert committer.put(jobs[3])
        eventually(lambda: (Version(1, 4), True) in told)
        assert not committer.idle, "the keeper would end in the middle of the removal"
        go_on.set()
        eventually(lambda: committer.idle)
        assert store.named() == [Version(1, 3), Version(1, 4)]
    finally:
        go_on.set()
        committer.stop()
    assert told == [(Version(1, step), True) for step in (1, 2, 3, 4)]


def test_a_version_whose_commit_has_not_ended_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made behind newer ones, and who commits it looks whether it was removed meanwhile."""
    store, told = new_store(tmp_path / "root"), list[tuple[Any, ...]]()
    committer, job = _committer(store, told), _job(store, 1, lambda *said: told.append(said))
    for step in (2, 3, 4):
        save(store, Version(1, step))
    made, go_on, look_back = threading.Event(), threading.Event(), store._take_back_if_retired

    def slow(*asked: Any) -> None:
        made.set()
        assert go_on.wait(60)
        look_back(*asked)

    monkeypatch.setattr(store, "_take_back_if_retired", slow)
    try:
        assert committer.put(job)
        assert made.wait(60)
        committer._retirement.after(store, Version(1, 4), job.assembly, None)
        assert store.versions() == [Version(1, 1), Version(1, 3), Version(1, 4)]
        go_on.set()
        eventually(lambda: committer.idle)
        assert store.versions() == [Version(1, 3), Version(1, 4)], "its own retention lets it go"
    finally:
        go_on.set()
        committer.stop()
    assert told == [(Version(1, 1), True)]
