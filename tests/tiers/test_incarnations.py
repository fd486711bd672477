"""Whose root it is, which incarnations it has seen, and whose temporary files are dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    Fenced,
    ForeignDirectory,
    StorageError,
    VersionNotFound,
)
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.samples import new_store, save, tree, verify

V1, V2 = Version(1, 10), Version(1, 20)


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return new_store(tmp_path / "root")


# The root, the job, the incarnations.


def test_a_root_belongs_to_one_job_for_ever(tmp_path: Path) -> None:
    first = open_storage(tmp_path / "root", Events()).claim()
    assert open_storage(f"file://{tmp_path}/root", Events()).claim() == first
    assert open_storage(tmp_path / "other", Events()).claim() != first


def test_of_many_claimers_all_get_one_job(tmp_path: Path) -> None:
    code = f"""
from holdfast.base.events import Events
from holdfast.tiers.storage.version_store import open_storage
store = open_storage({str(tmp_path / "a" / "root")!r}, Events())
print(store.claim(), store.incarnations.register())
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert len({job for job, _ in answers}) == 1
    assert sorted(int(number) for _, number in answers) == [1, 2, 3, 4, 5, 6]


def test_someone_elses_directory_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    store = open_storage(tmp_path, Events())
    with pytest.raises(ForeignDirectory, match=r"thesis.tex.*empty"):
        store.claim()
    with pytest.raises(ForeignDirectory):
        store.job_id()
    assert tree(tmp_path) == {"thesis.tex": b"text"}
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_fresh_file_system_and_a_start_that_was_interrupted_are_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".tmp").mkdir()
    assert open_storage(tmp_path, Events()).claim()


def test_a_path_with_nothing_is_not_found_and_not_made(tmp_path: Path) -> None:
    store = open_storage(tmp_path / "nowhere", Events())
    with pytest.raises(VersionNotFound, match="mounted"):
        store.job_id()
    assert store.versions() == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("url", ["ftp://bucket/x", "hdfs://b", ""])
def test_places_that_are_not_known_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="directory"):
        open_storage(url, Events())


def test_incarnations_and_what_they_resumed_from(store: Storage) -> None:
    assert store.incarnations.register() == 2
    assert store.incarnations.register() == 3
    store.incarnations.record_resumed(1, None)
    store.incarnations.record_resumed(3, V1)
    store.incarnations.record_resumed(3, V1)
    with pytest.raises(Fenced):
        store.incarnations.record_resumed(3, V2)
    assert store.incarnations.lineage() == {1: None, 3: V1}
    assert store.incarnations.highest() == 3


def test_a_new_incarnation_is_above_all_versions_that_are_there(store: Storage, tmp_path: Path) -> None:
    """Somebody copied versions and left the records behind: below them every restart would go back to them."""
    (tmp_path / "root" / str(Version(7, 120))).mkdir()
    assert store.incarnations.highest() == 7
    assert store.incarnations.register() == 8


def test_no_incarnation_is_taken_that_would_fence_nobody(store: Storage, tmp_path: Path) -> None:
    records = tmp_path / "root" / "incarnations"
    records.mkdir(exist_ok=True)
    (records / "9999999999.json").touch()
    with pytest.raises(StorageError, match="no higher one"):
        store.incarnations.register()
    assert not list(records.glob("1" + "?" * 10 + ".json"))


def test_a_damaged_registration_still_counts(store: Storage, tmp_path: Path) -> None:
    (tmp_path / "root" / "incarnations" / "000002.json").write_bytes(b"?")
    assert store.incarnations.register() == 3


def test_a_damaged_lineage_is_an_error_and_not_an_empty_one(store: Storage, tmp_path: Path) -> None:
    store.incarnations.record_resumed(1, None)
    (tmp_path / "root" / "incarnations" / "000001.resumed.json").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"000001.resumed.json"):
        store.incarnations.lineage()


def test_only_temporary_files_of_the_dead_are_swept(store: Storage, tmp_path: Path) -> None:
    mine = make_stamp(3)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    names = {
        f"{mine}.aa": False,  # this very process
        f"{mine.replace('i000003', 'i000002')}.aa": True,  # a lower incarnation
        f"{mine.replace(f'-p{os.getpid()}', f'-p{ended.pid}')}.aa": True,  # an ended process of this machine
        "i000003-t000000-h000000000000-p1.aa": False,  # another machine
        f"{make_stamp(0)}.aa": False,  # a living process that has no incarnation yet
        "i000000-t000000-h000000000000-p1.aa": False,
        "thesis.tex": False,  # unknown
    }
    for name in names:
        (tmp_path / "root" / ".tmp" / name).write_bytes(b"x")
    swept = store.incarnations.sweep(3)
    assert sorted(swept) == sorted(name for name, dead in names.items() if dead)
    left = {path.name for path in (tmp_path / "root" / ".tmp").iterdir()}
    assert left == {name for name, dead in names.items() if not dead}


def test_a_killed_writer_leaves_only_what_a_sweep_removes(store: Storage, tmp_path: Path) -> None:
    save(store, V1)
    code = f"""
import os, signal
from holdfast.base.events import Events
from tiers.samples import *
from holdfast.tiers.backends import posix_io as files
real = os.fsync
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
save(new_store(Path({str(tmp_path / "root")!r})), Version(1, 20))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, capture_output=True)
    assert result.returncode == -9, result.stderr
    assert len(os.listdir(tmp_path / "root" / ".tmp")) == 1
    assert len(store.incarnations.sweep(1)) == 1
    assert os.listdir(tmp_path / "root" / ".tmp") == []
    assert store.versions() == [V1]
    assert verify(store, V1)
