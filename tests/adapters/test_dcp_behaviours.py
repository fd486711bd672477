"""What users of `torch.distributed.checkpoint` rely on, with our writer and reader: in words of ours what PyTorch's own tests try out."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from doors_kit import SOURCE
from holdfast.adapters.dcp import StorageReader, StorageWriter
from holdfast.adapters.dcp.items import Note, Notes
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries.types import Group

WORKER = Path(__file__).with_name("dcp_behaviours_worker.py")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


@pytest.fixture
def writer(tmp_path: Path, runtime_dir: Path) -> Iterator[StorageWriter]:
    with_writer = StorageWriter(tmp_path / "root")
    yield with_writer
    with_writer.close()


class Noting(dict[str, Any]):
    """A state dict that notes what is put into it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.put: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.put.append(name)
        super().__setitem__(name, value)


class Empty:
    """Has a state, and nothing in it."""

    def __init__(self) -> None:
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}
        self.loaded += 1


def test_objects_with_a_state_are_loaded_and_stay_and_plain_entries_are_put_back(writer: StorageWriter) -> None:
    empty, tensor = Empty(), torch.arange(5.0)
    state = Noting(empty=empty, plain={"tensor": tensor, "numbers": [1, 2]})
    dcp.save(state, storage_writer=writer)
    tensor.zero_()
    inner = state["plain"]
    inner["numbers"] = [0]
    dcp.load(state, storage_reader=StorageReader(writer))
    assert empty.loaded == 1
    assert state["empty"] is empty
    assert state.put == ["plain"]
    assert inner["tensor"] is tensor, "tensors are filled in place"
    assert torch.equal(tensor, torch.arange(5.0))
    assert state["plain"]["numbers"] == [1, 2]


def test_nothing_at_all_is_saved_and_loaded(writer: StorageWriter) -> None:
    dcp.save({}, storage_writer=writer)
    state: dict[str, Any] = {}
    dcp.load(state, storage_reader=StorageReader(writer))
    assert state == {}


def test_a_stream_of_bytes_comes_back_where_it_stood(writer: StorageWriter) -> None:
    stream = io.BytesIO(b"losses of a run")
    stream.seek(7)
    dcp.save({"losses": stream}, storage_writer=writer)
    for source in (writer, writer.root):
        state = {"losses": io.BytesIO()}
        dcp.load(state, storage_reader=StorageReader(source))
        assert state["losses"].read() == b"of a run"
        assert state["losses"].getvalue() == b"losses of a run"


def test_a_writer_is_not_sent_to_another_process(writer: StorageWriter) -> None:
    """As `async_save` would with `AsyncCheckpointerType.PROCESS`."""
    with pytest.raises(UsageError, match="leave async_checkpointer_type"):
        pickle.dumps(writer)


def whole(*names: str) -> Notes:
    """What a rank notes that has all of these sharded tensors, as other ranks may too."""
    return tuple(Note(name, "shard", "F32", (4,), (0,), (4,)) for name in names)


def test_cached_plan_is_recognised_and_shared_changes_are_refused(writer: StorageWriter) -> None:
    """The coordinator's part: a planner that has a plan in its cache sends none."""

    def holders(*ranks: Notes | None) -> list[dict[str, Group] | None]:
        plans = [SavePlan([], usable=False) if rows is None else SavePlan([], storage_data=rows) for rows in ranks]
        planned = writer.prepare_global_plan(plans)
        return [{note.fqn: note.holders for note in plan.storage_data} if plan.usable else None for plan in planned]

    assert holders(whole("a"), whole("a")) == [{"a": (0, 1)}, {"a": (0, 1)}]
    assert holders(None, None) == [None, None]
    assert holders(None, whole("a", "new")) == [None, {"a": (0, 1), "new": (1,)}]
    with pytest.raises(UsageError, match=r"what ranks \[0\] share has changed"):
        holders(None, whole("new"))
    assert holders(whole("a"), whole("new")) == [{"a": (0,)}, {"new": (1,)}]


def test_an_old_plan_is_not_written_for_what_a_rank_has_now(writer: StorageWriter) -> None:
    """As the planner's cache hands it out when the plan of the whole job looks the same."""

    def plan(**state: torch.Tensor) -> tuple[SavePlan, dcp.DefaultSavePlanner]:
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        return writer.prepare_local_plan(planner.create_local_plan()), planner

    writer.reset()
    writer.set_up_storage_writer(True)
    before, _ = plan(old=torch.zeros(3))
    (before,) = writer.prepare_global_plan([before])
    _, planner = plan(new=torch.zeros(3))
    with pytest.raises(UsageError, match="the planner gave it its old plan"):
        writer.write_data(before, planner)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_four_ranks(tmp_path: Path, runtime_dir: Path) -> None:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    told = subprocess.run(
        [*launcher, str(WORKER), str(tmp_path / "root")],
        capture_output=True, text=True, timeout=300, env={**os.environ, **SOURCE, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-4000:]
    assert re.findall(r"^seen (\w+)", told.stdout, re.M) == re.findall(
        r"^@behaviour\ndef (\w+)", WORKER.read_text(), re.M
    )
