"""k copies of every slice in the ranks' folders: bytes, equal shares, and every choice of lost folders.

Four real ranks run once, in copies_worker.py; the tests look at what they wrote down and left behind.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import gloo_kit
from holdfast.tiers.format import image as image_format

HERE = Path(__file__).resolve().parent
WORLD = 4
COPIES = {"halves": 2, "whole": 3}
CASES = pytest.mark.parametrize("case", COPIES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gloo_kit.run(HERE / "copies_worker.py", tmp_path_factory.mktemp("copies"))


@pytest.fixture
def ranks(results: Path) -> list[dict[str, Any]]:
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(WORLD)]


def slices(ranks: list[dict[str, Any]], case: str) -> dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]]:
    """Name and place of every slice of the job -> its bytes and who holds it."""
    return {
        (name, tuple(offsets)): (num_bytes, tuple(group))
        for found in ranks
        for name, offsets, num_bytes, group in found[case]["shards"]
    }


def saved(results: Path, case: str) -> dict[int, image_format.Image]:
    paths = {rank: results / case / f"rank_{rank}" / "checkpoint-1_1.safetensors" for rank in range(WORLD)}
    return {rank: image_format.read_image(path.read_bytes(), str(path)) for rank, path in paths.items()}


@CASES
def test_every_slice_is_in_k_folders_and_nothing_else_is(results: Path, ranks: list[dict[str, Any]], case: str) -> None:
    unique, images = slices(ranks, case), saved(results, case)
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {key: [] for key in unique}
    for rank, image in images.items():
        for entry in image.entries:
            holders[entry.name, entry.offsets].append(rank)
    for key, (_, group) in unique.items():
        assert len(holders[key]) == COPIES[case], key
        assert set(holders[key]) <= set(group)
    stored = sum(path.stat().st_size for path in (results / case).glob("rank_*/checkpoint-1_1.safetensors"))
    wanted = COPIES[case] * sum(size for size, _ in unique.values())
    assert wanted <= stored <= wanted + WORLD * (2 * image_format.ALIGN + image_format.VALUES_ALIGN)


@CASES
def test_no_share_is_a_tenth_above_the_mean(results: Path, case: str) -> None:
    shares = [sum(entry.end - entry.start for entry in image.entries) for image in saved(results, case).values()]
    assert 0 < max(shares) <= 1.1 * sum(shares) / WORLD


@CASES
def test_any_lost_folders_fewer_than_the_copies_cost_nothing(ranks: list[dict[str, Any]], case: str) -> None:
    choices = [lost for size in (0, COPIES[case] - 1) for lost in combinations(range(WORLD), size)]
    for found in ranks:
        told = {tuple(lost): outcome for lost, outcome in found[case]["lost"]}
        assert found[case]["before"] is None
        for lost in choices:
            assert told[lost] == {"done": [1, 2], "bitwise": True}, lost


@CASES
def test_with_all_copies_of_something_gone_it_is_named_and_nothing_is_loaded(
    results: Path, ranks: list[dict[str, Any]], case: str
) -> None:
    images = saved(results, case)
    refused = 0
    for lost in combinations(range(WORLD), COPIES[case]):
        left = {(e.name, e.offsets) for rank, image in images.items() if rank not in lost for e in image.entries}
        gone = slices(ranks, case).keys() - left
        for found in ranks:
            outcome = {tuple(one): told for one, told in found[case]["lost"]}[lost]
            if gone:
                assert outcome["untouched"]
                assert outcome["refused"].startswith("VersionNotFound: ")
                assert any(f"{name} (saved by ranks {list(lost)})" in outcome["refused"] for name, _ in gone)
            else:
                assert outcome == {"done": [1, 2], "bitwise": True}
        refused += bool(gone)
    assert refused, "no choice lost anything: the case shows nothing"


def test_a_damaged_share_comes_from_another_rank_and_two_of_them_take_the_step_before(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert found["halves"]["damaged 0"] == {"done": [1, 2], "is": [2]}
        assert found["halves"]["damaged 2"] == {"done": [1, 1], "is": [1]}


@CASES
def test_shares_are_not_taken_for_whole_files_and_ranks_want_the_same(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        assert "pass the same copies= to load it" in found[case]["as whole files"]["refused"]
        assert found[case]["as whole files"]["untouched"]
        assert "different numbers of copies: [1, 2, 1, 2]" in found[case]["other numbers"]["refused"]
