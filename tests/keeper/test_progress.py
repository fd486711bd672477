"""How far long work is: counted where the bytes move, told to the trainers, shown in the status."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.base import progress_report
from holdfast.base.config import Config
from holdfast.base.progress_report import Meter, progress_text
from holdfast.cli import status as status_tool
from holdfast.core.model import Version
from holdfast.keeper.rpc.announcements import Announced
from holdfast.keeper.rpc.messages import Message, Working
from holdfast.keeper.rpc.paths import place_of
from holdfast.keeper.slots.keeper_state import NodeState, StateCallbacks
from holdfast.keeper.slots.progress import RESTORING, WRITING, Activities
from holdfast.keeper.slots.slot_pool import SlotPool
from holdfast.tiers.memory.memory_budget import Budget
from tiers.samples import STAMP, local_backend, new_store, save

V = Version(1, 3)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(progress_report.time, "monotonic", lambda: self.now)


def test_a_meter_is_silent_for_two_seconds_and_then_speaks_every_two(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(monkeypatch), []
    meter = Meter(100, lambda done, seconds: said.append((done, seconds)))
    for _ in range(5):
        clock.now += 1
        meter.add(10)
    meter.add(1000)
    clock.now += 3
    meter.add(0)
    assert said == [(20, 2.0), (40, 4.0), (100, 8.0)], "never more than all of it"


def test_words() -> None:
    assert progress_text(2 << 20, 8 << 20, 4) == "2.0 MiB of 8.0 MiB, 512.0 KiB/s, 12 s left"
    assert progress_text(0, 8 << 20, 4) == "0 B of 8.0 MiB, 0 B/s, not moving yet"


def test_trainers_hear_of_long_work_and_the_status_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pushed = Clock(monkeypatch), dict[str, Message]()
    place = place_of(str(tmp_path / "ck"), Config(runtime_dir=str(tmp_path / "rt"), node_label="n"))
    (tmp_path / "rt").mkdir(mode=0o700)
    state = NodeState(place, SlotPool(Budget(place.budget, "1MiB")))
    ignore = lambda *_: None  # noqa: E731 - the other callbacks
    state.callbacks = StateCallbacks(**{**dict.fromkeys(StateCallbacks.__slots__, ignore), "push": pushed.__setitem__})
    activities = Activities(state)
    with activities.start(WRITING, V, 1 << 20), activities.start(RESTORING, V, 4 << 20, rank=2) as add:
        add(1 << 20)
        assert pushed == {}
        clock.now += 4
        add(1 << 20)
        shown = activities.report()
    assert activities.report() == []
    assert pushed == {
        "working restoring 2": Working(
            what=RESTORING, version=V, rank=2, done_bytes=2 << 20, total_bytes=4 << 20, seconds=4.0
        )
    }
    assert [(a["what"], a["rank"], a["done_bytes"]) for a in shown] == [(WRITING, -1, 0), (RESTORING, 2, 2 << 20)]
    facts = {"pid": 1, "uptime_s": 1.0, "resident_bytes": 1, "memory": {"used_bytes": 0, "allowed_bytes": 1}}
    facts |= {"root": "/ck", "incarnation": 1, "nodes": ["n"], "resumed_from": None, "newest": {}, "ranks": {}}
    facts |= {
        "replicas": [],
        "suspects": {},
        "alarms": [],
        "activities": shown,
        "preloaded": {"version": ""},
        "run": None,
        "replication": {"behind_versions": 0},
        "counters": {},
    }
    lines = list(status_tool._lines(facts))
    assert lines[-1] == f"restoring {V} for rank 2: 2.0 MiB of 4.0 MiB, 512.0 KiB/s, 4 s left"
    state.slot_pool.close()


def test_a_rank_logs_the_work_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announced = Announced(2, lambda: True)
    for rank, done in ((2, 1 << 20), (3, 3 << 20), (-1, 2 << 20)):
        what = WRITING if rank < 0 else RESTORING
        announced.take(Working(what=what, version=V, rank=rank, done_bytes=done, total_bytes=4 << 20, seconds=2.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"restoring {V}: 1.0 MiB of 4.0 MiB, 512.0 KiB/s, 6 s left"
    ]
    assert announced.working(WRITING, V) == "2.0 MiB of 4.0 MiB, 1.0 MiB/s, 2 s left"
    assert announced.working(WRITING, Version(1, 4)) == ""


def test_every_byte_is_counted_once_as_it_is_written_and_read(tmp_path: Path) -> None:
    store, counted = new_store(tmp_path / "root"), list[int]()
    (file, *_) = save(store, V).bundles
    view = memoryview(bytearray(file.length))
    store.bundles.read_into(V, file, view, counted.append)
    assert sum(counted) == file.length
    counted.clear()
    store.bundles.write(Version(1, 4), file.ref, file.seal, view, stamp=STAMP, progress=counted.append)
    assert sum(counted) == file.length
    counted.clear()
    backend = local_backend(tmp_path / "other")
    backend.put("v/large", [memoryview(bytes(20 << 20))], stamp=STAMP, progress=counted.append)
    assert sum(counted) == 20 << 20
    assert len(counted) > 1
