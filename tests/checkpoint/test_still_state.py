"""What does not change from version to version is stored twice, whoever freezes it, and every version is whole without the others."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from holdfast.base.events import Events
from holdfast.core.layout.bundles import kind_of
from holdfast.core.model import Version
from holdfast.tiers.storage.version_store import open_storage
from kit.adapted_model import BASE_BYTES, Tuning
from kit.checkpointers import Make, kill_keeper
from sample_kit import sampled


class Job:
    """A Checkpointer of one process, and what its keeper stored with each version."""

    def __init__(self, make: Make) -> None:
        self.tuning = Tuning()
        self.checkpointer = make(self.tuning)  # type: ignore[arg-type]
        self.start = self.checkpointer.restore()
        self.step = self.start

    def save(self) -> tuple[int, int]:
        """Trains a step and makes it durable; returns the bytes that were written and those that were linked for it."""
        before = self.counters()
        self.tuning.train()
        self.checkpointer.save(self.step, level="durable").wait("durable", 60)
        self.step += 1
        after = self.counters()
        return after[0] - before[0], after[1] - before[1]

    def counters(self) -> tuple[int, int]:
        counters = self.checkpointer.keeper_status()["counters"]
        return int(counters.get("storage_written_bytes", 0)), int(counters.get("storage_linked_bytes", 0))


def loads_alone(directory: Path, expected: dict[str, torch.Tensor]) -> bool:
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it reads in one process
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_frozen_base_and_an_average_at_rest_are_stored_twice_and_each_version_stands_alone(
    make: Make, tmp_path: Path
) -> None:
    job, states, stored = Job(make), [], []
    for step in range(5):
        stored.append(job.save())
        states.append(job.tuning.tensors())
        shutil.copytree(tmp_path / "job" / str(Version(1, step)), tmp_path / f"alone-{step}")
    for written, linked in stored[:2]:
        assert (written > 2 * BASE_BYTES, linked) == (True, 0)
    for written, linked in stored[2:]:
        assert written < BASE_BYTES / 4, "the adapter with its moments, and values"
        assert 2 * BASE_BYTES <= linked < 2.1 * BASE_BYTES
    for step, state in enumerate(states):
        assert loads_alone(tmp_path / f"alone-{step}", state)
    kill_keeper(job.checkpointer)
    job.checkpointer.abandon()
    for step in range(4):
        shutil.rmtree(tmp_path / "job" / str(Version(1, step)), ignore_errors=True)
    again = Job(make)
    assert again.start == 5
    assert all(torch.equal(again.tuning.tensors()[name], tensor) for name, tensor in states[-1].items())


@pytest.mark.parametrize("how", sampled(["data", "version", "pointer"], "data"))
def test_one_bit_more_is_stored_whatever_wrote_it(make: Make, tmp_path: Path, how: str) -> None:
    """No counter of torch's is believed: what goes by `.data` or by address moves none."""
    job = Job(make)
    job.save()
    job.save()
    assert job.save()[1] >= 2 * BASE_BYTES
    weight = job.tuning.model.base.weight
    if how == "data":
        weight.data[5, 7] += 1
    elif how == "version":
        with torch.no_grad():
            weight[5, 7] += 1
    else:
        weight.detach().numpy()[5, 7] += 1
    changed = job.tuning.tensors()
    written, linked = job.save()
    assert written >= BASE_BYTES
    assert linked < 1.1 * BASE_BYTES, "the average alone"
    changed |= {name: tensor for name, tensor in job.tuning.tensors().items() if name != "model.base.weight"}
    assert loads_alone(tmp_path / "job" / str(Version(1, 3)), changed)
    job.save()
    assert job.save()[0] < BASE_BYTES / 4


def test_an_average_that_moves_again_drags_no_frozen_base_along(make: Make, tmp_path: Path) -> None:
    job = Job(make)
    job.save()
    job.save()
    for moves, is_written in ((False, False), (True, True), (True, True), (False, True), (False, False)):
        if moves:
            job.tuning.average.update_parameters(torch.nn.Linear(768, 1024, bias=False))
        written, linked = job.save()
        assert (written >= BASE_BYTES) is is_written
        assert linked >= BASE_BYTES, "the base"
    assert loads_alone(tmp_path / "job" / str(Version(1, job.step - 1)), job.tuning.tensors())


def test_a_model_without_such_tensors_has_the_layout_of_older_releases(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(768, 1024)
    checkpointer = make(None, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer.restore()
    checkpointer.save(0, level="durable").wait("durable", 60)
    bundles = open_storage(tmp_path / "job", Events()).manifest(Version(1, 0)).bundles
    assert {kind_of(file.ref.bundle_id) for file in bundles} == {""}


def test_thawed_in_mid_run_the_bundles_stay_and_all_is_saved(make: Make, tmp_path: Path) -> None:
    """Whoever freezes and thaws by turns would have the job planned anew with every save."""
    job = Job(make)
    job.save()
    job.tuning.model.base.requires_grad_(True)
    job.tuning.optimizer.add_param_group({"params": [job.tuning.model.base.weight]})
    for _ in range(2):
        written, _ = job.save()
        assert written >= 3 * BASE_BYTES, "the weight and its two moments"
    names = {
        (kind_of(file.ref.bundle_id) != "", file.ref.num_bytes >= BASE_BYTES)
        for file in open_storage(tmp_path / "job", Events()).manifest(Version(1, 2)).bundles
    }
    assert (True, True) in names
    job.checkpointer.abandon()
    again = Tuning()  # frozen at its first look too, and thawed after it
    checkpointer = make(again)  # type: ignore[arg-type]
    again.model.base.requires_grad_(True)
    again.optimizer.add_param_group({"params": [again.model.base.weight]})
    assert checkpointer.restore() == 3
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in job.tuning.tensors().items())
