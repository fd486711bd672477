"""Checkpoints in both formats: real files byte for byte, every type, slices, CRC, and what MindSpore's CRC gets wrong."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.mindspore_kit import SAMPLES
from holdfast.adapters.mindspore import (
    HostTensor,
    convert_checkpoint,
    from_numpy,
    load_checkpoint,
    save_checkpoint,
    to_numpy,
)
from holdfast.adapters.mindspore.formats import ckpt
from holdfast.adapters.mindspore.formats.safetensors import decode_safetensors, encode_safetensors
from holdfast.adapters.mindspore.formats.tensors import MINDSPORE_NAMES
from holdfast.base.errors import CorruptError, UsageError
from holdfast.core.model import DTYPE_BYTES

FILES = SAMPLES / "ckpt"
CKPTS = sorted(FILES.rglob("*.ckpt"))


@pytest.mark.parametrize("path", CKPTS, ids=[str(path.relative_to(FILES)) for path in CKPTS])
def test_a_real_file_is_written_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    has_crc = path.read_bytes()[-17:-10] == b"crc_num"
    save_checkpoint(load_checkpoint(path), tmp_path / "copy.ckpt", crc_check=has_crc)
    assert (tmp_path / "copy.ckpt").read_bytes() == path.read_bytes()
    assert has_crc == (path.name in {"with_crc.ckpt", "every_type.ckpt"})


def expected_values() -> dict[str, Any]:
    return {
        "f": np.arange(6, dtype="f4").reshape(2, 3),
        "s": np.float32(1.5),
        "b": np.array([True, False]),
        "i": np.array([1, 2]),
        "h": np.array([1, 2], "f2"),
        "u8": np.array([[1, 2]], "u1"),
        "epoch_num": np.int64(3),
        "flag": np.bool_(True),
        "lr": np.float32(0.1),
    }


@pytest.mark.parametrize("name", ["every_type.ckpt", "every_type.safetensors"])
def test_every_type_is_read(name: str) -> None:
    entries = load_checkpoint(FILES / name)
    arrays = to_numpy(entries)
    for key, value in expected_values().items():
        assert (arrays[key].shape, arrays[key].dtype) == (value.shape, value.dtype), key
        assert (arrays[key] == value).all(), key
    if name.endswith(".ckpt"):
        assert entries["note"] == "héllo"
        bits = entries["bf"]
        assert isinstance(bits, HostTensor)
        assert (bits.dtype, arrays["bf"].tolist()) == ("BF16", [0x3FC0, 0xC000, 0x7F62])


def test_every_type_is_written_as_mindspore_writes_it(tmp_path: Path) -> None:
    values: dict[str, Any] = expected_values()
    numbers = {"epoch_num": 3, "note": "héllo", "flag": True, "lr": 0.1}
    tensors = {name: value for name, value in values.items() if name not in numbers}
    order = ["f", "s", "b", "bf", "i", "h", "u8"]
    tensors["bf"] = np.array([0x3FC0, 0xC000, 0x7F62], "u2")
    entries = from_numpy({name: tensors[name] for name in order}, bfloat16=["bf"])
    save_checkpoint(entries, tmp_path / "a.ckpt", append_dict=numbers, crc_check=True)
    assert (tmp_path / "a.ckpt").read_bytes() == (FILES / "every_type.ckpt").read_bytes()


def test_bfloat16_in_safetensors_is_read_and_written(tmp_path: Path) -> None:
    entries = load_checkpoint(FILES / "bfloat16.safetensors")
    save_checkpoint(entries, tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == (FILES / "bfloat16.safetensors").read_bytes()


def test_the_words_of_a_safetensors_file_and_its_crc_are_mindspores() -> None:
    data = (FILES / "every_type.safetensors").read_bytes()
    tensors, metadata = decode_safetensors(data, "here", crc_check=True)
    # `epoch_num` is 3 without dimensions: the CRC is over three zeros instead of its bytes, as Python's bytes() has it.
    assert metadata == {"format": "ms", "crc_num": "906581666"}
    again = b"".join(encode_safetensors(tensors, crc_check=True, remove_redundancy=True))
    assert decode_safetensors(again, "here", crc_check=True)[1] == {**metadata, "remove_redundancy": "True"}
    honest = again.replace(b"906581666", b"204927413")
    assert decode_safetensors(honest, "here", crc_check=True)[0] == tensors
    with pytest.raises(CorruptError, match="CRC"):
        decode_safetensors(again.replace(b"906581666", b"906581667"), "here", crc_check=True)


def test_stock_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    numpy_loader = pytest.importorskip("safetensors.numpy")
    arrays = {"b": np.arange(3, dtype="u1"), "a": np.arange(6.0).reshape(2, 3), "n": np.zeros((0, 4), "f2")}
    save_checkpoint(arrays, tmp_path / "a.safetensors")
    read = numpy_loader.load_file(tmp_path / "a.safetensors")
    assert {name: array.tolist() for name, array in read.items()} == {n: a.tolist() for n, a in arrays.items()}


def test_a_checkpoint_is_private_read_only_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank_0" / "a.ckpt"
    for value in (1.0, 2.0):
        save_checkpoint({"w": np.float32(value)}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert os.listdir(path.parent) == ["a.ckpt"]
    assert to_numpy(load_checkpoint(path))["w"] == 2.0


def test_a_large_tensor_is_several_records_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"a": np.arange(1000, dtype="i4").reshape(10, 100), "b": np.arange(3, dtype="i1")}
    save_checkpoint(arrays, tmp_path / "whole.ckpt", crc_check=True)
    monkeypatch.setattr(ckpt, "SLICE_BYTES", 512)
    save_checkpoint(arrays, tmp_path / "sliced.ckpt", crc_check=True)
    assert (tmp_path / "sliced.ckpt").stat().st_size > (tmp_path / "whole.ckpt").stat().st_size
    assert (tmp_path / "sliced.ckpt").read_bytes().count(b"\x0a\x01a") == 8
    read = to_numpy(load_checkpoint(tmp_path / "sliced.ckpt"))
    assert {name: array.tolist() for name, array in read.items()} == {n: a.tolist() for n, a in arrays.items()}


def record(tag: bytes, dims: bytes, kind: bytes, content: bytes) -> bytes:
    tensor = dims + b"\x12" + bytes([len(kind)]) + kind + b"\x1a" + bytes([len(content)]) + content
    value = b"\x0a" + bytes([len(tag)]) + tag + b"\x12" + bytes([len(tensor)]) + tensor
    return b"\x0a" + bytes([len(value)]) + value


def test_a_scalar_may_have_the_shape_0() -> None:
    data = record(b"s", b"\x08\x00", b"Float32", struct.pack("<f", 2.5))
    entry = ckpt.decode_ckpt(data, "here", crc_check=True)["s"]
    assert isinstance(entry, HostTensor)
    assert (entry.shape, entry.array().item()) == ((), 2.5)
    empty = ckpt.decode_ckpt(record(b"s", b"\x08\x00", b"Float32", b""), "here", crc_check=True)["s"]
    assert isinstance(empty, HostTensor)
    assert empty.shape == (0,)


def test_slices_that_do_not_fit_and_types_that_are_unknown_are_refused() -> None:
    one = record(b"w", b"\x08\x04", b"Int8", b"\x01\x02")
    other = record(b"x", b"\x08\x01", b"Int8", b"\x01")
    assert list(ckpt.decode_ckpt(one + one, "here", crc_check=True)) == ["w"]
    for data in (one, one + one + one, one + record(b"w", b"\x08\x04", b"UInt8", b"\x01\x02"), one + other + one):
        with pytest.raises(CorruptError):
            ckpt.decode_ckpt(data, "here", crc_check=True)
    with pytest.raises(UsageError, match="Int4"):
        ckpt.decode_ckpt(record(b"w", b"\x08\x01", b"Int4", b"\x01"), "here", crc_check=True)
    with pytest.raises(UsageError, match="hash map"):
        ckpt.decode_ckpt(b"\x0a\x06\x0a\x01m\x1a\x01\x00", "here", crc_check=True)


def test_every_flipped_bit_is_found_by_the_crc() -> None:
    data = bytearray((FILES / "every_type.ckpt").read_bytes())
    for position in range(0, len(data), 3):
        data[position] ^= 1 << position % 8
        with pytest.raises(CorruptError):
            ckpt.decode_ckpt(bytes(data), "here", crc_check=True)
        data[position] ^= 1 << position % 8


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_a_damaged_file_is_refused_unless_nobody_asks(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    data = bytearray((FILES / f"with_crc.{suffix}").read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC"):
        load_checkpoint(path)
    assert "n.w3" in load_checkpoint(path, crc_check=False)


def test_formats_convert_without_loss(tmp_path: Path) -> None:
    source = FILES / "rank_0" / "checkpoint-2_1875.ckpt"
    convert_checkpoint(source, tmp_path / "a.safetensors", crc_check=True)
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.ckpt")
    assert load_checkpoint(tmp_path / "b.ckpt") == load_checkpoint(source)
    with pytest.raises(UsageError, match="note"):
        convert_checkpoint(FILES / "every_type.ckpt", tmp_path / "c.safetensors")


def test_only_what_is_chosen_is_given() -> None:
    path = FILES / "rank_0" / "checkpoint-2_1875.ckpt"
    assert list(load_checkpoint(path, choice_func=lambda name: name.endswith("num"))) == ["epoch_num", "step_num"]


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    for value in (np.array(["text"]), np.array([object()]), np.zeros(1, "M8[s]"), [1, "a"]):
        with pytest.raises(UsageError):
            save_checkpoint({"w": value}, tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="one name"):
        save_checkpoint({"w": 1}, tmp_path / "a.ckpt", append_dict={"w": 2})
    with pytest.raises(UsageError, match="no F8_E4M3"):
        save_checkpoint({"w": HostTensor("F8_E4M3", (1,), b"1")}, tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="cannot take the CRC"):
        save_checkpoint({"w": -1}, tmp_path / "a.safetensors", crc_check=True)
    assert not os.listdir(tmp_path)


def test_arrays_of_any_order_and_byte_order_are_stored_alike(tmp_path: Path) -> None:
    array = np.arange(6, dtype="i4").reshape(2, 3)
    for variant in (array, np.asfortranarray(array), array.astype(">i4"), np.repeat(array, 2, axis=1)[:, ::2]):
        save_checkpoint({"w": variant}, tmp_path / "a.ckpt")
        assert to_numpy(load_checkpoint(tmp_path / "a.ckpt"))["w"].tolist() == array.tolist()


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
# Few letters, of one to four bytes: building the table of all takes hypothesis longer than the tests.
LETTERS = "aZ.-_0é漢😀"
TEXTS = st.text(LETTERS + "\0\n", max_size=9).filter(lambda text: not text.endswith("\0"))


@st.composite
def tensors(draw: st.DrawFn) -> HostTensor:
    dtype, shape = draw(st.sampled_from(sorted(MINDSPORE_NAMES))), draw(SHAPES)
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    return HostTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


NAMES = st.text(LETTERS, min_size=1, max_size=9)


@given(st.dictionaries(NAMES, st.one_of(tensors(), TEXTS), max_size=5), st.booleans())
def test_what_is_written_to_ckpt_is_read(entries: dict[str, HostTensor | str], crc: bool) -> None:
    data = b"".join(ckpt.encode_ckpt(entries, crc_check=crc))
    read = ckpt.decode_ckpt(data, "here", crc_check=crc)
    assert read == entries
    assert list(read) == list(entries)


@given(st.dictionaries(NAMES, tensors().filter(lambda tensor: tensor.shape), max_size=5), st.booleans())
def test_what_is_written_to_safetensors_is_read(entries: dict[str, HostTensor], crc: bool) -> None:
    data = b"".join(encode_safetensors(entries, crc_check=crc, remove_redundancy=None))
    assert decode_safetensors(data, "here", crc_check=crc)[0] == entries


def test_asking_for_ranks_loads_no_numpy() -> None:
    code = "import holdfast.adapters.mindspore, sys; print(*[m for m in ('numpy', 'torch') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == []
