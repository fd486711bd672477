"""Ranks of one node that hold the same state come back from storage: it is read once, and every tensor is bit for bit."""

from __future__ import annotations

import pytest

from kit.layout_jobs import Facts, Jobs, hop, stored_bytes

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
    second = hop(jobs, first, "ddp", world, big=BIG)
    third = hop(jobs, second, "ddp", world, big=BIG)
    size = stored_bytes(jobs, second[0]["version"])
    assert sum(read_bytes(third, "storage")) == size
    assert sum(read_bytes(third, "cache")) >= (world - 1) * size // 2
    assert all(set(row["bytes"]) <= {"storage", "cache"} for row in third)
    hop(jobs, third, "ddp", 2, big=BIG)
