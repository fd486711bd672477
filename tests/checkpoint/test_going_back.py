"""`--from-version` in a job that its scheduler starts again: it holds for the first start, and then the newest counts."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from torch.distributed import HashStore

import holdfast
from holdfast.base.errors import CorruptError
from holdfast.base.events import Events
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.core.model import Version
from holdfast.elastic.launch.rendezvous.incarnation_rounds import Round
from holdfast.tiers.storage.incarnations import Incarnations
from holdfast.tiers.storage.version_store import open_storage
from kit.checkpointers import Make, Trainee, kill_keeper, leave
from sample_kit import MORE
from tiers.samples import new_store

OLD = Version(1, 1)


@pytest.fixture(autouse=True)
def _wish_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_checkpointers.wish, "version", NO_WISH)


def start(make: Make, wish: str, *, steps: int = 0, version: Version | None = None, fresh: bool = False) -> int:
    """One start of the job, as a launcher makes it; returns the step that it went on with."""
    open_checkpointers.wish.version = wish
    trainee = Trainee()
    checkpointer = make(trainee)
    first = checkpointer.restore(version, fresh=fresh)
    for step in range(first, first + steps):
        trainee.train()
        checkpointer.save(step, "durable").wait()
        if first == 0:
            checkpointer.pin(Version(1, step))
    leave(checkpointer)
    return first


def test_a_wish_holds_for_the_first_start_and_newer_versions_are_not_passed_over(
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert start(make, NO_WISH, steps=4) == 0
    assert start(make, str(OLD), steps=4) == OLD.step + 1
    with caplog.at_level(logging.WARNING):
        assert start(make, str(OLD)) == OLD.step + 5, "the scheduler started the same command again"
    assert f"--from-version {OLD} was fulfilled by incarnation 2" in caplog.text
    assert "start the job once without --from-version" in caplog.text
    assert start(make, str(OLD)) == OLD.step + 5, "nor at the next start"


@MORE
def test_the_same_wish_counts_again_after_another_or_a_start_without(make: Make) -> None:
    other = Version(1, 0)
    assert start(make, NO_WISH, steps=3) == 0
    assert start(make, str(OLD), steps=1) == OLD.step + 1
    assert start(make, NO_WISH) == OLD.step + 2
    assert start(make, str(OLD), steps=1) == OLD.step + 1, "a start without the wish lies between"
    assert start(make, str(other), steps=1) == other.step + 1
    assert start(make, str(other), steps=1) == other.step + 2


@MORE
def test_a_start_that_did_not_come_so_far_fulfils_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(make, NO_WISH, steps=3) == 0
    record = Incarnations.record_resumed

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Incarnations, "record_resumed", dies)
    with pytest.raises(KeyboardInterrupt):
        start(make, str(OLD))
    monkeypatch.setattr(Incarnations, "record_resumed", record)
    assert start(make, str(OLD)) == OLD.step + 1


@MORE
def test_what_the_script_names_itself_goes_before_and_the_wish_is_named(
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert start(make, NO_WISH, steps=3) == 0
    assert start(make, str(OLD), version=Version(1, 0)) == 1
    assert f"--from-version {OLD} is not obeyed: the script names what it restores itself" in caplog.text
    assert start(make, str(OLD)) == OLD.step + 1, "so it was not fulfilled"


def test_a_damaged_record_of_a_wish_is_an_error_only_for_whoever_wishes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = new_store(root)
    store.incarnations.record_wished(1, OLD)
    assert store.incarnations.fulfilled() is None, "nothing was resumed from"
    store.incarnations.record_resumed(1, OLD)
    assert store.incarnations.fulfilled() == (1, OLD)
    (root / "incarnations" / "000001.wished.json").write_bytes(b"{}")
    with pytest.raises(CorruptError, match="wished"):
        store.incarnations.fulfilled()
    assert open_storage(root, Events()).incarnations.lineage() == {1: OLD}, "to others it says nothing"


@pytest.mark.parametrize(
    ("wishes", "comes"),
    [(("none", "none"), "none"), (("none", str(OLD)), str(OLD)), ((str(OLD), ""), ""), (("none", ""), "")],
)
def test_the_launchers_of_a_job_have_one_wish(wishes: tuple[str, str], comes: str) -> None:
    """One that came back already overrules those that have just begun."""
    store = HashStore()
    rounds = [Round(store, rank=rank, size=2, address="localhost") for rank in range(2)]
    for one, wish in zip(rounds, wishes, strict=True):
        one.version = wish
    rounds[1]._store.set("version/1", wishes[1])
    rounds[1]._store.set("recoveries/1", "0")
    assert rounds[0].open(0, str).version == comes
    rounds[0].close()


def test_a_directory_that_was_put_back_is_named_with_the_way_to_it(
    make: Make, tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A keeper holds what is newer, and nothing tells the copy from a path that was full; so memory counts, aloud."""
    root, copy = tmp_path / "job", tmp_path / "copy"

    def begin(version: Version | None = None) -> tuple[holdfast.Checkpointer, int]:
        checkpointer = make(Trainee(), linger_s=300.0)
        return checkpointer, checkpointer.restore(version)

    checkpointer, _ = begin()
    checkpointer.save(1, "durable").wait()
    leave(checkpointer)
    shutil.copytree(root, copy)
    checkpointer, _ = begin()
    checkpointer.save(2).wait()
    leave(checkpointer)
    assert "does not know" not in caplog.text
    shutil.rmtree(root)
    copy.rename(root)

    checkpointer, first = begin()
    assert first == 3
    assert f"keepers hold incarnation 2, which {root} does not know" in caplog.text
    assert f"--from-version {OLD}, or restore(version='{OLD}')" in caplog.text
    leave(checkpointer)
    caplog.clear()
    checkpointer, first = begin(OLD)
    assert first == 2, "what the warning names works"
    assert "does not know" not in caplog.text
    kill_keeper(checkpointer)
    shutil.rmtree(runtime_dir)  # of the keeper that was killed and has no successor
