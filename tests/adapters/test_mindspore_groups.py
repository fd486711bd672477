"""Group information files: byte for byte, MindSpore's errors, and the names of groups."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.mindspore_kit import GROUP_FILES, golden, ids
from holdfast.adapters.mindspore import (
    GroupInfo,
    get_parameter_redundancy,
    group_name,
    read_group_info,
    restore_group_info_list,
    write_group_info,
    write_group_info_of_rank,
)
from holdfast.adapters.mindspore.groups import decode_group_info, encode_group_info
from holdfast.base.errors import CorruptError, UsageError


def case_of(path: Path) -> dict[str, object]:
    case: dict[str, object] = golden("golden.json")[path.parent.parent.name][path.parent.name.removeprefix("rank_")]
    return case


@pytest.mark.parametrize("path", GROUP_FILES, ids=ids(GROUP_FILES))
def test_a_real_file_is_read_as_mindspore_reads_it_and_written_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    info, expected = read_group_info(path), case_of(path)
    assert info.groups == expected["groups"]
    assert restore_group_info_list(str(path)) == info.restore_ranks == expected["restore_group_info_list"]
    copy = tmp_path / "rank" / "0" / "group_info.pb"
    write_group_info(copy, info)
    assert copy.read_bytes() == path.read_bytes()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert os.listdir(copy.parent) == ["group_info.pb"]


def test_there_are_samples() -> None:
    assert len(GROUP_FILES) == 56


def test_groups_come_in_file_order() -> None:
    path = next(path for path in GROUP_FILES if "optfull/rank_0" in str(path))
    ranks = [list(ranks) for ranks in read_group_info(path).groups.values()]
    assert ranks == [[0, 1, 2, 3], [0, 4], [0, 1]]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "group_info.pb"
    path.write_bytes(b"old" * 1000)
    path.chmod(0o644)
    write_group_info(path, GroupInfo({}, [3]))
    assert path.read_bytes() == bytes.fromhex("12020803")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("path", GROUP_FILES, ids=ids(GROUP_FILES))
def test_names_of_groups_are_reproduced(path: Path) -> None:
    groups = read_group_info(path).groups
    assert {group_name(ranks): ranks for ranks in groups.values()} == groups


def test_names_are_hashes_of_the_ranks_in_their_order() -> None:
    assert group_name([0, 1, 2, 3]) == "4-6301172352641561019"
    assert group_name([0, 2, 4, 6]) == "4-5226697808808137312"
    assert group_name([3, 2, 1, 0]) != group_name([0, 1, 2, 3])
    with pytest.raises(UsageError):
        group_name([])


def test_errors_are_those_of_mindspore(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pb"
    empty.touch()
    with pytest.raises(TypeError):
        restore_group_info_list(tmp_path / "group_info.pb")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        restore_group_info_list(7)  # type: ignore[arg-type]
    for name in ("missing.pb", "empty.pb", "."):
        with pytest.raises(ValueError):
            restore_group_info_list(str(tmp_path / name))


def test_packed_lists_are_read_too() -> None:
    packed = b"\x0a\x09\x0a\x01g\x12\x04\x0a\x02\x00\x07\x12\x04\x0a\x02\x05\x06"
    info = decode_group_info(packed, "here")
    assert info == GroupInfo({"g": [0, 7]}, [5, 6])


RANKS = st.lists(st.integers(0, 2**32 - 1), max_size=6)


@given(st.dictionaries(st.text("aZ.-_0é漢😀", max_size=9), RANKS, max_size=5), RANKS)
def test_what_is_written_is_read(groups: dict[str, list[int]], ranks: list[int]) -> None:
    info = GroupInfo(groups, ranks)
    read = decode_group_info(encode_group_info(info), "here")
    assert read == info
    assert list(read.groups) == list(groups)


def test_a_rank_that_is_none_is_refused_when_writing(tmp_path: Path) -> None:
    for rank in (-1, 2**32):
        with pytest.raises(UsageError):
            write_group_info(tmp_path / "g.pb", GroupInfo({}, [rank]))
    assert not os.listdir(tmp_path)


def test_a_required_list_is_missed_and_a_double_name_found() -> None:
    group = b"\x0a\x05\x0a\x01g\x12\x00"
    with pytest.raises(CorruptError, match="lacks ckpt_restore_rank_list"):
        decode_group_info(group, "here")
    with pytest.raises(CorruptError, match="twice"):
        decode_group_info(group + group + b"\x12\x00", "here")


@pytest.mark.parametrize("case", ["seed", "seed2", "full", "optfull", "dp4mp2"])
def test_the_file_of_a_rank_follows_from_its_redundancy(case: str, tmp_path: Path) -> None:
    redundancy = get_parameter_redundancy(GROUP_FILES[0].parents[2] / case / "rank_0" / "strategy.ckpt")
    for rank in range(8):
        path = str(tmp_path / "deep" / "rank_{rank}.pb")
        info = write_group_info_of_rank(path, redundancy, rank)
        assert info is not None
        assert read_group_info(tmp_path / "deep" / f"rank_{rank}.pb") == info
        real = read_group_info(GROUP_FILES[0].parents[2] / case / f"rank_{rank}" / "group_info.pb")
        assert info.restore_ranks == real.restore_ranks
        # Which model-parallel groups were made is not in a layout; those of replicas are, and are named alike.
        assert set(info.groups) <= set(real.groups)


def test_without_a_path_nothing_is_written() -> None:
    assert write_group_info_of_rank(None, {"w": ((0, 1),)}, 0) is None
    assert write_group_info_of_rank("", {"w": ((0, 1),)}, 0) is None


def test_groups_that_a_rank_made_come_first_and_that_of_all_ranks_does_not_come(tmp_path: Path) -> None:
    path = str(tmp_path / "g.pb")
    redundancy = {"w": ((0, 2), (1, 3)), "b": ((0, 1, 2, 3),), "accu_grads.w": ((0,), (1,), (2,), (3,))}
    info = write_group_info_of_rank(path, redundancy, 2, groups=[(2, 3)])
    assert info is not None
    assert list(info.groups.values()) == [[2, 3], [0, 2]]
    assert info.restore_ranks == [0, 2]
