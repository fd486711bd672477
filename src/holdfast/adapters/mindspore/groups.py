"""`group_info.pb`: the communication groups that a rank made, and the ranks whose files can restore it.

MindSpore writes it while it compiles, if the environment names a path in GROUP_INFO_FILE; the guide for disaster
recovery reads the second part back with `restore_group_info_list`. Message `mindspore.straspb.ParallelGroupMap` of
https://gitee.com/mindspore/mindspore, node_strategy.proto. Read and written byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.adapters.mindspore.formats.files import PathLike, read_file, replace_file
from holdfast.adapters.mindspore.formats.protobuf import Field, Message, Source, decode, encode, numbers
from holdfast.base.errors import UsageError

# A file of 16,384 ranks that are in a hundred groups of all ranks is 5 MB.
MAX_BYTES = 16 << 20

_RANKS = Message("ParallelGroupRanks", Field(1, "dim", "uint32", "repeated"))
_ITEM = Message("ParallelGroupItem", Field(1, "group_name", "text"), Field(2, "parallel_group_ranks", _RANKS))
_MAP = Message(
    "ParallelGroupMap",
    Field(1, "parallel_group_item", _ITEM, "repeated"),
    Field(2, "ckpt_restore_rank_list", _RANKS),
)
_WHAT = "group information file"
_WORD = (1 << 64) - 1
# https://github.com/gcc-mirror/gcc/blob/master/libstdc%2B%2B-v3/libsupc%2B%2B/hash_bytes.cc (murmur, 64 bits)
_MULTIPLIER = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Holds what a rank's group information file says.

    Attributes:
        groups: communication groups by name, in file order: the ranks of each. The group of all ranks is not listed.
        restore_ranks: the ranks that hold the same slices of every parameter, this rank included.
    """

    groups: Mapping[str, Sequence[int]]
    restore_ranks: Sequence[int]


def restore_group_info_list(group_info_file_name: str) -> list[int]:
    """The ranks whose checkpoints can restore this rank, as MindSpore's function of this name.

    Raises:
        TypeError: the name is no string.
        ValueError: no such file, or an empty one.
        CorruptError: not a group information file.
    """
    if not isinstance(group_info_file_name, str):
        kind = type(group_info_file_name).__name__  # type: ignore[unreachable]  # callers without a type checker
        raise TypeError(f"restore_group_info_list takes the file's name as a string, got {kind}")
    return list(read_group_info(group_info_file_name).restore_ranks)


def read_group_info(path: PathLike) -> GroupInfo:
    """Reads a group information file.

    Raises:
        ValueError: no such file, or an empty one.
        CorruptError: not a group information file.
    """
    return decode_group_info(read_file(path, what=_WHAT, limit=MAX_BYTES), os.fspath(path))


def decode_group_info(data: bytes, where: str) -> GroupInfo:
    """Return what these bytes of a group information file say. Raises CorruptError."""
    source = Source(data, where)
    values = decode(_MAP, source)
    groups: dict[str, list[int]] = {}
    for item in values["parallel_group_item"]:
        if item["group_name"] in groups:
            raise source.damage(f"group {item['group_name']!r} is there twice", 0)
        groups[item["group_name"]] = item["parallel_group_ranks"]["dim"]
    return GroupInfo(groups, values["ckpt_restore_rank_list"]["dim"])


def write_group_info(path: PathLike, info: GroupInfo) -> None:
    """Writes the file as MindSpore does (mode 0600), whole or not at all; makes its directory if there is none."""
    replace_file(path, [encode_group_info(info)])


def encode_group_info(info: GroupInfo) -> bytes:
    """The bytes of the file. Raises UsageError for a rank that is no uint32."""
    items = [{"group_name": n, "parallel_group_ranks": numbers(ranks)} for n, ranks in info.groups.items()]
    return encode(_MAP, {"parallel_group_item": items, "ckpt_restore_rank_list": numbers(info.restore_ranks)})


def group_name(ranks: Sequence[int]) -> str:
    """MindSpore's name of a communication group: how many ranks, and a hash of the ranks in their order."""
    if not ranks:
        raise UsageError("a communication group has at least one rank")
    return f"{len(ranks)}-{_hash_of_text('-'.join(map(str, ranks)).encode())}"


def named_groups(groups: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """The groups by MindSpore's names, each once, in this order."""
    return {group_name(ranks): list(ranks) for ranks in groups}


def _hash_of_text(text: bytes) -> int:
    """`std::hash<std::string>` of libstdc++ on a 64-bit little-endian machine."""
    whole = len(text) & ~7
    value = _SEED ^ (len(text) * _MULTIPLIER & _WORD)
    for at in range(0, whole, 8):
        word = int.from_bytes(text[at : at + 8], "little") * _MULTIPLIER & _WORD
        value = (value ^ (word ^ word >> 47) * _MULTIPLIER & _WORD) * _MULTIPLIER & _WORD
    if whole < len(text):
        value = (value ^ int.from_bytes(text[whole:], "little")) * _MULTIPLIER & _WORD
    value = (value ^ value >> 47) * _MULTIPLIER & _WORD
    return value ^ value >> 47
