"""What cannot be read is not damaged: a restore waits for the newest durable version, or fails; it takes nothing older.

With a real keeper and a real directory. What a keeper cannot read is a file with a link in its place, which no process
follows; what this process cannot read is a system call that fails. Votes, one by one: test_restore_votes.py.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.base.errors import (
    ConfigError,
    HoldfastError,
    InUse,
    KeeperLost,
    NewerFormat,
    StorageError,
    UsageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.checkpoint.job import wait_for_storage
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.restore import version_decision, version_vote
from holdfast.checkpoint.restore.version_decision import Decisions
from holdfast.core.model import BundleRef, Seal, Topology, Version
from holdfast.core.recovery.version_choice import MemoryCopy, Stored
from holdfast.keeper.rpc.client import Inventory
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage.version_store import Storage, open_storage
from kit.checkpointers import Make, Trainee, kill_keeper, leave
from kit.inventories import held_as
from kit.manifest_edits import rewrite
from ranks_kit import on_all
from sample_kit import MORE, sampled
from tiers.samples import new_store, save

NUM_STEPS = 3
OLDER, NEWEST = Version(1, NUM_STEPS - 2), Version(1, NUM_STEPS - 1)


class Bare(Trainee):
    """A model and an optimizer without state: new objects have the layout that was saved, and bundles are read whole."""

    def objects(self) -> dict[str, Any]:
        return {"model": self.model}


_trained: dict[tuple[type[Trainee], int, str], tuple[Trainee, Path]] = {}


def trained(make: Make, steps: int = NUM_STEPS, *, kind: type[Trainee] = Trainee, memory_budget: str = "") -> Trainee:
    """A job that made its steps durable, one by one, and is over with its keeper; the first one is copied from then on."""
    trainee = kind()
    checkpointer = make(trainee, memory_budget=memory_budget)
    root, key = Path(checkpointer._root), (kind, steps, memory_budget)
    if key in _trained:
        shutil.copytree(_trained[key][1], root)
        return _trained[key][0]
    for step in range(checkpointer.restore(), steps):
        trainee.train()
        checkpointer.save(step, "durable").wait()
    if checkpointer._run is not None and checkpointer._run.link.client is not None:
        kill_keeper(checkpointer)
    leave(checkpointer)
    _trained[key] = trainee, shutil.copytree(root, root.with_name("as-it-was"))
    return trainee


@contextmanager
def refusing(path: Path) -> Iterator[Callable[[], None]]:
    """No process can read the file: a link stands in its place. What is yielded brings it back."""
    aside = next(parent for parent in path.parents if parent.name == "job").with_name("aside")
    path.rename(aside)
    path.symlink_to("nowhere")

    def relent() -> None:
        if aside.exists():
            path.unlink()
            aside.rename(path)

    try:
        yield relent
    finally:
        relent()


class Waits(logging.Handler):
    """Does something once, when somebody says that it waits."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("waiting"):
            if not self.seen:
                self._then()
            self.seen.append(text)


@contextmanager
def on_waiting(then: Callable[[], None]) -> Iterator[list[str]]:
    handler, logger = Waits(then), logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)


def manifest_of(root: Path, version: Version = NEWEST) -> Path:
    return root / str(version) / "manifest.json"


def bundle_of(root: Path, version: Version = NEWEST) -> Path:
    return next((root / str(version)).glob("*.safetensors"))


def directory_of(root: Path, version: Version = NEWEST) -> Path:
    return root / str(version)


@pytest.mark.parametrize("file", sampled([manifest_of, bundle_of, directory_of], directory_of))
def test_a_file_that_cannot_be_read_for_a_while_is_waited_for(
    make: Make,
    tmp_path: Path,
    file: Callable[[Path], Path],
) -> None:
    kept = trained(make).fingerprint()
    other = Trainee()
    following = make(other)
    with refusing(file(tmp_path / "job")) as relent, on_waiting(relent) as said:
        assert following.restore() == NUM_STEPS
    assert other.fingerprint() == kept
    assert str(NEWEST) in said[0]
    assert "the path refuses" in said[0], "it says what it waits for"
    assert re.search(r"waited \d+ s of \d+ s", said[0])
    report = following.last_restore
    assert report is not None
    assert report.refused == (), "nothing is held against the copy"
    leave(following)


@pytest.mark.parametrize("file", sampled([manifest_of, bundle_of], bundle_of))
def test_a_durable_version_out_of_reach_is_an_error_and_nothing_older_is_taken(
    make: Make,
    tmp_path: Path,
    file: Callable[[Path], Path],
) -> None:
    kept = trained(make).fingerprint()
    root, other = tmp_path / "job", Trainee()
    with refusing(file(root)):
        following = make(other, close_timeout_s=1.0)
        with pytest.raises(StorageError) as caught:
            following.restore()
        error = caught.value
        assert str(NEWEST) in error.what
        assert f"{OLDER} is not taken in its place" in error.what
        assert "symbolic links" in error.what
        assert f'restore(version="{OLDER}")' in error.remedy
        assert f"--from-version {OLDER}" in error.remedy
        assert str(root) in error.where
        with pytest.raises(UsageError):
            following.save(7)
        leave(following)
    assert set(open_storage(root, Events()).incarnations.lineage()) == {1}, "nothing was gone on with"
    again = make(other)
    assert again.restore() == NUM_STEPS
    assert other.fingerprint() == kept
    leave(again)


@MORE
def test_the_way_back_that_the_error_names_is_open(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(make)
    with refusing(manifest_of(tmp_path / "job")):
        following = make(Trainee(), close_timeout_s=0.5)
        with pytest.raises(StorageError):
            following.restore()
        assert following.restore(OLDER) == OLDER.step + 1
        assert f"going back to {OLDER} leaves 1 newer versions behind, up to {NEWEST}" in caplog.text
        leave(following)


@pytest.mark.parametrize("file", sampled([manifest_of, directory_of], manifest_of))
def test_an_older_version_out_of_reach_holds_nobody_up(
    make: Make,
    tmp_path: Path,
    file: Callable[[Path, Version], Path],
) -> None:
    trained(make)
    with refusing(file(tmp_path / "job", OLDER)), on_waiting(lambda: None) as said:
        following = make(Trainee())
        assert following.restore() == NUM_STEPS
        leave(following)
    assert said == []


@MORE
def test_what_memory_holds_is_restored_although_its_manifest_cannot_be_read(
    make: Make,
    tmp_path: Path,
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    for step in range(2):
        trainee.train()
        checkpointer.save(step, "durable").wait()
    with refusing(manifest_of(tmp_path / "job", Version(1, 1))), on_waiting(lambda: None) as said:
        assert checkpointer.restore() == 2
    assert checkpointer.last_restore is not None
    assert set(checkpointer.last_restore.bytes) == {"slot"}
    assert said == []


# Of new objects of a Trainee, which have another layout, the keeper reads the chunks.
READS = [
    (budget, fault, name, kind)
    for budget, fault, name, kind in product(
        ["100KB", ""], ["error", "flip", "absent"], ["manifest.json", ".safetensors"], [Trainee, Bare]
    )
    if budget or kind is Bare
]


@pytest.mark.parametrize(
    ("budget", "fault", "name", "kind"),
    sampled(
        READS,
        ("100KB", "error", "manifest.json", Trainee),
        ("100KB", "flip", ".safetensors", Trainee),
        ("", "absent", "manifest.json", Bare),
    ),
)
def test_one_bad_read_takes_no_older_version(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: str,
    kind: type[Trainee],
    budget: str,
) -> None:
    """An error, bytes that are wrong once, or a file that shows late; with no level in memory, and with an empty one, so that this process reads."""
    kept = trained(make, kind=kind, memory_budget=budget).model.state_dict()
    left = [1]

    def spoiled(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: LocalBackend, file: str, *args: Any, **kwargs: Any) -> Any:
            if not (file.startswith(str(NEWEST)) and file.endswith(name) and left[0]):
                return real(self, file, *args, **kwargs)
            left[0] -= 1
            if fault == "error":
                raise StorageError("the path refuses: Input/output error", where=file)
            if fault == "absent":
                raise VersionNotFound("there is no such file", where=file)
            found = real(self, file, *args, **kwargs)
            if isinstance(found, bytes):
                return found[:-40] + bytes([found[-40] ^ 1]) + found[-39:]
            args[0][len(args[0]) // 2] ^= 1
            return found

        return read

    monkeypatch.setattr(LocalBackend, "read", spoiled(LocalBackend.read))
    monkeypatch.setattr(LocalBackend, "read_into", spoiled(LocalBackend.read_into))
    other = kind()
    following = make(other, memory_budget=budget)
    assert following.restore() == NUM_STEPS
    assert left == [0], "the fault was met"
    assert all(torch.equal(tensor, kept[name]) for name, tensor in other.model.state_dict().items())
    assert open_storage(tmp_path / "job", Events()).incarnations.lineage()[2] == NEWEST
    leave(following)


def test_a_newer_format_is_not_passed_over(make: Make, tmp_path: Path) -> None:
    trained(make)
    rewrite(manifest_of(tmp_path / "job"), '"format_version":1', '"format_version":4')
    following = make(Trainee())
    with on_waiting(lambda: None) as said, pytest.raises(NewerFormat) as caught:
        following.restore()
    assert said == [], "it does not pass by waiting"
    assert str(NEWEST) in caught.value.what
    assert "upgrade holdfast" in caught.value.remedy
    assert following.restore(OLDER) == OLDER.step + 1
    leave(following)


def test_a_missing_key_is_not_passed_over(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions before it are plain, and could be read."""
    trained(make, steps=2)
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'encryption_key = "{key}"\nencryption_required = false\n')
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    config = holdfast.Config(
        runtime_dir=os.environ["HOLDFAST_RUNTIME_DIR"],
        every="0",
        durable_every="0",
        linger_s=1.0,
        encryption_key=str(key),
        encryption_required=False,
    )
    trainee = Trainee()
    with holdfast.Checkpointer(tmp_path / "job", config=config, **trainee.objects()) as encrypting:
        assert encrypting.restore() == 2
        trainee.train()
        encrypting.save(2, "durable").wait()
        kill_keeper(encrypting)
        leave(encrypting)
    monkeypatch.delenv("HOLDFAST_CONFIG")
    following = make(Trainee())
    with pytest.raises(ConfigError, match="encrypted with key"):
        following.restore()
    leave(following)


# --- the path itself


def test_a_path_that_vanishes_while_it_is_looked_at_is_no_fresh_start(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unmounted between two calls: the empty mount point lists no version."""
    kept = trained(make).fingerprint()
    root, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    real = Storage.named

    def named(self: Storage) -> list[Version]:
        if not elsewhere.exists():
            root.rename(elsewhere)
            root.mkdir()
        return real(self)

    def mount() -> None:
        monkeypatch.setattr(Storage, "named", real)
        root.rmdir()  # nothing was written into it
        elsewhere.rename(root)

    other = Trainee()
    following = make(other)
    monkeypatch.setattr(Storage, "named", named)
    with on_waiting(mount) as said:
        assert following.restore() == NUM_STEPS
    assert "the checkpoint directory has vanished" in said[0]
    assert other.fingerprint() == kept
    leave(following)


@MORE
def test_a_path_that_becomes_another_jobs_while_it_is_looked_at_is_no_fresh_start(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another disk is mounted between two calls: it lists no version either."""
    trained(make)
    root, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    real = Storage.named

    def named(self: Storage) -> list[Version]:
        if not elsewhere.exists():
            root.rename(elsewhere)
            open_storage(root, Events()).claim()
        return real(self)

    following = make(Trainee())
    monkeypatch.setattr(Storage, "named", named)
    with pytest.raises(InUse, match="the path belongs to job"):
        following.restore()
    leave(following)


def test_a_missing_file_under_a_vanished_path_is_not_damage(tmp_path: Path) -> None:
    store = new_store(tmp_path / "root")
    save(store, Version(1, 1))
    manifest = store.manifest(Version(1, 1))
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="vanished"):
        store.manifest(Version(1, 1))
    with pytest.raises(StorageError, match="vanished"):
        store.bundles.read_into(Version(1, 1), manifest.bundles[0], memoryview(bytearray(manifest.bundles[0].length)))
    (tmp_path / "root").mkdir()
    with pytest.raises(StorageError, match="vanished"):
        store.bundles.image(Version(1, 1), manifest.bundles[0])


@pytest.mark.parametrize("by", sampled(["argument", "setting"], "setting"))
def test_an_empty_path_is_an_error_where_a_checkpoint_is_expected(
    make: Make,
    tmp_path: Path,
    by: str,
) -> None:
    """The directory was not mounted: nothing may be begun, or written, in its place."""
    root = tmp_path / "job"
    root.mkdir()
    expecting = make(Trainee(), **({"expect_checkpoint": True} if by == "setting" else {}))
    with pytest.raises(VersionNotFound, match="a checkpoint was expected") as caught:
        expecting.restore(required=True) if by == "argument" else expecting.restore()
    assert "mount it" in caught.value.remedy
    assert str(root) in caught.value.where
    assert list(root.iterdir()) == [], "the mount point is as it was"
    assert make(Trainee()).restore() == 0, "which is a fresh start where nothing is expected"


def test_a_job_that_never_saved_anything_is_none_where_a_checkpoint_is_expected(make: Make) -> None:
    first = make(Trainee())
    first.restore()
    leave(first)
    with pytest.raises(VersionNotFound, match="a checkpoint was expected"):
        make(Trainee()).restore(required=True)


@MORE
def test_what_is_expected_and_there_is_restored(make: Make) -> None:
    trained(make)
    following = make(Trainee(), expect_checkpoint=True)
    assert following.restore() == NUM_STEPS
    leave(following)
    anew = make(Trainee(), expect_checkpoint=True)
    assert anew.restore(fresh=True) == 0, "a fresh start that the script asks for, where the path is mounted"
    with pytest.raises(UsageError, match="leave one of them out"):
        anew.restore(fresh=True, required=True)
    leave(anew)


# --- what a fresh start and a roll-back leave


def test_a_fresh_start_leaves_the_newest_of_the_run_before(make: Make, tmp_path: Path) -> None:
    trained(make, steps=5)
    trainee = Trainee()
    anew = make(trainee)
    assert anew.restore(fresh=True) == 0
    for step in range(4):
        trainee.train()
        anew.save(step, "durable").wait()
    leave(anew)
    there = open_storage(tmp_path / "job", Events()).versions()
    assert there[:2] == [Version(1, 3), Version(1, 4)]
    assert there[-2:] == [Version(2, 2), Version(2, 3)]
    back = make(trainee)
    assert back.restore("i000001-s0000000004") == 5, "they can be gone back to"
    leave(back)


@MORE
def test_a_version_that_is_passed_over_unproven_is_kept(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher takes an older one because the job fails at the same step again and again."""
    trained(make)
    trainee = Trainee()
    following = make(trainee)
    monkeypatch.setattr(open_checkpointers.wish, "older", True)
    assert following.restore() == OLDER.step + 1
    for step in range(NUM_STEPS - 1, NUM_STEPS + 3):
        trainee.train()
        following.save(step, "durable").wait()
    leave(following)
    storage = open_storage(tmp_path / "job", Events())
    assert NEWEST in storage.versions()
    assert storage.marks.pins() == {NEWEST}


# --- all ranks alike, and keepers that do not answer


class Shelf:
    """Storage with durable versions, some of which refuse to be read."""

    where = "shelf"

    def __init__(self, versions: dict[Version, HoldfastError | None]) -> None:
        self._versions = versions
        self.pinned: list[Version] = []

    def named(self) -> list[Version]:
        return sorted(self._versions)

    def manifest(self, version: Version) -> Any:
        error = self._versions[version]
        if error is not None:
            raise error
        return version

    def job_id(self) -> str:
        return "j"

    def require_job(self, _: str) -> None:
        """It is."""


def decisions_of(group: Ranks, shelf: Any, inventory: Inventory, own: Inventory | None = None) -> Decisions:
    """`own`: what each rank's own keeper says that it holds; None: it does not answer."""
    topology = Topology(("a", "b"), (0, 1))
    lineage = SimpleNamespace(is_live=lambda _: True)
    job: Any = SimpleNamespace(group=group, topology=topology, lineage=lineage, ranks_per_reader=1)
    client: Any = SimpleNamespace(
        inventory=lambda wide=True: inventory if wide else own, answers=lambda _: own is not None, alive=True
    )
    return Decisions(job, client, shelf, timeout_s=0.3)


NOTHING = Inventory((), (), (), (), (0, 1))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version stands for its manifest: complete in storage."""
    ref, seal = BundleRef("g", (0, 1), 0, 1, 1, "f"), Seal("g", 1, "d")
    monkeypatch.setattr(version_vote, "stored_of", lambda version: Stored(version, 2, (ref,), {"g": seal}))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(StorageError("EIO"), StorageError), (NewerFormat("format 2"), NewerFormat), (KeeperLost("silent"), KeeperLost)],
)
@pytest.mark.usefixtures("stored")
def test_all_ranks_raise_the_same_class(error: HoldfastError, kind: type[HoldfastError]) -> None:
    shelf = Shelf({OLDER: None, NEWEST: error})
    told = on_all(3, lambda group: decisions_of(group, shelf, NOTHING).choose(None))
    assert [type(one) for one in told] == [kind] * 3
    assert all(str(NEWEST) in one.what and str(OLDER) in one.what for one in told)


@pytest.mark.usefixtures("stored")
def test_the_newest_that_was_saved_is_known_without_being_read() -> None:
    """What survivors' live state descends from: nothing is read of it, so nothing is waited for."""
    shelf = Shelf({OLDER: None, NEWEST: StorageError("EIO")})
    silent = Inventory((), (), (), (), (0,), silent=((1, "no answer"),), unheard=(1,))
    with on_waiting(lambda: None) as said:
        told = on_all(2, lambda group: decisions_of(group, shelf, silent).newest_saved())
    assert [(one.choice, one.awaited.version) for one in told] == [(None, NEWEST)] * 2
    assert said == []


@pytest.mark.usefixtures("stored")
def test_another_jobs_version_is_none_of_ours() -> None:
    shelf = Shelf({OLDER: None, NEWEST: InUse("it belongs to job x")})
    told = on_all(2, lambda group: decisions_of(group, shelf, NOTHING).choose(None))
    assert [one.choice.version for one in told] == [OLDER] * 2


@pytest.mark.usefixtures("stored")
def test_a_keeper_that_does_not_answer_is_waited_for_and_then_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hold a version in memory that is newer; that level does not outlive the loss of its node."""
    monkeypatch.setattr(version_decision, "KEEPER_PATIENCE_S", 0.3)
    silent = Inventory((), (), (), (), (0,), silent=((1, "no answer"),), unheard=(1,))
    told = on_all(2, lambda group: decisions_of(group, Shelf({NEWEST: None}), silent).choose(None))
    assert [one.choice.version for one in told] == [NEWEST] * 2
    assert "the keeper of b did not answer: what it holds is left out" in told[0].reason
    assert "waiting for a keeper: b may hold a newer version" in caplog.text
    assert "is given up" in caplog.text


@pytest.mark.usefixtures("stored")
def test_a_keeper_that_answers_late_is_heard() -> None:
    inventories = [Inventory((), (), (), (), (0,), silent=((1, "no answer"),), unheard=(1,)), NOTHING]
    asked = threading.Event()

    def inventory() -> Inventory:
        asked.set()
        return inventories.pop(0) if len(inventories) > 1 else inventories[0]

    def work(group: Ranks) -> Any:
        decisions = decisions_of(group, Shelf({NEWEST: None}), NOTHING)
        decisions._client.inventory = inventory  # type: ignore[method-assign]
        return decisions.choose(None)

    told = on_all(2, work)
    assert asked.is_set()
    assert [one.choice.version for one in told] == [NEWEST] * 2
    assert "left out" not in told[0].reason


@pytest.mark.usefixtures("stored")
def test_a_keeper_that_is_gone_is_not_waited_for() -> None:
    """Nobody listens at its address, so its memory is lost; the same of one that this machine cannot reach at all."""
    gone = Inventory((), (), (), (), (0,), silent=((1, "nobody listens"),))
    with on_waiting(lambda: None) as said:
        told = on_all(2, lambda group: decisions_of(group, Shelf({NEWEST: None}), gone).choose(None))
    assert [one.choice.version for one in told] == [NEWEST] * 2
    assert said == []


def test_with_a_keeper_silent_and_nothing_else_there_is_no_fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_decision, "KEEPER_PATIENCE_S", 0.3)
    silent = Inventory((), (), (), (), (0,), silent=((1, "no answer"),), unheard=(1,))
    told = on_all(2, lambda group: decisions_of(group, Shelf({}), silent).choose(None))
    assert [type(one) for one in told] == [KeeperLost] * 2
    assert "restore(fresh=True)" in told[0].remedy


HOLDS = Inventory((held_as(MemoryCopy.at(NEWEST, 1, 1, Seal("g", 1, "d"))),), (), (), (), (1,))


@pytest.mark.parametrize(("own", "begins"), [(NOTHING, True), (HOLDS, False)])
def test_a_keeper_of_which_only_its_own_ranks_hear_is_waited_for_if_it_holds_something(
    monkeypatch: pytest.MonkeyPatch, own: Inventory, begins: bool
) -> None:
    """As behind a firewall that drops what it does not pass."""
    monkeypatch.setattr(version_decision, "KEEPER_PATIENCE_S", 0.3)
    silent = Inventory((), (), (), (), (0,), silent=((1, "no answer"),), unheard=(1,))
    with on_waiting(lambda: None) as said:
        told = on_all(2, lambda group: decisions_of(group, Shelf({}), silent, own).choose(None))
    if begins:
        assert [(one.choice, one.exists) for one in told] == [(None, False)] * 2
        assert said == []
    else:
        assert [type(one) for one in told] == [KeeperLost] * 2


def test_the_list_of_versions_is_waited_for_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_for_storage, "FIRST_PAUSE_S", 0.01)
    shelf: Any = Shelf({})
    attempts = [0]

    def named() -> list[Version]:
        attempts[0] += 1
        if attempts[0] < 4:
            raise StorageError("Stale file handle")
        return []

    shelf.named = named
    told = on_all(2, lambda group: decisions_of(group, shelf, NOTHING).choose(None))
    assert [(one.choice, one.exists) for one in told] == [(None, False)] * 2
    attempts[0] = -100
    told = on_all(2, lambda group: decisions_of(group, shelf, NOTHING).choose(None))
    assert [type(one) for one in told] == [StorageError] * 2
