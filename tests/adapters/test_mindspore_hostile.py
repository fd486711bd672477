"""Bytes that nobody vouches for: refused by name, within a second, with bounded memory; never another error."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.mindspore_kit import SAMPLES
from holdfast.adapters.mindspore import get_parameter_redundancy, read_group_info
from holdfast.adapters.mindspore.formats import ckpt
from holdfast.adapters.mindspore.formats.protobuf import prefix, varint
from holdfast.adapters.mindspore.formats.safetensors import decode_safetensors
from holdfast.adapters.mindspore.groups import MAX_BYTES, decode_group_info
from holdfast.adapters.mindspore.strategy import decode_json_strategy, decode_strategy
from holdfast.base.errors import CorruptError, UsageError
from sample_kit import MORE, sampled

Reader = Callable[[bytes], object]
READERS: dict[str, Reader] = {
    "group_info": lambda data: decode_group_info(data, "here"),
    "strategy": lambda data: decode_strategy(data, "here"),
    "json": lambda data: decode_json_strategy(data, "here"),
    "ckpt": lambda data: ckpt.decode_ckpt(data, "here", crc_check=True),
    "safetensors": lambda data: decode_safetensors(data, "here", crc_check=True),
}
REAL = {
    "group_info": SAMPLES / "optfull" / "rank_0" / "group_info.pb",
    "strategy": SAMPLES / "optfull" / "rank_0" / "strategy.ckpt",
    "json": SAMPLES / "seed_json" / "rank_0" / "strategy.json",
    "ckpt": SAMPLES / "ckpt" / "every_type.ckpt",
    "safetensors": SAMPLES / "ckpt" / "every_type.safetensors",
}
HUGE = b"\xff" * 9 + b"\x01"  # 2**64 - 1 as a varint


def safetensors(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + payload


def item(dtype: str, shape: str, start: int, stop: int) -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{stop}]}}'


CORPUS: list[tuple[str, bytes]] = [
    ("group_info", b"\x12"),
    ("group_info", b"\x12" + HUGE),
    ("group_info", b"\x12\x05\x08"),
    ("group_info", b"\x12\x02\x08\x80"),
    ("group_info", b"\x12\x0b\x08" + b"\x80" * 9 + b"\x02"),
    ("group_info", b"\x12\x0c\x08" + b"\x80" * 11),
    ("group_info", b"\x12\x06\x08\xff\xff\xff\xff\x1f"),  # a rank of 33 bits
    ("group_info", b"\x12\x03\x0a\x05\x01"),  # packed, longer than its message
    ("group_info", b"\x12\x00\x12\x00"),
    ("group_info", b"\x12\x00\x1a\x00"),
    ("group_info", b"\x10\x00"),
    ("group_info", b"\x15\x00\x00\x00\x00"),
    ("group_info", b"\x0a\x06\x0a\x02\xff\xfe\x12\x00\x12\x00"),
    ("group_info", b"\x00" * 100),
    ("strategy", b"\x08\x01\x1a\x02\x0a\x00"),
    ("strategy", b"\x08\x01\x1a\x0b\x0a\x01w\x12\x06\x28\x00\x30\x00\x38\x00"),
    ("json", b"[" * 100_000),
    ("json", b'{"a":' * 100_000),
    ("json", b'{"parallel_layout_item":[]}'),
    ("json", b'{"parallel_layout_item":{"w":{"dev_matrix":[1e400],"field":0}}}'),
    ("json", b'{"parallel_layout_item":{"w":{"dev_matrix":[99999999999999999999],"field":0}}}'),
    ("json", b'{"parallel_layout_item":{"w":{"dev_matrix":[4294967295,4294967295],"field":0}}}'),
    ("json", b'{"current_stage":-1}'),
    ("json", b"\xff\xfe{}"),
    ("json", b"null"),
    ("ckpt", b"\x0a\x03\x0a\x01w"),
    ("ckpt", b"crc_num" + b"\x00" * 9 + b"\x01"),
    ("ckpt", b"\x0a\x11\x0a\x01w\x12\x0c" + b"\x08\x08\x12\x04Int8\x1a\x02ab"),  # eight elements, two bytes
    ("ckpt", prefix(1, 25) + b"\x0a\x01w\x12\x14\x08" + b"\xff" * 9 + b"\x01" + b"\x12\x04Int8\x1a\x01a"),  # dim -1
    ("ckpt", b"\x0a\x11\x0a\x01w\x12\x0c\x08\x00\x12\x03str\x1a\x03abc"),
    ("ckpt", b"\x0a\x12\x0a\x01w\x12\x0d\x08\x00\x12\x03str\x1a\x04\xff\xff\xff\xff"),
    ("safetensors", b"\x00" * 7),
    ("safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
    ("safetensors", safetensors(b"{")),
    ("safetensors", safetensors(b"[]")),
    ("safetensors", safetensors(b'{"a":1}')),
    ("safetensors", safetensors(b"{}", b"stray")),
    ("safetensors", safetensors(f'{{"a":{item("F32", "[2]", 0, 4)}}}'.encode(), b"0123")),
    ("safetensors", safetensors(f'{{"a":{item("F99", "[1]", 0, 4)}}}'.encode(), b"0123")),
    ("safetensors", safetensors(f'{{"a":{item("U8", "[4]", 0, 4)},"b":{item("U8", "[4]", 0, 4)}}}'.encode(), b"0123")),
    ("safetensors", safetensors(f'{{"a":{item("U8", "[4]", 4, 0)}}}'.encode(), b"0123")),
    ("safetensors", safetensors(f'{{"a":{item("U8", "[" + "1," * 99 + "1]", 0, 1)}}}'.encode(), b"0")),
    ("safetensors", safetensors(f'{{"a":{item("U8", "[4611686018427387904,4]", 0, 4)}}}'.encode(), b"0123")),
    ("safetensors", safetensors(b'{"__metadata__":{"crc_num":7}}')),
]


@pytest.mark.parametrize(("kind", "data"), CORPUS, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(CORPUS)])
def test_the_corpus_is_refused_with_the_place(kind: str, data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(CorruptError) as caught:
        READERS[kind](data)
    assert "here" in caught.value.where
    assert time.process_time() - started < 5.0  # half a second on a quiet machine


def test_the_place_is_the_byte() -> None:
    with pytest.raises(CorruptError) as caught:
        decode_group_info(b"\x12\x02\x08\x01\x7a\x00", "file.pb")
    assert caught.value.where == "file.pb, byte 4"


@pytest.mark.parametrize("kind", ["group_info", "json", "safetensors"])
def test_every_truncation_is_refused(kind: str) -> None:
    data = REAL[kind].read_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            READERS[kind](data[:length])


def test_a_row_of_records_may_end_after_any_of_them_and_nowhere_else() -> None:
    data = REAL["ckpt"].read_bytes()
    names = list(ckpt.decode_ckpt(data, "here", crc_check=True))
    seen = []
    for length in range(len(data)):
        try:
            seen.append(list(ckpt.decode_ckpt(data[:length], "here", crc_check=True)))
        except CorruptError:
            pass
    assert seen == [names[:count] for count in range(len(names) + 1)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.data())
def test_damaged_bytes_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(REAL[kind].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from([HUGE, b"\x80", b"\xff", b"[", b"-1"])))
        damaged[at : at + data.draw(st.integers(0, 3))] = piece
    started = time.process_time()
    try:
        READERS[kind](bytes(damaged))
    except (CorruptError, UsageError):
        pass
    assert time.process_time() - started < 5.0  # half a second on a quiet machine


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.binary(max_size=200))
def test_noise_raises_nothing_else(kind: str, noise: bytes) -> None:
    try:
        READERS[kind](noise)
    except (CorruptError, UsageError):
        pass


def many_groups(count: int) -> bytes:
    names = (b"%7d" % number for number in range(count))
    return b"".join(prefix(1, 11) + prefix(1, 7) + name + prefix(2, 0) for name in names) + prefix(2, 0)


BOMBS: dict[str, tuple[str, bytes]] = {
    "ranks": ("group_info", prefix(2, 8 << 20) + b"\x08\x00" * (4 << 20)),
    "long ranks": ("group_info", prefix(2, 12 << 20) + b"\x08\x81\x01" * (4 << 20)),
    "packed ranks": ("group_info", prefix(2, (8 << 20) + 5) + prefix(1, 8 << 20) + b"\x00" * (8 << 20)),
    "groups": ("group_info", many_groups(300_000)),
    "operators": ("strategy", (prefix(2, 6) + prefix(1, 0) + prefix(2, 2) + b"\x08\x00") * (1 << 20)),
    "empty lists": ("strategy", b"\x08\x01" + prefix(3, (4 << 20) + 7) + prefix(1, 0) + prefix(2, 4 << 20) + b"\x12\x00" * (2 << 20)),
    "json lists": ("json", b'{"parallel_layout_item":{"w":{"dev_matrix":[' + b"1," * (4 << 20) + b'1],"field":0}}}'),
    "records": ("ckpt", (prefix(1, 3) + prefix(1, 1) + b"w") * (1 << 20)),
    "dims": ("ckpt", prefix(1, (8 << 20) + 9) + prefix(1, 1) + b"w" + prefix(2, 8 << 20) + b"\x08\x01" * (4 << 20)),
    "zeros": (
        "safetensors",
        safetensors(
            ('{"__metadata__":{"crc_num":"1"},' + ",".join(f'"{i}":{item("I64", "[]", 8 * i, 8 * i + 8)}' for i in range(99)) + "}").encode(),
            struct.pack("<q", 1 << 60) * 99,
        ),
    ),
    "header": ("safetensors", safetensors(b'{"a":' + b"[" * (15 << 20))),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(sorted(BOMBS), *(BOMBS.keys() - {"empty lists", "groups"})))
def test_a_bomb_is_defused_in_a_second(name: str) -> None:
    kind, data = BOMBS[name]
    started = time.process_time()
    try:
        READERS[kind](data)
    except CorruptError:
        pass
    else:
        assert name == "zeros", "only a CRC that nobody can check is passed over"
    assert time.process_time() - started < 5.0  # half a second on a quiet machine


MEASURE = """
import resource
from adapters.test_mindspore_hostile import BOMBS, READERS, CorruptError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind, data in BOMBS.values():
    try:
        READERS[kind](data)
    except CorruptError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@MORE
def test_bombs_take_little_memory() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=SAMPLES.parents[1], capture_output=True, text=True, timeout=100, check=True
    )
    assert int(answer.stdout) < 256 << 10, "KiB above what the bombs themselves take"


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "group_info.pb"
    with open(path, "wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse: it would be zeros
    with pytest.raises(CorruptError, match="too many"):
        read_group_info(path)


def test_a_layout_of_impossible_size_is_refused_before_it_is_counted() -> None:
    layout = (
        prefix(1, 12) + (b"\x08" + varint(2**32 - 1)) * 2 + prefix(2, 2) + b"\x08\x00" + b"\x28\x00\x30\x00\x38\x00"
    )
    data = b"\x08\x01" + prefix(3, len(layout) + 5) + prefix(1, 1) + b"w" + prefix(2, len(layout)) + layout
    with pytest.raises(CorruptError, match="devices"):
        decode_strategy(data, "here")
    with pytest.raises(UsageError, match="devices"):
        get_parameter_redundancy({"w": ([1 << 40], [-1])})
