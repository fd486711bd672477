"""`holdfast export`: whole tensors from uneven pieces, twins and stages, in every format, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from holdfast.adapters.mindspore import load_checkpoint
from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.cli.stored import export
from holdfast.core.layout.bundles import fingerprint
from holdfast.core.model import Bundle, BundleRef, Extent, Piece, Shard, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values
from holdfast.tiers.format.values import TensorRef
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import open_storage
from sample_kit import MORE

Run = Callable[..., subprocess.CompletedProcess[str]]
Box = tuple[tuple[int, ...], tuple[int, ...]]
VERSION = Version(1, 7)
NAMES = {"float32": "F32", "int64": "I64", "uint8": "U8"}


class Writer:
    """Writes a version whose bundles hold what a test says."""

    def __init__(self, root: Path) -> None:
        self.storage = open_storage(root, Events())
        self.job = self.storage.claim()
        self.storage.incarnations.register()
        self.files: list[Any] = []

    def bundle(
        self, rank: int, pieces: list[tuple[str, np.ndarray, Box | None]], tree: dict[str, Any] | None = None
    ) -> None:
        """Boxes (or all) of whole tensors, as a bundle of one rank."""
        made, data = [], {}
        for name, whole, box in pieces:
            offsets, lengths = box or ((0,) * whole.ndim, whole.shape)
            shard = Shard(name, NAMES[str(whole.dtype)], whole.shape, Extent(offsets, lengths), (rank,))
            made.append(Piece(shard, 0, lengths[0] if lengths else 1))
            data[name] = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].tobytes()
        raw = image_format.pad_values(values.encode(tree)) if tree else b""
        bundle = Bundle(f"b{len(self.files)}", (rank,), 0, 1, tuple(made), bool(raw))
        plan = image_format.plan_image(bundle, len(raw))
        image = bytearray(plan.length)
        image[: len(plan.header)] = plan.header
        for name, (offset, size) in plan.spans.items():
            image[offset : offset + size] = data[name]
        if plan.values_span:
            image[plan.values_span[0] :] = raw
        ref = BundleRef(bundle.bundle_id, bundle.ranks, 0, 1, bundle.num_bytes, fingerprint(bundle))
        seal = image_format.seal(bundle.bundle_id, image)
        self.files.append(self.storage.bundles.write(VERSION, ref, seal, memoryview(image), stamp=make_stamp(1)))

    def commit(self, world_size: int) -> None:
        stamp = make_stamp(1)
        name, length, digest = self.storage.write_part(VERSION, 0, self.files, stamp=stamp)
        parts = {name: (length, digest)}
        self.storage.commit(Manifest(VERSION, self.job, world_size, "f" * 32, None, parts), stamp=stamp)


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Uneven rows, columns, a stage of a pipeline, state of single ranks that is the same, and that is not."""
    rng = np.random.default_rng(3)
    whole = {
        "model.rows": rng.random((7, 5), dtype=np.float32),
        "model.columns": rng.random((6, 9, 4), dtype=np.float32),
        "model.stage1": rng.random((3, 3), dtype=np.float32),
        "model.norm": rng.random(11, dtype=np.float32),
        "model.none": np.zeros((0, 4), dtype=np.float32),
        "optimizer.state.rows.exp_avg": rng.random((7, 5), dtype=np.float32),
        "optimizer.state.rows.step": np.array(41, dtype=np.int64),
    }
    rngs = [rng.integers(0, 255, 16, dtype=np.uint8) for _ in range(2)]
    groups = [{"lr": 0.25, "betas": (0.9, 0.95), "params": ["rows", "columns", "norm"]}]
    writer = Writer(tmp_path / "job")
    for rank in range(2):
        first, count = (0, 3) if rank == 0 else (3, 4)
        rows = ((first, 0), (count, 5))
        columns = ((0, 0, 0), (6, 2, 4)) if rank == 0 else ((0, 2, 0), (6, 7, 4))
        pieces = [("model.rows", whole["model.rows"], rows), ("model.columns", whole["model.columns"], columns)]
        pieces += [("optimizer.state.rows.exp_avg", whole["optimizer.state.rows.exp_avg"], rows)]
        pieces += [(f"rank{rank}/model.norm", whole["model.norm"], None), (f"rank{rank}/rng.words", rngs[rank], None)]
        if rank:
            pieces += [("rank1/model.stage1", whole["model.stage1"], None)]
        tree = {f"rank{rank}/rng": {"words": TensorRef(f"rank{rank}/rng.words")}, f"rank{rank}/scheduler": {"last": 4}}
        writer.bundle(rank, pieces, tree)
    twin = [("model.rows", whole["model.rows"], ((2, 0), (3, 5))), ("model.none", whole["model.none"], None)]
    twin += [("optimizer.state.rows.step", whole["optimizer.state.rows.step"], None)]
    writer.bundle(0, twin, {"optimizer.param_groups": groups})
    writer.commit(2)
    whole |= {f"rank{rank}/rng.words": words for rank, words in enumerate(rngs)}
    return tmp_path / "job", whole


def test_safetensors_without_torch_hold_every_whole_tensor(
    job: tuple[Path, dict[str, np.ndarray]], holdfast: Run, tmp_path: Path
) -> None:
    root, whole = job
    out = tmp_path / "all.safetensors"
    result = holdfast("export", root, out, "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["version"], told["tensors"], told["out"]) == (str(VERSION), len(whole), str(out))
    with safe_open(out, framework="np") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    assert found.keys() == whole.keys(), "what all ranks had alike is there once, what differs stands under its rank"
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes(), name
    tree = values.decode(metadata["holdfast.values"].encode())
    assert tree["scheduler"] == {"last": 4}
    assert tree["rank1/rng"] == {"words": TensorRef("rank1/rng.words")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors", "job"], "nothing else is left"
    code = (
        "import sys; from holdfast.cli.stored import export; "
        f"export.export({str(root)!r}, {str(tmp_path / 'again')!r}, form='safetensors', version=None, only='model.', as_json=True); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    with safe_open(tmp_path / "again", framework="np") as file:
        assert {name for name in file.keys()} == {n for n in whole if n.startswith("model.")}  # noqa: C416, SIM118


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_dcp_and_mindspore_load_theirs(
    job: tuple[Path, dict[str, np.ndarray]], holdfast: Run, tmp_path: Path
) -> None:
    root, whole = job
    for form in ("torch", "dcp", "mindspore"):
        result = holdfast("export", root, tmp_path / f"out.{form}", "--to", form)
        assert result.returncode == 0, result.stdout + result.stderr
    tree = torch.load(tmp_path / "out.torch", weights_only=True)
    assert torch.equal(tree["model"]["columns"], torch.from_numpy(whole["model.columns"]))
    assert torch.equal(tree["model"]["stage1"], torch.from_numpy(whole["model.stage1"]))
    assert tree["optimizer"]["state"]["rows"]["step"].item() == 41
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    assert tree["scheduler"] == {"last": 4}
    assert torch.equal(tree["rank0/rng"]["words"], torch.from_numpy(whole["rank0/rng.words"]))
    state = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in tree["model"].items()},
        "optimizer": {"state": {"rows": {"exp_avg": torch.zeros(7, 5)}}},
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "out.dcp"), no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in tree["model"].items())
    assert torch.equal(state["optimizer"]["state"]["rows"]["exp_avg"], tree["optimizer"]["state"]["rows"]["exp_avg"])
    loaded = load_checkpoint(tmp_path / "out.mindspore")
    assert loaded["model.columns"].array().tobytes() == whole["model.columns"].tobytes()
    assert loaded["optimizer.state.rows.step"].array() == 41


def test_what_is_there_is_not_replaced_and_what_is_damaged_is_not_exported(
    job: tuple[Path, dict[str, np.ndarray]], holdfast: Run, tmp_path: Path
) -> None:
    root, _ = job
    (tmp_path / "taken").write_text("mine")
    assert holdfast("export", root, tmp_path / "taken").returncode == 2
    assert (tmp_path / "taken").read_text() == "mine"
    assert holdfast("export", root, tmp_path / "x", "--to", "zip").returncode == 2
    assert holdfast("export", root, tmp_path / "x", "--only", "nothing").returncode == 2
    file = max((root / str(VERSION)).glob("b1-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    result = holdfast("export", root, tmp_path / "x", "--json")
    assert result.returncode == 1
    assert file.name in json.loads(result.stdout)["error"]["where"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "taken"]


def big_job(root: Path, num_bytes: int) -> np.ndarray:
    """One tensor in two column shards."""
    whole = np.random.default_rng(0).integers(0, 255, (num_bytes // 4096, 4096), dtype=np.uint8)
    writer = Writer(root)
    for rank in range(2):
        writer.bundle(rank, [("model.big", whole, ((0, rank * 2048), (len(whole), 2048)))])
    writer.commit(2)
    return whole


@MORE
def test_tied_weights_come_out_under_both_names(tmp_path: Path, holdfast: Run) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    writer = Writer(tmp_path / "job")
    tied = {"rank0/model.head": TensorRef("rank0/model.embed")}
    writer.bundle(0, [("rank0/model.embed", weight, None)], tied)
    writer.bundle(1, [("rank1/model.up", weight + 1, None)])
    writer.commit(2)
    for only, names in (("", {"embed", "head", "up"}), ("model.h", {"head"}), ("model.e", {"embed"})):
        out = tmp_path / f"out{only}.pt"
        result = holdfast("export", tmp_path / "job", out, "--to", "torch", "--only", only)
        assert result.returncode == 0, result.stderr
        model = torch.load(out, weights_only=True)["model"]
        assert set(model) == names
        assert all(np.array_equal(model[name].numpy(), weight) for name in names - {"up"})


@pytest.mark.parametrize("more", [0, 1])
def test_what_groups_saved_under_one_name_is_exported_if_it_is_the_same(
    more: int, tmp_path: Path, holdfast: Run
) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    writer = Writer(tmp_path / "job")
    for rank in range(4):
        first = 2 * (rank // 2)
        writer.bundle(rank, [("model.norm", rows + more * (rank % 2), ((first, 0), (2, 2)))])
    writer.commit(4)
    result = holdfast("export", tmp_path / "job", tmp_path / "out")
    assert result.returncode == (2 if more else 0), result.stderr
    if more:
        assert "model.norm" in result.stderr
        assert "other bytes" in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_memory_does_not_grow_with_the_state(form: str, tmp_path: Path) -> None:
    """Of memory that is its own, the command and its helper get less than a third of the state beyond what loading them takes."""
    state = 360 << 20
    whole = big_job(tmp_path / "job", state)
    out = tmp_path / f"out.{form}"
    code = f"""
import threading, time, sys, psutil
from holdfast.cli.stored import export
from pathlib import Path
peak, over = [0], threading.Event()
def anonymous(pid):
    try:
        text = Path(f"/proc/{{pid}}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))
def watch():
    me = psutil.Process()
    while not over.wait(0.01):
        peak[0] = max([peak[0], anonymous(me.pid), *(anonymous(c.pid) for c in me.children())])
watcher = threading.Thread(target=watch); watcher.start()
export.export({str(tmp_path / "job")!r}, {str(out)!r}, form={form!r}, version=None, only="", as_json=False)
over.set(); watcher.join()
print(peak[0])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout.split()[-1])
    assert peak < (100 << 20 if form == "safetensors" else 400 << 20), (
        f"{peak >> 20} MiB for {state >> 20} MiB of state"
    )
    if form == "safetensors":
        with safe_open(out, framework="np") as file:
            assert np.array_equal(file.get_tensor("model.big"), whole)
    else:
        assert np.array_equal(torch.load(out, weights_only=True, mmap=True)["model"]["big"].numpy(), whole)


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path: Path, holdfast: Run) -> None:
    big_job(tmp_path / "job", 120 << 20)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "holdfast.cli.cli", "export", str(tmp_path / "job"), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*/out")):
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert holdfast("export", tmp_path / "job", out).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"], "the next one clears away what it left"


def test_what_an_earlier_process_of_the_same_number_left_is_removed(tmp_path: Path) -> None:
    """In a container the command may have one number each time."""
    with export._aside(tmp_path / "out") as work:
        pass
    work.mkdir()
    (work / "half").touch()
    with export._aside(tmp_path / "out") as again:
        assert list(again.iterdir()) == []


@pytest.mark.root
def test_an_export_under_way_on_another_machine_is_left_alone(tmp_path: Path) -> None:
    """The other one sees the same directory, and no process of this number: a PID namespace of its own."""
    code = (
        "import sys; from pathlib import Path; from holdfast.cli.stored import export\n"
        "with export._aside(Path(sys.argv[1])) as work: print(work.name)"
    )
    with export._aside(tmp_path / "out") as work:
        (work / "half").touch()
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if "unshare failed" in done.stderr or "mount" in done.stderr:
            pytest.skip("no PID namespaces here")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() not in ("", work.name)
        assert (work / "half").exists()
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_put_in_place_where_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CIFS, exFAT and many of FUSE: what was merged for an hour must not be thrown away at the end."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    work = tmp_path / "work"
    for text, is_free in (("new", True), ("newer", False)):
        work.mkdir(exist_ok=True)
        (work / "made").write_text(text)
        with contextlib.nullcontext() if is_free else pytest.raises(UsageError, match="is not replaced"):
            export._publish(work / "made", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "new"
