"""Versions that somebody copies stay meanwhile, and no longer: who holds them, who breaks that, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.errors import InUse
from holdfast.core.model import Version
from holdfast.tiers.storage.incarnations import make_stamp
from tiers.samples import new_store, save

V1, V2 = Version(1, 10), Version(1, 20)


def ended_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    return ended.pid


def test_a_held_version_is_not_retired_until_its_last_holder_lets_go(tmp_path: Path) -> None:
    store = new_store(tmp_path / "root")
    save(store, V1)
    mine, other = make_stamp(1), "i000001-t000000-h000000000000-p1"
    for stamp in (mine, other, mine):
        store.marks.hold(V1, stamp)
    for stamp in (mine, other):
        assert set(store.marks.held()) == {V1}
        with pytest.raises(InUse, match="is held by a process"):
            store.retire(V1)
        store.marks.release(V1, stamp)
    assert store.marks.held() == {}
    store.retire(V1)
    assert store.versions() == []


def test_only_holds_of_the_dead_are_broken(tmp_path: Path) -> None:
    """By the rule of temporary files: a lower incarnation, or a process of this machine that has ended."""
    store, mine = new_store(tmp_path / "root"), make_stamp(3)
    dead = [mine.replace("i000003", "i000002"), mine.replace(f"-p{os.getpid()}", f"-p{ended_process()}")]
    living = [mine, "i000003-t000000-h000000000000-p1", make_stamp(4)]
    for stamp in (*dead, *living):
        store.marks.hold(V1, stamp)
    (tmp_path / "root" / "held" / "thesis.tex").write_bytes(b"x")
    assert sorted(store.marks.break_holds(3)) == sorted(f"held/{V1}.{stamp}" for stamp in dead)
    left = {path.name for path in (tmp_path / "root" / "held").iterdir()}
    assert left == {"thesis.tex", *(f"{V1}.{stamp}" for stamp in living)}
    assert store.marks.break_holds(3) == []
