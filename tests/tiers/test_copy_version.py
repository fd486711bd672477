"""A version at a second place: what another job has there, or what is the job's own, is left as it is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from holdfast.base.errors import HoldfastError, InUse, UsageError
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.copy_version import duplicate
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.samples import new_store, save, tree, verify

FIRST, NEXT, LATER = Version(1, 4), Version(1, 9), Version(2, 9)


def copy(source: Storage, place: Path, version: Version) -> None:
    stamp = make_stamp(version.incarnation)
    source.marks.hold(version, stamp)
    try:
        duplicate(source, open_storage(place, Events()), version, lambda *_: None)
    finally:
        source.marks.release(version, stamp)


def refused(source: Storage, place: Path, version: Version, error: type[HoldfastError], what: str) -> None:
    """The copy is refused by name, and nothing at the place is another one than before."""
    before = tree(place)
    with pytest.raises(error, match=re.escape(what)):
        copy(source, place, version)
    after = tree(place)
    assert {name: after.get(name) for name in before} == before
    assert not {name for name in after if str(version) in name} - before.keys()


@pytest.mark.parametrize("name", ["job", "link"])
def test_the_jobs_own_place_is_no_further_one(name: str, tmp_path: Path) -> None:
    """A copy has one part: in the place of one of several it would damage the version that it was made of."""
    job = new_store(tmp_path / "job")
    save(job, FIRST)
    (tmp_path / "link").symlink_to("job")
    refused(job, tmp_path / name, FIRST, UsageError, "it is the job's own place")
    assert verify(job, FIRST)


def test_of_two_jobs_that_copy_to_one_place_the_second_is_refused(tmp_path: Path) -> None:
    mine, theirs, place = new_store(tmp_path / "mine"), new_store(tmp_path / "theirs"), tmp_path / "place"
    save(mine, FIRST)
    save(theirs, FIRST, seed=7)
    save(theirs, NEXT, seed=8)
    copy(mine, place, FIRST)
    for version in (FIRST, NEXT):
        refused(theirs, place, version, InUse, "another job works there, or copies its versions there")
    assert open_storage(place, Events()).versions() == [FIRST]
    assert verify(open_storage(place, Events()), FIRST)


def test_the_root_of_another_job_gets_no_copies(tmp_path: Path) -> None:
    """That job would go on from them."""
    mine, theirs = new_store(tmp_path / "mine"), new_store(tmp_path / "theirs")
    theirs.run_lock.take("theirs")
    theirs.run_lock.release()
    save(mine, NEXT)
    save(theirs, FIRST, seed=7)
    refused(mine, tmp_path / "theirs", NEXT, InUse, "another job works there, or copies its versions there")


def test_a_place_of_an_older_holdfast_is_copied_to_but_replaces_nothing(tmp_path: Path) -> None:
    """Its id does not tell whose it is."""
    mine, theirs = new_store(tmp_path / "mine"), new_store(tmp_path / "theirs")
    save(mine, FIRST)
    save(theirs, FIRST, seed=7)
    refused(mine, tmp_path / "theirs", FIRST, InUse, f"another {FIRST} stands there")
    assert mine.incarnations.register() == 2
    save(mine, LATER)
    copy(mine, tmp_path / "theirs", LATER)
    for version in (FIRST, LATER):
        assert verify(open_storage(tmp_path / "theirs", Events()), version)


def test_who_went_on_at_a_copy_copies_to_the_other_places_and_back(tmp_path: Path) -> None:
    job, near, far = new_store(tmp_path / "job"), tmp_path / "near", tmp_path / "far"
    job.run_lock.take("job")
    job.run_lock.release()
    save(job, FIRST)
    for place in (near, far, near):
        copy(job, place, FIRST)
    there = open_storage(near, Events())
    assert there.incarnations.register() == 2
    save(there, LATER)
    for place in (far, tmp_path / "job"):
        copy(there, place, LATER)
        assert verify(open_storage(place, Events()), LATER)
    assert job.incarnations.register() == 3
    save(job, Version(3, 20))
    for place in (near, far):
        copy(job, place, Version(3, 20))
    assert len({open_storage(place, Events()).job_id() for place in (tmp_path / "job", near, far)}) == 3


def test_two_jobs_that_go_on_from_one_version_get_no_versions_of_each_other(tmp_path: Path) -> None:
    """One at the job's own place, one at a copy: a restart of either would go on from what the other one did."""
    job, near, far = new_store(tmp_path / "job"), tmp_path / "near", tmp_path / "far"
    save(job, FIRST)
    for place in (near, far):
        copy(job, place, FIRST)
    there, what = open_storage(near, Events()), "another job went on there from a copy, apart from this one"

    def go_on(store: Storage, number: int, before: Version, step: int) -> Version:
        assert store.incarnations.register() == number
        store.incarnations.record_resumed(number, before)
        save(store, Version(number, step), seed=step)
        return Version(number, step)

    second, other = go_on(job, 2, FIRST, 10), go_on(there, 2, FIRST, 9)
    copy(there, far, other)
    refused(there, tmp_path / "job", other, InUse, what)
    for place in (near, far):
        refused(job, place, second, InUse, what)
    third = go_on(job, 3, second, 20)
    go_on(there, 3, other, 19)
    fourth = go_on(job, 4, third, 30)
    refused(job, near, fourth, InUse, what)


def test_a_copy_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    job, place = new_store(tmp_path / "job"), tmp_path / "place"
    save(job, FIRST)
    copy(job, place, FIRST)
    good = tree(place)
    for damaged in (*place.glob("i*/*.safetensors"), place / str(FIRST) / "manifest-0.json"):
        damaged.write_bytes(b"damaged")
        copy(job, place, FIRST)
        assert tree(place) == good
    shutil.rmtree(place / str(FIRST))
    copy(job, place, FIRST)
    assert tree(place) == good
