"""PyTorch's own calls with our writer, reader and stager, in one process: what is saved is a version like any other."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import holdfast
from holdfast.adapters.dcp import AsyncStager, StorageReader, StorageWriter, items
from holdfast.adapters.dcp.dcp_job import patterns
from holdfast.adapters.dcp.reader import _Values
from holdfast.base.config import load
from holdfast.base.errors import LevelNotReached, UsageError, VersionNotFound
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.liveness.open_checkpointers import NO_WISH
from holdfast.core.model import Level, Version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


class Job:
    """A small model that has trained a little."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.train()

    def train(self) -> None:
        self.model(torch.randn(16, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": 3, "extra": {"name": "tiny", "of": [1, (2.5, None)]}}

    def set(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def tensors(job: Job) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in job.model.state_dict().items()}
    for index, state in job.optimizer.state_dict()["state"].items():
        found.update({f"{index}.{key}": value.clone() for key, value in state.items()})
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def writer(tmp_path: Path, runtime_dir: Path) -> Iterator[StorageWriter]:
    with_writer = StorageWriter(tmp_path / "root")
    yield with_writer
    with_writer.close()


def test_what_is_saved_is_loaded_bit_for_bit_with_its_plain_values(writer: StorageWriter, tmp_path: Path) -> None:
    job = Job()
    saved = tensors(job)
    dcp.save(job.state(), checkpoint_id="step-3", storage_writer=writer)
    assert writer.last is not None
    assert writer.last.version == Version(1, 3)
    for source in (writer, tmp_path / "root"):
        other = Job(seed=2)
        state = other.state()
        state["step"], state["extra"] = 0, {"name": "", "of": [0, (math.nan, 1)]}
        reader = StorageReader(source)
        assert reader.find() == 3
        dcp.load(state, storage_reader=reader)
        other.set(state)
        assert same(tensors(other), saved)
        assert state["step"] == 3
        assert state["extra"] == {"name": "tiny", "of": [1, (2.5, None)]}
        assert reader.loaded == Version(1, 3)


def test_a_wish_of_the_operator_is_what_is_found_and_loaded_once(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--from-version`: of one start, asked for as often as that likes; the same command started again goes on."""
    monkeypatch.setattr(open_checkpointers.wish, "version", NO_WISH)

    def start(wish: str, saves: Sequence[int]) -> int | None:
        open_checkpointers.wish.version = wish
        with contextlib.closing(StorageWriter(tmp_path / "root")) as writer:
            reader = StorageReader(writer)
            found, state = reader.find(), {"x": torch.zeros(4)}
            if found is not None:
                dcp.load(state, storage_reader=reader)
                assert state["x"][0] == found
            for step in saves:
                dcp.save({"x": torch.full((4,), float(step))}, checkpoint_id=str(step), storage_writer=writer)
        return found

    assert start(NO_WISH, (1, 2, 3)) is None  # of which the last two stay
    assert start("i000001-s0000000002", (3, 4)) == 2
    assert start("i000001-s0000000002", ()) == 4


@pytest.mark.slow
def test_a_checkpointer_and_the_commands_read_it(writer: StorageWriter, tmp_path: Path) -> None:
    job = Job()
    saved = tensors(job)
    dcp.save(job.state(), storage_writer=writer)
    writer.close()
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.cli", "verify", str(tmp_path / "root")], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout
    other = Job(seed=2)
    with holdfast.Checkpointer(tmp_path / "root", model=other.model) as checkpointer:
        assert checkpointer.restore(strict=False) == 1
        assert same(other.model.state_dict(), {name: saved[name] for name in other.model.state_dict()})


@pytest.mark.slow
def test_dcp_reads_what_a_checkpointer_saved(tmp_path: Path, runtime_dir: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path, model=job.model, optimizer=job.optimizer) as checkpointer:
        checkpointer.restore()
        checkpointer.step(7)
    other = Job(seed=2)
    state = {"model": other.model.state_dict()}
    reader = StorageReader(tmp_path)
    dcp.load(state, storage_reader=reader)
    assert reader.find() == 7
    assert same(state["model"], job.model.state_dict())


def test_a_state_with_objects_of_any_class_is_refused_by_name(writer: StorageWriter) -> None:
    with pytest.raises(dcp.CheckpointException, match="strange"):
        dcp.save({"strange": Path("x"), "fine": torch.ones(3)}, storage_writer=writer)


@pytest.mark.slow
def test_saves_count_on_and_a_number_may_not_go_back(writer: StorageWriter) -> None:
    state = {"x": torch.arange(4.0)}
    for expected in (0, 1):
        dcp.save(state, storage_writer=writer)
        assert writer.last is not None
        assert writer.last.version.step == expected
    dcp.save(state, checkpoint_id="ckpts/step_0010", storage_writer=writer)
    assert writer.last.version.step == 10
    with pytest.raises(dcp.CheckpointException, match="cannot be saved after step 10"):
        dcp.save(state, checkpoint_id="4", storage_writer=writer)
    loaded = {"x": torch.zeros(4)}
    with pytest.raises(dcp.CheckpointException, match="there is no step 99"):
        dcp.load(loaded, checkpoint_id="99", storage_reader=StorageReader(writer))


@pytest.mark.slow
def test_after_going_back_a_new_incarnation_begins(writer: StorageWriter) -> None:
    state = {"x": torch.arange(4.0)}
    for step in (1, 2):
        dcp.save(state, checkpoint_id=str(step), storage_writer=writer)
    dcp.load(state, checkpoint_id="1", storage_reader=StorageReader(writer))
    dcp.save(state, checkpoint_id="2", storage_writer=writer)
    assert writer.last is not None
    assert writer.last.version == Version(2, 2)
    manifest = writer.job.storage.manifest(Version(2, 2))
    assert manifest.resumed_from == Version(1, 1)


@pytest.mark.slow
def test_a_level_below_durable_returns_early_and_close_makes_it_durable(tmp_path: Path, runtime_dir: Path) -> None:
    writer = StorageWriter(tmp_path, level="captured")
    dcp.save({"x": torch.ones(1000)}, checkpoint_id="5", storage_writer=writer)
    assert writer.last is not None
    assert writer.last.reached >= Level.CAPTURED
    assert not list(tmp_path.glob("i*-s*/manifest.json"))
    # A process that lost its state finds it in memory, though nothing is in storage.
    state = {"x": torch.zeros(1000)}
    dcp.load(state, storage_reader=StorageReader(writer))
    assert torch.equal(state["x"], torch.ones(1000))
    assert writer.job.events.counters().get("storage_read_bytes", 0) == 0
    writer.close()
    assert [path.parent.name for path in tmp_path.glob("i*-s*/manifest.json")] == ["i000001-s0000000005"]


def test_the_stager_keeps_the_state_of_the_call(writer: StorageWriter) -> None:
    x = torch.zeros(1 << 16)
    state = {"x": x, "n": {"count": 0}}
    stager = AsyncStager(writer)
    for count in range(1, 4):
        x.fill_(count)
        state["n"]["count"] = count
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        x.fill_(-1)
        state["n"]["count"] = -1
        future.result()
        loaded = {"x": torch.zeros(1 << 16), "n": {"count": 0}}
        dcp.load(loaded, storage_reader=StorageReader(writer.root))
        assert loaded["n"]["count"] == count
        assert torch.equal(loaded["x"], torch.full_like(x, count))
    stager.close()


@pytest.mark.slow
def test_from_the_second_save_on_the_stager_copies_straight_into_the_slot(
    writer: StorageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.zeros(1 << 16)}
    stager = AsyncStager(writer)
    copied: list[int] = []
    monkeypatch.setattr(stager, "_copied", lambda state: copied.append(1) or dict(state))
    for _ in range(3):
        dcp.async_save(state, storage_writer=writer, async_stager=stager).result()
    assert len(copied) == 1
    state["y"] = torch.ones(3)
    dcp.async_save(state, storage_writer=writer, async_stager=stager).result()
    assert len(copied) == 2


def test_boxes_of_one_tensor_are_stored_separately_and_rejoined() -> None:
    def note(*offsets: int) -> items.Note:
        return items.Note("w", "shard", "F32", (4, 2), offsets, (2, 2))

    held = items.with_holders({0: (note(0, 0), note(2, 0)), 1: (note(0, 0),)}, ())
    assert [(n.entry, n.holders) for n in held[0]] == [("w~box:0.0", (0, 1)), ("w~box:2.0", (0,))]
    assert held[1][0].entry == "w~box:0.0"
    single = items.with_holders({0: (note(0, 0),), 1: (note(2, 0),)}, ())
    assert [rows[0].entry for rows in single.values()] == ["w", "w"]


def test_plain_tensors_and_values_are_replicated_only_if_that_was_said() -> None:
    rows = (items.Note("model.w", "tensor", "F32", (2,), (0,), (2,)), items.Note("step", "value"))
    notes = {0: rows, 1: rows}
    assert [[n.holders for n in held] for held in items.with_holders(notes, ()).values()] == [[(0,), (0,)], [(), ()]]
    said = items.with_holders(notes, patterns("model"))
    assert [[n.holders for n in held] for held in said.values()] == [[(0, 1), (0,)], [(0, 1), ()]]


@pytest.mark.slow
def test_cached_plans_save_the_same(writer: StorageWriter, tmp_path: Path) -> None:
    x = torch.zeros(1000)
    for step in range(3):
        x.fill_(step)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"x": x, "step": step}, storage_writer=writer, planner=planner)
        loaded = {"x": torch.ones(1000), "step": -1}
        dcp.load(loaded, storage_reader=StorageReader(tmp_path / "root"))
        assert loaded["step"] == step
        assert torch.equal(loaded["x"], x)


def test_damage_is_an_error_and_never_loaded(
    writer: StorageWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"x": torch.ones(1 << 16)}, storage_writer=writer)
    (file,) = tmp_path.glob("root/i*-s*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    state = {"x": torch.zeros(1 << 16)}
    with pytest.raises(dcp.CheckpointException):
        dcp.load(state, storage_reader=StorageReader(tmp_path / "root"))
    assert not state["x"].any()
    # The exception of torch 2.10 does not have the reason.
    told = [record.getMessage() for record in caplog.records if record.name.startswith("holdfast.adapters")]
    assert ["differs from its seal" in line for line in told] == [True], told
    # The slot in memory is whole: with the writer it is what is read.
    dcp.load(state, storage_reader=StorageReader(writer))
    assert torch.equal(state["x"], torch.ones(1 << 16))


@pytest.mark.slow
def test_an_empty_root_has_nothing_to_load(writer: StorageWriter, tmp_path: Path) -> None:
    assert StorageReader(writer).find() is None
    with pytest.raises(VersionNotFound):
        StorageReader(tmp_path / "root").read_metadata()


def test_switched_off_pytorchs_own_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DISABLE", "1")
    writer, reader = StorageWriter(tmp_path), StorageReader(tmp_path)
    assert reader.find() is None
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["x"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.slow
def test_what_cannot_be_kept_in_memory_is_told(tmp_path: Path, runtime_dir: Path) -> None:
    writer = StorageWriter(tmp_path, config=load({"memory_budget": "1MiB"}))
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"x": torch.ones(1 << 20)}, storage_writer=writer)
    assert isinstance(caught.value.failures[0][0], LevelNotReached)
    writer.close()
    with pytest.raises(UsageError, match="closed"):
        writer.job.next_version(None)


class _Looks(dcp.DefaultLoadPlanner):
    """Looks at what is loaded, and has PyTorch load it."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)


def test_opaque_bytes_are_given_to_nobody_who_did_not_ask() -> None:
    """PyTorch's planner unpickles them, and whoever made the version chose them."""
    values = object.__new__(_Values)
    values._trees = {"x": {items.OPAQUE: b"a pickle"}}
    for planner, opaque in ((dcp.DefaultLoadPlanner(), False), (dcp.DefaultLoadPlanner(), True), (_Looks(), False)):
        with pytest.raises(UsageError, match="would unpickle them"):
            values.stream("x", planner, opaque=opaque)
    assert values.stream("x", _Looks(), opaque=True).read() == b"a pickle"
