"""Plain trees, and a framework's own files in the background: the tracker comes last, or not at all."""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from holdfast.adapters import native_tree
from holdfast.adapters.native_tree import Native, NativeWriter, copied, live, plain
from holdfast.base.errors import LevelNotReached


class Stage(enum.IntEnum):
    weights = 3


@dataclass
class Address:
    start: int
    size: torch.Size


CLASSES = {"Address": Address}


def test_listed_objects_come_back_and_others_stay_what_they_are() -> None:
    tree = {
        "at": [Address(3, torch.Size([2, 4]))],
        "dtype": torch.bfloat16,
        "stage": Stage.weights,
        "names": OrderedDict(a=(1, 2)),
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    spelt = plain(tree, CLASSES)
    assert type(spelt["stage"]) is int
    assert not spelt["weight"].requires_grad
    back = live(spelt, CLASSES)
    assert back["at"] == tree["at"]
    assert type(back["at"][0]) is Address
    assert type(back["at"][0].size) is torch.Size
    assert back["dtype"] is torch.bfloat16
    assert type(back["names"]) is OrderedDict
    assert back["names"] == tree["names"]
    # A name from a file that nobody listed imports nothing.
    assert live({"holdfast.kind": "os.system", "holdfast.facts": {}}, CLASSES) == {
        "holdfast.kind": "os.system",
        "holdfast.facts": {},
    }


def test_a_copy_does_not_change_with_training() -> None:
    tensor = torch.zeros(3)
    kept = copied({"a": [tensor]})
    tensor += 1
    assert torch.equal(kept["a"][0], torch.zeros(3))


def test_the_tracker_waits_for_the_files_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others, tracker = tmp_path / "t" / "mine.pt", tmp_path / "t" / "others.pt", tmp_path / "latest"
    seen: list[tuple[bool, bool]] = []

    def waits(path: Path, since_s: float) -> bool:
        """Looked at once, the file of the other rank is not there yet; then it comes."""
        if path == others and not others.exists():
            seen.append((mine.exists(), tracker.exists()))
            others.write_bytes(b"x")
            return False
        return path.exists() and path.stat().st_mtime >= since_s

    monkeypatch.setattr(native_tree, "_stands", waits)
    writer = NativeWriter(timeout_s=20)
    writer.put(Native({mine: {"a": torch.ones(2)}}, [mine, others], (tracker, "t"), time.time() - 5))
    writer.flush()
    assert seen == [(True, False)]
    assert torch.load(mine, weights_only=True)["a"].tolist() == [1, 1]
    assert tracker.read_text() == "t"
    assert [path.name for path in (tmp_path / "t").iterdir() if path.name.startswith(".")] == []


def test_what_is_missing_is_said_and_the_tracker_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = tmp_path / "latest"
    tracker.write_text("before")
    writer = NativeWriter(timeout_s=0.2)
    writer.put(Native({}, [tmp_path / "t" / "others.pt"], (tracker, "t")))
    with pytest.raises(LevelNotReached, match=r"1 files of other ranks are missing.*others\.pt"):
        writer.flush()
    assert tracker.read_text() == "before"
    assert "were not written" in caplog.text


def test_a_disk_that_does_not_keep_up_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save that finds no room is left out; one behind it that finds some counts."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(path: Path, write: object) -> None:
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(native_tree, "durably", slow)
    writer = NativeWriter(timeout_s=0.1)
    try:
        writer.put(Native({tmp_path / "a.pt": 1}))
        assert begun.wait(20)
        writer.put(Native({tmp_path / "b.pt": 1}))
        writer.put(Native({tmp_path / "c.pt": 1}))
        assert "are left out" in caplog.text
    finally:
        goes_on.set()
    writer.timeout_s = 20
    with pytest.raises(LevelNotReached, match=r"not written within 0\.1 s"):
        writer.flush()
    writer.put(Native({tmp_path / "d.pt": 1}))
    writer.flush()


def test_a_file_of_an_earlier_save_is_not_taken_for_this_one(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    old.write_bytes(b"x")
    writer = NativeWriter(timeout_s=0.2)
    writer.put(Native({}, [old], (tmp_path / "latest", "t"), time.time() + 60))
    with pytest.raises(LevelNotReached):
        writer.flush()
