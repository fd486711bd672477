"""A checkpoint directory is ordinary: stock PyTorch and safetensors read it in a Python that has no holdfast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from holdfast.core.model import Extent, Piece, Shard, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage import manifest as manifests
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from kit.stock_reader import READER
from sample_kit import MORE
from tiers.samples import JOB_LAYOUT, build, bundle, new_store, ref_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Random bits: NaNs with payloads and all."""
    torch.manual_seed(seed)
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def cut(name: str, dtype: str, tensor: torch.Tensor, first: int, last: int) -> tuple[Piece, bytes]:
    """Rows `first` to `last` of a tensor as a rank's own shard."""
    shape = tuple(tensor.shape)
    extent = Extent((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    return Piece(Shard(name, dtype, shape, extent, (0,)), 0, last - first), raw(tensor[first:last])


def whole(name: str, dtype: str, tensor: torch.Tensor) -> tuple[Piece, bytes]:
    shape = tuple(tensor.shape)
    shard = Shard(name, dtype, shape, Extent((0,) * len(shape), shape), (0,))
    return Piece(shard, 0, shape[0] if shape else 1), raw(tensor)


def write_version(root: Path, files: Sequence[Sequence[tuple[Piece, bytes]]]) -> Path:
    store = new_store(root)
    version = Version(1, 7)
    stamp = make_stamp(1)
    parts = {}
    for number, content in enumerate(files):
        b = bundle(f"g{number}x1-aaaa-0", *(piece for piece, _ in content), has_values=number == 0)
        image = build(b, {piece.shard.name: data for piece, data in content}, {"lr": 0.25, "betas": (0.9, 0.95)})
        file = store.bundles.write(
            version, ref_of(b), image_format.seal(b.bundle_id, image), memoryview(image), stamp=stamp
        )
        name, length, digest = store.write_part(version, number, [file], stamp=stamp)
        parts[name] = (length, digest)
    store.commit(Manifest(version, store.job_id(), len(files), JOB_LAYOUT, None, parts), stamp=stamp)
    assert store.manifest(version).bundles
    return root / str(version)


def read_without_holdfast(directory: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> dict[str, object]:
    expected = {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "raw": raw(t).hex()}
        for name, t in tensors.items()
    }
    (tmp_path / "expected.json").write_text(json.dumps({"tensors": expected}))
    command = [sys.executable, "-I", "-c", READER, str(directory), str(tmp_path / "expected.json")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_stock_pytorch_and_safetensors_read_a_version(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    first: list[tuple[Piece, bytes]] = []
    second: list[tuple[Piece, bytes]] = []
    for seed, (name, dtype) in enumerate(DTYPES.items()):
        tensors[f"all.{name}"] = random_tensor(dtype, (3, 5), seed)
        first.append(whole(f"all.{name}", name, tensors[f"all.{name}"]))
        tensors[f"cut.{name}"] = random_tensor(dtype, (7, 3), 100 + seed)
        first.append(cut(f"cut.{name}", name, tensors[f"cut.{name}"], 0, 4))
        second.append(cut(f"cut.{name}", name, tensors[f"cut.{name}"], 4, 7))
    scalars = {"optimizer.state.w.step": ("I64", torch.tensor(1 << 40)), "loss": ("F32", torch.tensor(0.5))}
    for name, (dtype_name, tensor) in scalars.items():
        tensors[name] = tensor
        second.append(whole(name, dtype_name, tensor))
    tensors["rank0/rng"] = random_tensor(torch.uint8, (5056,), 7)
    second.append(whole("rank0/rng", "U8", tensors["rank0/rng"]))
    # A rank that holds no row of a tensor, at the offsets of one that holds all (in a file before it, and after), and at
    # its end.
    tensors["few"] = random_tensor(torch.float32, (2, 3), 9)
    first.append(cut("few", "F32", tensors["few"], 0, 2))
    second.append(cut("few", "F32", tensors["few"], 0, 0))
    tensors["late"] = random_tensor(torch.float32, (2, 3), 10)
    first.append(cut("late", "F32", tensors["late"], 0, 0))
    second.append(cut("late", "F32", tensors["late"], 0, 2))
    third = [cut("few", "F32", tensors["few"], 2, 2)]
    # A tensor that has no element at all.
    tensors["none"] = torch.empty(0, 4, dtype=torch.bfloat16)
    third.append(whole("none", "BF16", tensors["none"]))
    directory = write_version(tmp_path / "root", [first, second, third, []])  # and a bundle without anything
    answer = read_without_holdfast(directory, tensors, tmp_path)
    assert answer["wrong"] == []
    assert answer["count"] == 2 * len(DTYPES) + 6
    assert answer["values"] == {"values/g0x1-aaaa-0": '{"lr":0.25,"betas":{"$tuple":[0.9,0.95]}}'}


@MORE
def test_the_check_above_can_fail(tmp_path: Path) -> None:
    tensor = random_tensor(torch.float32, (4, 2), 1)
    directory = write_version(tmp_path / "root", [[whole("w", "F32", tensor)]])
    (file,) = directory.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[image_format.ALIGN] ^= 1
    file.write_bytes(data)
    assert read_without_holdfast(directory, {"w": tensor}, tmp_path)["wrong"] == ["w", "safe_open:w"]


def test_every_dtype_that_a_state_can_have_is_tried() -> None:
    from holdfast.core.model import DTYPE_BYTES

    assert set(DTYPE_BYTES) == set(DTYPES)
    assert all(torch.empty(0, dtype=dtype).element_size() == DTYPE_BYTES[name] for name, dtype in DTYPES.items())


@pytest.mark.parametrize("nodes", [1, 3])
def test_only_the_files_of_the_manifest_are_seen(tmp_path: Path, nodes: int) -> None:
    tensors = {f"w{n}": random_tensor(torch.float32, (2, 2), n) for n in range(nodes)}
    directory = write_version(tmp_path / "root", [[whole(name, "F32", t)] for name, t in tensors.items()])
    assert len(list(directory.glob("*.safetensors"))) == nodes
    assert len(list(directory.iterdir())) == 2 * nodes + 1
    assert manifests.ROOT_NAME in {path.name for path in directory.iterdir()}
