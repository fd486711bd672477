"""Four real ranks with every kind of sharding: each tensor is there once per group, twins agree, training goes on.

The ranks run once, in state_worker.py, which also checks on its own that a restore continues bit for bit; the tests
look at what the ranks wrote down.
"""

from __future__ import annotations

import itertools
import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

import gloo_kit

HERE = Path(__file__).resolve().parent
WORLD = 4
SHARDED = (
    "fsdp",
    "fsdp_lookahead",
    "fsdp_columns",
    "fsdp_tp",
    "fsdp_tp_uneven",
    "hsdp",
    "tp",
    "first_fsdp",
    "first_fsdp_hybrid",
)
ALL = (
    "ddp",
    "ddp_lookahead",
    "ddp_pairs",
    "local_sgd",
    "zero1",
    "zero1_lookahead",
    "loose",
    "first_fsdp_whole",
    *SHARDED,
)

Rank = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Rank]]:
    results = gloo_kit.run(HERE / "state_worker.py", tmp_path_factory.mktemp("state"))
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(WORLD)]


def entries(ranks: list[dict[str, Rank]], kind: str) -> dict[str, list[tuple[int, Any]]]:
    """Entry -> (rank, row) of all ranks that hold a part."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for rank, result in enumerate(ranks):
        for name, row in result[kind]["shards"].items():
            found.setdefault(name, []).append((rank, row))
    return found


@pytest.mark.parametrize("kind", ALL)
def test_every_tensor_is_there_exactly_once_per_group(ranks: list[dict[str, Rank]], kind: str) -> None:
    for name, parts in entries(ranks, kind).items():
        shapes = {(dtype, *shape) for _, (dtype, shape, *_) in parts}
        assert len(shapes) == 1, name
        boxes: dict[tuple[Any, ...], set[int]] = {}
        for rank, (_, _, offsets, lengths, group) in parts:
            assert rank in group
            boxes.setdefault((tuple(offsets), tuple(lengths), tuple(group)), set()).add(rank)
        for (_, _, group), holders in boxes.items():
            assert holders == set(group), f"{name}: a group whose members do not all hold the box"
        covered = [(o, n) for o, n, _ in boxes if prod(n)]
        if kind == "ddp_pairs" or (kind == "fsdp_tp" and ".norm." in name) or name.endswith(".step"):
            covered = list(set(covered))  # each pair holds it under one name, as the user gave it
        assert sum(prod(lengths) for _, lengths in covered) == prod(parts[0][1][1]), f"{name}: {covered}"
        for (o1, n1), (o2, n2) in itertools.combinations(covered, 2):
            apart = any(a + la <= b or b + lb <= a for a, la, b, lb in zip(o1, n1, o2, n2, strict=True))
            assert apart, f"{name}: boxes overlap"


@pytest.mark.parametrize("kind", ALL)
def test_twins_hold_the_same_bytes_values_and_bundles(ranks: list[dict[str, Rank]], kind: str) -> None:
    twins = 0
    for name, parts in entries(ranks, kind).items():
        by_group: dict[tuple[int, ...], set[str]] = {}
        for rank, row in parts:
            by_group.setdefault(tuple(row[4]), set()).add(ranks[rank][kind]["digests"][name])
            twins += len(row[4]) > 1
        assert all(len(digests) == 1 for digests in by_group.values()), name
    values: dict[tuple[int, ...], set[str]] = {}
    bundles: dict[str, set[str]] = {}
    for rank, result in enumerate(ranks):
        for group, digest, _ in result[kind]["values"]:
            assert rank in group
            values.setdefault(tuple(group), set()).add(digest)
        for bundle_id, (group, mark) in result[kind]["bundles"].items():
            assert rank in group
            bundles.setdefault(bundle_id, set()).add(mark)
    assert all(len(digests) == 1 for digests in values.values())
    assert all(len(marks) == 1 for marks in bundles.values())
    assert twins or kind in ("fsdp_tp_uneven", "first_fsdp", "fsdp_lookahead", "local_sgd", "loose")


@pytest.mark.parametrize("kind", ALL)
def test_state_is_predicted_and_stays_the_same_structure(ranks: list[dict[str, Rank]], kind: str) -> None:
    known = not kind.endswith("lookahead")  # a step of somebody's own is not tried out
    assert [result[kind]["predicted"] for result in ranks] == [known] * WORLD
    moved = kind == "local_sgd"  # an average moves the parameters into memory of its own
    assert [result[kind]["steady"] for result in ranks] == [not moved] * WORLD


@pytest.mark.parametrize("kind", ALL)
def test_a_look_at_the_state_is_no_collective(ranks: list[dict[str, Rank]], kind: str) -> None:
    assert [result[kind]["collectives"] for result in ranks] == [0] * WORLD


@pytest.mark.parametrize("kind", SHARDED)
def test_boxes_hold_what_they_say(ranks: list[dict[str, Rank]], kind: str) -> None:
    assert all(result[kind]["compared"] > 0 for result in ranks)


def group_of(ranks: list[dict[str, Rank]], kind: str, name: str, rank: int = 0) -> list[int]:
    return list(ranks[rank][kind]["shards"][name][4])


def test_ddp_replicates_parameters_and_keeps_buffers_by_rank(ranks: list[dict[str, Rank]]) -> None:
    everyone = [0, 1, 2, 3]
    assert group_of(ranks, "ddp", "model.net.up.weight") == everyone
    assert group_of(ranks, "ddp", "optimizer.state.net.up.weight.exp_avg", 2) == everyone
    assert group_of(ranks, "ddp", "optimizer.state.net.up.weight.step", 1) == everyone
    assert group_of(ranks, "ddp", "rank3/model.private", 3) == [3]
    assert group_of(ranks, "ddp", "rank3/optimizer.state.private.exp_avg", 3) == [3]
    assert group_of(ranks, "ddp", "model.norm.running_mean") == [0]
    assert group_of(ranks, "ddp", "rank2/model.norm.running_mean", 2) == [2]
    assert "model.net.tied.weight" not in ranks[0]["ddp"]["shards"]
    assert group_of(ranks, "ddp_pairs", "model.up.weight", 3) == [2, 3]


def test_zero_one_keeps_each_state_on_the_rank_that_steps_its_parameter(ranks: list[dict[str, Rank]]) -> None:
    for entry, parts in entries(ranks, "zero1").items():
        if entry.startswith("optimizer.state."):
            (only,) = parts
            assert only[1][4] == [only[0]], entry
    assert group_of(ranks, "zero1", "model.up.weight", 2) == [0, 1, 2, 3]
    held = [sum(name.startswith("optimizer.state.") for name in found["zero1"]["shards"]) for found in ranks]
    assert sum(held) == 3 * 9, "three tensors for each of nine parameters"
    assert min(held) > 0


def test_sharded_groups_follow_the_mesh(ranks: list[dict[str, Rank]]) -> None:
    assert group_of(ranks, "fsdp", "model.odd.weight", 1) == [1]
    assert ranks[3]["fsdp"]["shards"]["model.few.weight"][3] == [0, 7], "the last rank holds none of three rows"
    assert group_of(ranks, "fsdp", "optimizer.state.odd.weight.exp_avg", 1) == [1]
    assert group_of(ranks, "fsdp", "optimizer.state.odd.weight.step", 1) == [0, 1, 2, 3]
    assert group_of(ranks, "hsdp", "model.odd.weight", 1) == [1, 3]
    assert group_of(ranks, "hsdp", "optimizer.state.odd.weight.momentum_buffer", 2) == [0, 2]
    assert group_of(ranks, "tp", "model.up.weight", 2) == [2]
    assert group_of(ranks, "tp", "model.down.bias", 2) == [0, 1, 2, 3]
    assert group_of(ranks, "tp", "rank2/model.norm.weight", 2) == [2], "nothing shows that it is replicated"
    assert group_of(ranks, "fsdp_tp", "model.up.weight", 3) == [3]
    assert group_of(ranks, "fsdp_tp", "model.down.bias", 3) == [2, 3]
    assert group_of(ranks, "loose", "rank1/ema.whole", 1) == [1]


def test_of_flat_parameters_each_rank_keeps_its_part_under_the_name_of_the_parameter(
    ranks: list[dict[str, Rank]],
) -> None:
    """Of the first FSDP: a weight of 56 numbers is one row; the next replica is the twin; buffers and extra state stay."""
    parts = entries(ranks, "first_fsdp")["model.net.odd.weight"]
    assert {tuple(row[1]) for _, row in parts} == {(56,)}
    assert sum(row[3][0] for _, row in parts) == 56
    assert len({row[3][0] for _, row in parts}) > 1, "cut in the middle of a row of the weight"
    assert all(row[4] == [rank] for rank, row in parts)
    assert {rank for rank, _ in entries(ranks, "first_fsdp")["optimizer.state.net.odd.weight.exp_avg"]} == {
        rank for rank, _ in parts
    }
    assert "rank2/model.seen" in ranks[2]["first_fsdp"]["shards"]
    assert not [name for name in ranks[2]["first_fsdp"]["shards"] if "scratch" in name]
    assert '"rank2/model._extra_state"' in "".join(text for _, _, text in ranks[2]["first_fsdp"]["values"])
    assert group_of(ranks, "first_fsdp_hybrid", "model.norm.bias", 1) == [1, 3]
    assert group_of(ranks, "first_fsdp_whole", "model.up.weight", 1) == [0, 1, 2, 3]
    assert ranks[1]["first_fsdp_whole"]["shards"]["model.up.weight"][1] == [8, 6]


def test_values_belong_to_the_ranks_that_share_the_parameters(ranks: list[dict[str, Rank]]) -> None:
    for kind, group in (("ddp_pairs", [0, 1]), ("fsdp", [0, 1, 2, 3]), ("hsdp", [0, 1, 2, 3])):
        found = {tuple(g): text for g, _, text in ranks[0][kind]["values"]}
        assert "optimizer.param_groups" in found[tuple(group)]
        assert "rank0/scheduler" in found[0,]
        assert "rank0/rng" in found[0,]
    mixed = {tuple(g): text for g, _, text in ranks[1]["ddp"]["values"]}
    assert "rank1/optimizer.param_groups" in mixed[1,], "one parameter is this rank's own"


def test_only_the_optimizer_makes_tensors_late(ranks: list[dict[str, Rank]]) -> None:
    late = ranks[0]["fsdp"]["late"]
    assert {"model.odd.weight", "optimizer.state.odd.weight.exp_avg", "optimizer.state.odd.weight.step"} <= set(late)
    assert not [name for name in late if "rng" in name]


def test_what_no_box_describes_is_refused(ranks: list[dict[str, Rank]]) -> None:
    refusals = ranks[0]["refusals"]
    assert refusals["partial"].startswith("UsageError: a DTensor placed as Partial")
    assert "thing.partial" in refusals["partial"]
    assert "are not neighbours" in refusals["gaps"]


def test_parameters_that_fsdp_hides_or_has_gathered_are_refused_with_what_to_do(ranks: list[dict[str, Rank]]) -> None:
    for refusals in (result["refusals"] for result in ranks):
        assert refusals["hidden"].startswith("UsageError: FullyShardedDataParallel hides the parameters")
        assert "use_orig_params=True" in refusals["hidden"]
        assert refusals["gathered"].startswith("UsageError: the parameter has shape")
        assert "save between two steps" in refusals["gathered"]


def test_what_an_optimizer_hands_out_is_cut_as_its_tensors_are_or_each_ranks_own(ranks: list[dict[str, Rank]]) -> None:
    assert group_of(ranks, "ddp_lookahead", "rank2/optimizer.state_dict.more.slow.0", 2) == [2]
    assert group_of(ranks, "ddp_lookahead", "optimizer.state.up.weight.momentum_buffer", 2) == [0, 1, 2, 3]
    assert group_of(ranks, "fsdp_lookahead", "optimizer.state_dict.more.slow.0", 3) == [3]
    assert all(
        '"rank1/optimizer.state_dict"' in text for g, _, text in ranks[1]["fsdp_lookahead"]["values"] if g == [1]
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("local", "hook post_localSGD_hook lets the parameters of the ranks differ, so one rank cannot .* [model.0]"),
        ("without", "hook noop_hook lets the parameters of the ranks differ, so one rank cannot .* [model]"),
        ("averaged", "PostLocalSGDOptimizer.averager averages parameters that differ from rank to rank .* [optimizer]"),
    ],
)
def test_ddp_whose_ranks_differ_on_purpose_is_refused_on_every_rank(
    ranks: list[dict[str, Rank]], case: str, words: str
) -> None:
    for result in ranks:
        assert re.search(words.replace("[", "\\["), result["refusals"][case])
        assert "give the module inside (ddp.module)" in result["refusals"][case]


def test_hooks_that_would_see_one_share_are_refused(ranks: list[dict[str, Rank]]) -> None:
    assert all("would see one share of them [optimizer]" in result["refusals"]["dealt"] for result in ranks)


def test_with_local_sgd_each_rank_keeps_the_parameters_that_it_has(ranks: list[dict[str, Rank]]) -> None:
    names = [f"rank{rank}/model.up.weight" for rank in range(WORLD)]
    digests = {ranks[rank]["local_sgd"]["digests"][name] for rank, name in enumerate(names)}
    assert len(digests) == WORLD


def test_state_of_a_communication_hook_is_told_where_it_changes(ranks: list[dict[str, Rank]]) -> None:
    for result in ranks:
        assert "is in no version" in result["refusals"]["compressed"]
        assert "model (powerSGD_hook)" in result["refusals"]["compressed"]
        assert result["refusals"]["reduced"] == ""
