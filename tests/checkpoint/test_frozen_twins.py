"""Ranks that share tensors and do not see alike what is frozen: they agree on a layout, and no version lacks a part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
from holdfast.base.errors import LevelNotReached
from holdfast.base.events import Events
from holdfast.checkpoint.save.storage_saver import _require_alike
from holdfast.checkpoint.state.training_state import State
from holdfast.core.layout import bundles
from holdfast.core.layout.bundles import kind_of
from holdfast.core.model import Bundle, Shard, Topology
from holdfast.tiers.storage.version_store import open_storage
from kit.checkpointers import Make
from sample_kit import sampled

WORKER = str(Path(__file__).with_name("frozen_twins_worker.py"))
TWINS = Topology(("n0", "n1"), (0, 1))


def run(tmp_path: Path, life: str, frozen: str, level: str) -> list[dict]:
    arguments = [str(tmp_path / life), str(tmp_path / "ckpt"), frozen, level]
    ranks = [
        forked.Popen([sys.executable, WORKER, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]


@pytest.mark.parametrize("level", sampled(["memory", "storage"], "storage"))
def test_an_interrupted_rank_that_froze_more_than_a_new_one_saves_and_restores_with_it(
    tmp_path: Path, runtime_dir: Path, level: str
) -> None:
    first = run(tmp_path, "first", "1", level)
    assert [row["came"] for row in first] == ["", ""]
    storage = open_storage(tmp_path / "ckpt", Events())
    stored = storage.manifest(storage.versions()[-1]).bundles
    still = [file.ref for file in stored if kind_of(file.ref.bundle_id)]
    assert len({kind_of(ref.bundle_id) for ref in still}) == 1, (
        "what both see alike, the teacher, lies apart all the same"
    )
    again = run(tmp_path, "second", "", level)
    assert [(row["start"], row["began"]) for row in again] == [(1, row["now"]) for row in first]


def test_storage_refuses_a_version_of_ranks_that_cut_it_in_different_ways(tmp_path: Path, runtime_dir: Path) -> None:
    rows = run(tmp_path, "first", "1", "unlike")
    assert all("ranks 0 and 1 share tensors, and do not hold the same of them" in row["came"] for row in rows)
    assert not open_storage(tmp_path / "ckpt", Events()).versions(), (
        "it would lack a part of a tensor, and verify as good"
    )


def test_the_members_of_a_group_that_do_not_all_hold_it_are_refused() -> None:
    _require_alike([{"g": (2, "a"), "own": (1, "x")}, {"g": (2, "a")}])
    with pytest.raises(LevelNotReached, match="of 2 ranks that share tensors with rank 1 1 hold them"):
        _require_alike([{}, {"g": (2, "a")}])
    with pytest.raises(LevelNotReached, match="ranks 0 and 1"):
        _require_alike([{"g": (2, "a")}, {"g": (2, "b")}])


def test_storage_alone_links_too(make: Make, tmp_path: Path) -> None:
    model = torch.nn.Linear(768, 1024).requires_grad_(False)
    checkpointer = make(None, model=model, memory_budget="100KB", keep_every="1")
    checkpointer.restore()
    for step in range(4):
        checkpointer.save(step, "durable").wait("durable")
    files = list((tmp_path / "job").glob("i*/*-s*-*.safetensors"))
    assert [path.stat().st_nlink for path in files] == [2] * 4
    assert len({path.stat().st_ino for path in files}) == 2


class Twin:
    """What one of two ranks that share a dict of tensors plans."""

    def __init__(self, rank: int, *trained: str) -> None:
        self.tensors = {name: torch.zeros(512, 1024, requires_grad=name in trained) for name in ("a", "b")}
        self.rest = {"c": torch.zeros(512, 1024)}
        self.rank = rank
        self.state = State({"d": self.tensors, "rest": self.rest}, rank=rank, world_size=2, replicated=["d", "rest"])

    def still(self) -> set[str]:
        return {name for name, live in self.state.gather().tensors.items() if live.still}

    def shared_still(self) -> list[Shard]:
        found = [live.shard for live in self.state.gather().tensors.values() if live.still]
        return [shard for shard in found if len(shard.ranks) == 2]

    def plan(self) -> tuple[Bundle, ...]:
        shards = [live.shard for live in self.state.gather().tensors.values() if len(live.shard.ranks) == 2]
        return bundles.plan_bundles(shards, values_of=[], topology=TWINS, still=self.still())


def agree(*twins: Twin) -> None:
    told = [bundles.still_digests(twin.shared_still()) for twin in twins]
    for twin in twins:
        twin.state.agree_on_frozen(lambda own, rank=twin.rank: told if own == told[rank] else [])


def test_twins_plan_the_same_whatever_each_takes_for_frozen() -> None:
    twins = Twin(0), Twin(1, "b")
    assert twins[0].plan() != twins[1].plan()
    agree(*twins)
    assert twins[0].plan() == twins[1].plan()
    assert [twin.still() & {"d.a", "d.b", "rest.c"} for twin in twins] == [{"rest.c"}] * 2, "only the contested object"
    for twin in twins:  # what comes later is not asked for again, so it is none
        twin.rest["late"] = torch.zeros(512, 1024, requires_grad=twin.rank == 0)
    assert twins[0].plan() == twins[1].plan()
    assert "rest.late" not in twins[1].still()


def test_twins_that_see_alike_keep_what_they_see() -> None:
    twins = Twin(0, "a"), Twin(1, "a")
    agree(*twins)
    assert all({"d.b", "rest.c"} <= twin.still() for twin in twins)
