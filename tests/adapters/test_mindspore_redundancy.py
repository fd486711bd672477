"""Redundancy groups, shares, restore lists, and the file that replaces a lost one: MindSpore's own answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.mindspore_kit import SAMPLES, golden, layout, layouts
from holdfast.adapters.mindspore import (
    Layout,
    OperatorStrategy,
    Strategy,
    get_ckpt_path_with_strategy,
    get_parameter_redundancy,
    parameter_holders,
    rank_peers,
    redundancy_of_stages,
    remove_param_redundancy,
    restore_ranks,
    write_strategy,
)
from holdfast.base.errors import UsageError

CASES = ["seed", "seed2", "full", "optfull", "dp4mp2"]


def strategy_file(case: str) -> str:
    return str(SAMPLES / case / "rank_0" / "strategy.ckpt")


def as_lists(redundancy: Any) -> dict[str, list[list[int]]]:
    return {name: [list(group) for group in groups] for name, groups in redundancy.items()}


def as_text(shares: dict[int, set[str]]) -> dict[str, list[str]]:
    return {str(rank): sorted(names) for rank, names in shares.items()}


@pytest.mark.parametrize("case", CASES)
def test_answers_for_the_samples(case: str) -> None:
    expected = golden("golden.json")[case]
    redundancy = get_parameter_redundancy(strategy_file(case))
    assert as_lists(redundancy) == expected["0"]["parameter_redundancy"]
    assert list(redundancy) == sorted(redundancy)
    for kept in (1, 2):
        assert (
            as_text(remove_param_redundancy(redundancy, kept)) == expected["0"][f"remove_param_redundancy_keep{kept}"]
        )
    for rank in range(8):
        assert list(restore_ranks(redundancy, rank)) == expected[str(rank)]["restore_group_info_list"]
        assert list(rank_peers(redundancy, rank)) == expected[str(rank)]["_get_cur_rank_dp"]


@pytest.mark.parametrize("number", range(48))
def test_answers_for_drawn_layouts(number: int) -> None:
    row = golden("redundancy.json")[number]
    redundancy = get_parameter_redundancy(row["layouts"])
    assert as_lists(redundancy) == row["groups"]
    for kept, shares in row["shares"].items():
        assert as_text(remove_param_redundancy(redundancy, int(kept))) == shares
    assert [list(rank_peers(redundancy, rank)) for rank in range(len(row["peers"]))] == row["peers"]


def test_optimizer_sharding_by_two_leaves_two_copies() -> None:
    groups = get_parameter_redundancy({"w": [[4, 2], [-1, 0], 2, 2]})["w"]
    assert groups == ((0, 4), (2, 6), (1, 5), (3, 7))


def test_layouts_come_as_mindspore_keeps_them_in_memory() -> None:
    in_memory = {"w": ([4, 2], [-1, 0], [32, 16], 0, True, "2-5004544844489628105", [32, 32])}
    assert get_parameter_redundancy(in_memory) == get_parameter_redundancy({"w": [[4, 2], [-1, 0], 2, 2]})
    assert get_parameter_redundancy({"w": ([2, 2], [0], [1], 0, True, "", [2])})["w"] == ((0, 2), (1, 3))
    with pytest.raises(UsageError, match="how many ranks"):
        get_parameter_redundancy({"w": ([2, 2], [0], [1], 0, True, "group", [2])})


def test_ranks_of_a_stage_start_where_they_are_told_to() -> None:
    assert get_parameter_redundancy({"w": [[2, 2], [0]]}, initial_rank=4)["w"] == ((4, 6), (5, 7))


@given(layouts(), st.integers(0, 9))
def test_groups_partition_the_ranks(layout: Layout, first: int) -> None:
    groups = parameter_holders({"w": layout}, first)["w"]
    assert get_parameter_redundancy({"w": layout}, first)["w"] in (groups, ())
    assert sorted(rank for group in groups for rank in group) == [first + i for i in range(layout.num_devices)]
    assert len({len(group) for group in groups}) == 1
    copies = layout.num_devices
    for length in layout.num_slices:
        copies //= length
    assert len(groups[0]) == copies // layout.num_shards
    assert all(list(group) == sorted(group) for group in groups)


@given(st.dictionaries(st.sampled_from("abcdefgh"), layouts(8), max_size=8), st.integers(1, 4))
def test_each_parameter_is_saved_by_as_many_of_each_group_as_asked_for(drawn: dict[str, Layout], kept: int) -> None:
    redundancy = get_parameter_redundancy(drawn)
    shares = remove_param_redundancy(redundancy, kept)
    for name, groups in redundancy.items():
        for group in groups:
            savers = [rank for rank in group if name in shares.get(rank, ())]
            assert len(savers) == min(kept, len(group))


def test_shares_differ_by_at_most_one_parameter() -> None:
    shares = remove_param_redundancy(get_parameter_redundancy({f"p{i}": [[8], [-1]] for i in range(29)}))
    assert Counter(map(len, shares.values())) == {4: 5, 3: 3}


def test_groups_that_are_not_nested_leave_a_rank_alone() -> None:
    redundancy = {"a": ((0, 1), (2, 3)), "b": ((0, 2), (1, 3))}
    assert rank_peers(redundancy, 0) == (0,)
    assert restore_ranks(redundancy, 3) == (3,)
    assert restore_ranks({}, 3) == (3,)


def test_a_merged_file_is_read_in_global_ranks() -> None:
    strategy = Strategy(
        1,
        (OperatorStrategy("op", 0, ()), OperatorStrategy("op2", 1, ())),
        {
            "0-a": Layout((2, 2), (0,)),
            "1-b": Layout((4,), (-1,)),
            "0-tied": Layout((4,), (-1,)),
            "1-tied": Layout((4,), (0,)),
        },
    )
    assert redundancy_of_stages(strategy) == {
        "a": ((0, 2), (1, 3)),
        "b": ((4, 5, 6, 7),),
        "tied": ((0, 1, 2, 3), (4,), (5,), (6,), (7,)),
    }
    assert get_parameter_redundancy(strategy)["1-b"] == ((0, 1, 2, 3),)  # as MindSpore: every stage from its own 0


def test_sharding_that_does_not_divide_is_refused_and_full_sharding_leaves_each_rank_alone() -> None:
    with pytest.raises(UsageError, match="not split among 3"):
        get_parameter_redundancy({"w": [[4, 2], [-1, 0], 2, 3]})
    # Here MindSpore's rule (all devices divided by the step) does not divide, and it answers that nobody holds it.
    inner = {"w": [[2, 2], [1], 1, -1]}
    assert get_parameter_redundancy(inner)["w"] == ()
    assert parameter_holders(inner)["w"] == ((0,), (1,), (2,), (3,))


# The twin's file.


def touch(root: Path, *ranks: int) -> None:
    for rank in ranks:
        path = root / f"rank_{rank}" / "checkpoint-2_1875.ckpt"
        path.parent.mkdir(exist_ok=True)
        path.touch()


def own(root: Path, rank: int) -> str:
    return str(root / f"rank_{rank}" / "checkpoint-2_1875.ckpt")


def test_the_own_file_is_taken_while_it_is_there_then_the_twins(tmp_path: Path) -> None:
    touch(tmp_path, 0, 4, 1)
    assert get_ckpt_path_with_strategy(own(tmp_path, 0), strategy_file("seed")) == own(tmp_path, 0)
    Path(own(tmp_path, 0)).unlink()
    assert get_ckpt_path_with_strategy(own(tmp_path, 0), strategy_file("seed")) == own(tmp_path, 4)
    assert get_ckpt_path_with_strategy(own(tmp_path, 0), strategy_file("seed"), rank=0) == own(tmp_path, 4)
    Path(own(tmp_path, 4)).unlink()
    assert get_ckpt_path_with_strategy(own(tmp_path, 0), strategy_file("seed")) is None


def test_rank_1_is_not_found_in_rank_10_nor_in_a_directory_above(tmp_path: Path) -> None:
    root = tmp_path / "rank_1_of_many"
    root.mkdir()
    touch(root, 10, 1)
    alone = {"w": Layout((16,), (0,))}
    assert get_ckpt_path_with_strategy(own(root, 10), alone, rank=1) == own(root, 1)
    assert get_ckpt_path_with_strategy(own(root, 10), alone) == own(root, 10)


def test_more_can_be_asked_of_a_file_than_that_it_is_there(tmp_path: Path) -> None:
    touch(tmp_path, 0, 2, 4, 6)
    sound = {own(tmp_path, 4), own(tmp_path, 6)}
    found = get_ckpt_path_with_strategy(own(tmp_path, 0), strategy_file("dp4mp2"), accept=sound.__contains__)
    assert found == own(tmp_path, 4)


def test_a_path_without_a_rank_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "net.ckpt"
    with pytest.raises(UsageError, match="names no rank"):
        get_ckpt_path_with_strategy(str(path), strategy_file("seed"))
    assert get_ckpt_path_with_strategy(str(path), strategy_file("seed"), 0) is None
    path.touch()
    assert get_ckpt_path_with_strategy(str(path), strategy_file("seed"), 0) == str(path)


def test_twins_of_a_later_stage_are_in_that_stage(tmp_path: Path) -> None:
    touch(tmp_path, 1, 3, 7)
    stage = Strategy(1, (OperatorStrategy("op", 1, ()),), {"w": layout([[2, 2], [0], 0, 0])})
    assert get_ckpt_path_with_strategy(own(tmp_path, 5), stage) == own(tmp_path, 7)
    merged = Strategy(1, stage.operators, {"0-v": Layout((4,), (0,)), "1-w": Layout((2, 2), (0,))})
    write_strategy(tmp_path / "merged.ckpt", merged)
    assert get_ckpt_path_with_strategy(own(tmp_path, 5), str(tmp_path / "merged.ckpt")) == own(tmp_path, 7)
    assert get_ckpt_path_with_strategy(own(tmp_path, 0), str(tmp_path / "merged.ckpt")) is None
