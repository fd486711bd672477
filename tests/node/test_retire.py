"""What goes from storage after a commit, and what must not: versions that somebody still writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.base.errors import CorruptError
from holdfast.base.events import Events
from holdfast.core.model import Topology, Version
from holdfast.node.messages import Assembly
from holdfast.node.retire import Retirement
from tiers.samples import new_store, save, tree


def test_halves_of_dead_incarnations_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = new_store(root)
    save(store, Version(1, 1))
    assert store.register_incarnation() == 2
    save(store, Version(2, 3))
    for version in (Version(1, 2), Version(2, 4)):  # everything but the commit
        shutil.copytree(root / str(Version(2, 3)), root / str(version))
        (root / str(version) / "manifest.json").unlink()
    being_written = tree(root / str(Version(2, 4)))

    assembly = Assembly(2, str(root), store.job_id(), Topology(("n",), (0,)), ())
    Retirement(Events()).after(store, Version(2, 3), assembly, Version(1, 1))

    assert store.unfinished() == [Version(2, 4)]
    assert tree(root / str(Version(2, 4))) == being_written
    assert store.versions() == [Version(1, 1), Version(2, 3)]


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
        Retirement(Events()).after(store, Version(1, 5), assembly, None)

    assert store.versions() == [Version(1, 1), Version(1, 4), Version(1, 5)]
    assert tree(root / str(Version(1, 1))) == damaged


def test_what_is_pinned_is_not_even_tried(tmp_path: Path) -> None:
    """Storage would refuse to remove it, and every commit from then on would be told as a fault of retention."""
    store = new_store(tmp_path / "root")
    for step in range(1, 5):
        save(store, Version(1, step))
    store.pin(Version(1, 1))

    assembly = Assembly(1, str(tmp_path / "root"), store.job_id(), Topology(("n",), (0,)), ())
    Retirement(Events()).after(store, Version(1, 4), assembly, None)

    assert store.versions() == [Version(1, 1), Version(1, 3), Version(1, 4)]
