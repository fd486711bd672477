"""Which source ranks a target rank needs: MindSpore's own answers, for single stages and pipelines."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from adapters.mindspore_kit import SAMPLES, golden, layout, layouts, strategy
from holdfast.adapters.mindspore import Layout, Strategy, rank_list_for_transform, write_strategy

SEED = str(SAMPLES / "seed" / "rank_0" / "strategy.ckpt")
SEED2 = str(SAMPLES / "seed2" / "rank_0" / "strategy.ckpt")
ROWS = golden("rank_lists.json")


def spelt(layouts: dict[str, list[Any]] | None) -> Strategy | None:
    return layouts and strategy({name: layout(row) for name, row in layouts.items()})


def test_answers_for_the_samples() -> None:
    expected = golden("rank_list_for_transform_golden.json")
    assert rank_list_for_transform(0, SEED, None) == set(expected["to_single"]["0"])
    for rank, ranks in expected["to_seed2"].items():
        assert rank_list_for_transform(int(rank), SEED, SEED2) == set(ranks)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_answers_for_drawn_layouts(number: int) -> None:
    row = ROWS[number]
    source, target = spelt(row["source"]), spelt(row["target"])
    if row["ranks"] is None:
        with pytest.raises(ValueError):
            rank_list_for_transform(row["rank"], source, target)
    else:
        assert rank_list_for_transform(row["rank"], source, target) == set(row["ranks"])


def test_files_of_both_spellings_do(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s.json", strategy({"w": Layout((2, 4), (0, -1))}))
    assert rank_list_for_transform(5, str(tmp_path / "s.json"), SEED2) == set()  # no parameter is in both
    assert rank_list_for_transform(0, str(tmp_path / "s.json")) == {0, 1, 2, 3}


def test_a_single_device_is_rank_0() -> None:
    assert rank_list_for_transform(3, None, SEED) == {0}


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    for rank in ("0", True, 1.0):
        with pytest.raises(TypeError):
            rank_list_for_transform(rank, SEED, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        rank_list_for_transform(0, str(tmp_path / "missing.ckpt"))
    with pytest.raises(ValueError, match="cannot become"):
        rank_list_for_transform(0, strategy({"w": Layout((4,), (0,))}), strategy({"w": Layout((6,), (0,))}))
    with pytest.raises(ValueError, match="no rank 9"):
        rank_list_for_transform(9, strategy({"w": Layout((4,), (0,))}), None)
    with pytest.raises(ValueError, match="numbers of dimensions"):
        rank_list_for_transform(0, strategy({"w": Layout((4,), (0,))}), strategy({"w": Layout((4,), (0, -1))}))
    with pytest.raises(ValueError, match="no parameter"):
        rank_list_for_transform(4, strategy({"w": Layout((4,), (0,))}), strategy({"w": Layout((4,), (0,))}))


# With other lengths MindSpore refuses optimizer shards that are no whole axes or part of one.
@given(layouts(16, powers_of_two=True))
def test_a_layout_needs_only_the_rank_itself_to_stay_as_it_is(drawn: Layout) -> None:
    same = strategy({"w": drawn})
    for rank in range(drawn.num_devices):
        assert rank_list_for_transform(rank, same, same) == {rank}


@given(layouts(16, powers_of_two=True))
def test_a_single_device_needs_every_slice_once_at_least(drawn: Layout) -> None:
    needed = rank_list_for_transform(0, strategy({"w": drawn}), None)
    groups = drawn.groups()
    assert all(needed & set(group) for group in groups)
    assert len(groups) == prod(drawn.num_slices) * drawn.num_shards
