"""Ranks of one node that hold the same state come back from storage: it is read once, and every tensor is bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from holdfast.testing.contracts.adapter_processes import keepers_under
from kit import layout_jobs
from kit.layout_jobs import Facts, Jobs, hop, stored_bytes, whole
from sample_kit import MORE

HERE = Path(__file__).parent

BIG = 300_000  # columns of 8 elements: three tensors of 9.6 MB, so that there are several checksum chunks


def read_bytes(facts: Facts, source: str) -> list[int]:
    return [row["bytes"].get(source, 0) for row in facts]


@pytest.mark.timeout(240)
def test_two_ranks_read_storage_once_and_past_their_keeper(jobs: Jobs) -> None:
    first = jobs.run("ddp", 2, big=BIG)
    second = hop(jobs, first, "ddp", 2, big=BIG)
    size = stored_bytes(jobs, first[0]["version"])
    assert sum(read_bytes(second, "storage")) == size
    assert sum(read_bytes(second, "cache")) > size // 2, "what the other rank had read"
    assert {name for row in second for name in row["bytes"]} == {"storage", "cache"}, "nothing came from the keeper"
    assert all(row["counters"].get("storage_read_bytes", 0) == 0 for row in second), "the keeper read nothing of it"
    assert not list(jobs.home.rglob("reading-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_ranks_comes_back_and_then_goes_on_with_two(jobs: Jobs, world: int) -> None:
    first = jobs.run("ddp", 2, big=BIG)
    layout = "ddp" if world > 1 else "one"
    second = hop(jobs, first, layout, world, big=BIG)
    third = hop(jobs, second, layout, world, big=BIG)
    size = stored_bytes(jobs, second[0]["version"])
    assert sum(read_bytes(third, "storage")) == size
    assert sum(read_bytes(third, "cache")) >= (world - 1) * size // 2
    assert all(set(row["bytes"]) <= {"storage", "cache"} for row in third)
    hop(jobs, third, "ddp", 2, big=BIG)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_version_by_name_and_a_fresh_start(jobs: Jobs) -> None:
    first = jobs.run("ddp", 2, big=BIG)
    hop(jobs, first, "ddp", 2, big=BIG)
    older = jobs.run("ddp", 2, big=BIG, restore={"version": first[0]["version"]})
    assert whole(older, "restored") == whole(first)
    assert sum(read_bytes(older, "storage")) == stored_bytes(jobs, first[0]["version"])
    fresh = jobs.run("ddp", 2, big=BIG, steps=0, restore={"fresh": True})
    assert [(row["start"], row["bytes"]) for row in fresh] == [(0, {}), (0, {})]


def held(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Starts two ranks that restore; returns their job's name, and one that is in the middle of a read from storage."""
    with monkeypatch.context() as patched:
        patched.setattr(layout_jobs, "WORKER", HERE / "held_worker.py")
        name = jobs.start("ddp", 2, big=BIG)
    deadline = time.monotonic() + layout_jobs.TIMEOUT_S
    while not (found := [rank for rank in range(2) if (jobs.home / f"held-{rank}").exists()]):
        assert time.monotonic() < deadline, jobs.logs(name)
        assert all(rank.poll() is None for rank in jobs.ranks), jobs.logs(name)
        time.sleep(0.01)
    return name, found[0]


@MORE
@pytest.mark.timeout(240)
def test_a_rank_that_is_killed_while_it_reads_ends_the_restore_and_spoils_nothing(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jobs.run("ddp", 2, big=BIG)
    name, reader = held(jobs, monkeypatch)
    jobs.ranks[reader].kill()
    (jobs.home / "go").touch()
    assert jobs.ranks[1 - reader].wait(layout_jobs.TIMEOUT_S) != 0, "the other one does not wait for it"
    assert not (jobs.root / "incarnations" / "000002.resumed.json").exists(), jobs.logs(name)
    jobs.ranks[reader].wait(30)
    jobs.ranks.clear()
    hop(jobs, first, "ddp", 2, big=BIG)


@MORE
@pytest.mark.timeout(240)
def test_where_a_keeper_is_killed_while_ranks_read_all_begin_anew(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jobs.run("ddp", 2, big=BIG)
    name, _ = held(jobs, monkeypatch)
    keepers = keepers_under(jobs.runtime)
    assert len(keepers) == 1
    keepers[0].kill()
    (jobs.home / "go").touch()
    codes = [rank.wait(layout_jobs.TIMEOUT_S) for rank in jobs.ranks]
    assert codes == [0, 0], jobs.logs(name)
    jobs.ranks.clear()
    rows = [json.loads((jobs.home / f"{name}-{rank}.json").read_text()) for rank in range(2)]
    assert whole(rows, "restored") == whole(first), "with the next keeper, and past what was half read"
    hop(jobs, rows, "ddp", 2, big=BIG)
