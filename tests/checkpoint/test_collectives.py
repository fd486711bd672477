"""Agreement: a fault on one rank is the same class of error on all, and nobody is left waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from holdfast.base.errors import CorruptError, HoldfastError, StorageFull, UsageError
from holdfast.checkpoint.job import collectives
from ranks_kit import on_all


def test_all_ranks_raise_what_one_met_and_the_message_says_where() -> None:
    def work(group: collectives.Ranks) -> None:
        def local() -> None:
            if group.rank == 2:
                raise StorageFull("no space left", where="/ckpt", remedy="free space")

        collectives.together(group, local)

    raised = on_all(4, work)
    assert [type(error) for error in raised] == [StorageFull] * 4
    assert [error.where for error in raised] == ["/ckpt"] * 4
    assert "rank 2" in raised[0].what
    assert raised[2].what == "no space left", "the rank itself raises its own error, with its own traceback"


def test_the_lowest_failing_rank_decides_the_class_and_foreign_errors_become_usage_errors() -> None:
    def work(group: collectives.Ranks) -> None:
        def local() -> None:
            if group.rank == 1:
                raise KeyError("weight")
            if group.rank == 2:
                raise CorruptError("bad")

        collectives.together(group, local)

    raised = on_all(3, work)
    assert [type(error) for error in raised] == [UsageError] * 3
    assert all("KeyError: 'weight'" in str(error) for error in raised)
    assert isinstance(raised[1].__cause__, KeyError)


def test_results_votes_and_shared_bytes() -> None:
    def work(group: collectives.Ranks) -> tuple[Any, ...]:
        return (
            collectives.together(group, lambda: group.rank * 10),
            collectives.share(group, lambda: b"from 0" if group.rank == 0 else b"wrong"),
            collectives.gather_json(group, {"rank": group.rank}),
            collectives.unanimous(group, True),
            collectives.unanimous(group, group.rank != 1),
        )

    rows = on_all(3, work)
    assert [row[0] for row in rows] == [0, 10, 20]
    assert {row[1] for row in rows} == {b"from 0"}
    assert all(row[2] == [{"rank": 0}, {"rank": 1}, {"rank": 2}] for row in rows)
    assert {row[3:] for row in rows} == {(True, False)}


def test_what_rank_0_shares_is_not_gathered_from_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of rank 0 would lie in the memory of each rank as often as there are ranks."""
    gathered: list[int] = []
    gather = dist.all_gather

    def counted(rows: list[torch.Tensor], mine: torch.Tensor, **how: Any) -> Any:
        gathered.append(mine.nbytes)
        return gather(rows, mine, **how)

    monkeypatch.setattr(dist, "all_gather", counted)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        group = collectives.Group()
        for message in (b"", b"1", bytes(range(256)) * 4096):
            assert collectives.share(group, lambda made=message: made) == message
    finally:
        dist.destroy_process_group()
    assert gathered, "a fault of rank 0 is told to all"
    assert max(gathered) <= 8, "no more than a length, and whether there was a fault"


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="init_process_group"):
        collectives.ranks()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert collectives.ranks().gather(b"x") == [b"x"]
    assert issubclass(UsageError, HoldfastError)
