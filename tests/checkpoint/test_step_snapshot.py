"""Notes of a rank's small state: two newest, whole or not at all, within their share of the time; and when state is live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.entries.types import SavedTensor
from holdfast.checkpoint.state.step_observer import Steps
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.survivors import step_snapshot, survivor_state
from holdfast.checkpoint.survivors.step_snapshot import SnapshotPage, SnapshotWriter
from holdfast.checkpoint.survivors.survivor_state import Survivor, notes_of
from holdfast.core.model import Version
from holdfast.tiers.backends.own_descriptor import OwnDescriptor


@pytest.fixture
def page() -> Iterator[SnapshotPage]:
    fd = step_snapshot.make_page()
    step_snapshot.attach(fd)
    yield SnapshotPage(OwnDescriptor.of(fd))
    step_snapshot.attach(-1)
    survivor_state.remains.forget()


class Job:
    """One rank with a model, an optimizer and a position."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = State({"model": self.model, "optimizer": self.optimizer}, rank=0, world_size=1)
        self.survivor = Survivor(self.state, job="job", rank=0, world_size=1)

    def step(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def left(self) -> Version | None:
        self.survivor.leave()
        return survivor_state.remains.version


def version(step: int) -> Version:
    return Version(1, step)


def test_the_two_newest_notes_are_there_and_nobody_elses(page: SnapshotPage) -> None:
    job = Job()
    for step in range(4):
        job.step()
        job.survivor.note(version(step))
    found = notes_of("job", 0, 1)
    assert set(found) == {version(2), version(3)}
    assert notes_of("another", 0, 1) == notes_of("job", 1, 1) == notes_of("job", 0, 2) == {}
    assert {row.shard.name for row in found[version(3)].tensors() if row.late} >= {"model.weight", "model.bias"}
    assert set(found[version(3)].small) == {n for n in found[version(3)].small if n.startswith("rng")}
    assert any("optimizer.param_groups" in group for group in found[version(3)].decoded().values())


def test_a_note_that_was_torn_is_none_and_the_one_before_stays(page: SnapshotPage) -> None:
    noter = SnapshotWriter(page, job="job", rank=0, world_size=1)
    job = Job()
    for step in range(2):
        assert noter.write(version(step), job.state.gather())
    fd = page._fd
    half = os.fstat(fd).st_size // 2
    at = half + 200
    byte = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte[0] ^ 1]), at)
    assert set(page.read()) == {version(0)}


def test_notes_that_cost_too_much_are_left_out(page: SnapshotPage, monkeypatch: pytest.MonkeyPatch) -> None:
    noter = SnapshotWriter(page, job="job", rank=0, world_size=1)
    assert noter.affordable()
    monkeypatch.setattr(step_snapshot, "CREDIT_S", 0.0)
    assert noter.write(version(0), Job().state.gather())
    assert not noter.affordable()


def test_state_that_is_too_large_is_refused_with_its_size(page: SnapshotPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_snapshot, "MAX_BYTES", 100)
    noter = SnapshotWriter(page, job="job", rank=0, world_size=1)
    assert not noter.write(version(0), Job().state.gather())
    assert "bytes of state belong to no optimizer, at most 100" in noter.refused
    assert page.read() == {}


def test_gradients_that_are_added_up_do_not_count_as_state_that_is_too_large(
    page: SnapshotPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    small = sum(live.local.nbytes for live in job.state.gather().tensors.values() if not live.late)
    monkeypatch.setattr(step_snapshot, "MAX_BYTES", small)
    job.step()
    job.survivor.note(version(0))
    job.model(torch.ones(1, 3)).sum().backward()
    job.state.gradients.note()
    job.survivor.note(version(1))
    assert any(name.startswith("gradients") for name in page.read()[version(1)].small)


def test_between_two_optimizer_steps_the_state_is_live_and_nobody_can_write_to_it(page: SnapshotPage) -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    job.model(torch.ones(1, 3)).sum().backward()
    assert job.left() == version(0)
    before = job.model.weight.detach().clone()
    with torch.no_grad():
        job.model.weight.zero_()  # as a new DDP wrapper does with what its first rank has
    assert torch.equal(survivor_state.remains.late["model.weight"], before)


def test_inside_and_after_the_next_optimizer_step_nothing_is_live(page: SnapshotPage) -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    job.optimizer.register_step_pre_hook(lambda *_: {}["nothing"])
    with pytest.raises(KeyError):
        job.optimizer.step()
    assert job.left() is None
    assert "inside the optimizer step" in survivor_state.remains.why
    job = Job()
    job.step()
    job.survivor.note(version(0))
    job.step()
    assert job.left() is None
    assert "went on" in survivor_state.remains.why


def test_parameters_that_somebody_wrote_to_are_not_live(page: SnapshotPage) -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    with torch.no_grad():
        job.model.weight.clamp_(-1, 1)
    assert job.left() is None
    assert "outside of an optimizer step" in survivor_state.remains.why


def test_state_that_was_put_elsewhere_is_not_live(page: SnapshotPage) -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    job.step()
    state = job.optimizer.state[job.model.weight]
    state["exp_avg"] = state["exp_avg"].clone()
    job.survivor.note(version(1))
    assert job.left() is None
    assert "other tensors" in survivor_state.remains.why


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_a_step_whose_gradients_live_is_noted_with_them_or_not_at_all(
    page: SnapshotPage, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(step_snapshot, "GRADIENT_BYTES", most)
    job = Job()
    steps = Steps([job.optimizer], after=job.state.stepped)
    for step in range(3):  # the third one leaves gradients behind its optimizer's step
        job.step()
        if step == 2:
            job.model(torch.ones(1, 3)).sum().backward()
        job.state.gradients.note()
        job.survivor.note(version(step))
    steps.close()
    found = notes_of("job", 0, 1)
    assert job.left() == (version(2) if most else None)
    assert (version(2) in found) == bool(most)
    assert not any("gradients" in name for name in found[version(1)].small)
    if most:
        assert sum("gradients" in name for name in found[version(2)].small) == 2


def test_what_is_written_at_a_step_that_is_not_noted_is_not_live_as_that_of_the_note_before(
    page: SnapshotPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an accumulation whose gradients are too large to be noted a script writes parameters by hand."""
    monkeypatch.setattr(step_snapshot, "GRADIENT_BYTES", 0)
    job = Job()
    for step in range(2):
        if step == 0:
            job.optimizer.step()
        else:
            job.model(torch.ones(1, 3)).sum().backward()
            job.model.weight.data.mul_(0.5)
        job.state.gradients.note()
        job.survivor.note(version(step))
    assert set(notes_of("job", 0, 1)) == {version(0)}
    assert job.left() is None


def test_notes_within_an_accumulation_can_be_loaded(page: SnapshotPage) -> None:
    """Gradients come and go, and nothing else changes."""
    job = Job()
    steps = Steps([job.optimizer], after=job.state.stepped)
    for step in range(6):
        job.model(torch.ones(1, 3)).sum().backward()
        if step % 2 == 1:
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.state.gradients.note()
        job.survivor.note(version(step))
    steps.close()
    found = notes_of("job", 0, 1)
    assert found.keys() == {version(4), version(5)}
    for step, note in found.items():
        rows = note.tensors()
        saved = {
            row.shard.name: SavedTensor(row.shard.dtype, row.shard.global_shape, (row.shard.extent,)) for row in rows
        }
        assert any("gradients" in name for name in saved) == (step == version(4))
        job.state.fitting(saved, note.decoded())
    assert job.left() == version(5)


def test_while_a_restore_writes_nothing_is_live(page: SnapshotPage) -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    job.survivor.moved()
    assert job.left() is None
    assert survivor_state.remains.late == {}


def test_without_a_launcher_nothing_is_noted_and_nothing_kept() -> None:
    job = Job()
    job.step()
    job.survivor.note(version(0))
    assert job.left() is None
    assert not job.optimizer._optimizer_step_pre_hooks


def test_notes_go_to_no_file_that_has_the_pages_number(tmp_path: Path) -> None:
    """The script closed all descriptors, and opened its own."""
    own = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    os.write(own, b"theirs")
    fd = step_snapshot.make_page()
    step_snapshot.attach(fd)
    try:
        job = Job()
        job.step()
        job.survivor.note(version(0))
        assert set(notes_of("job", 0, 1)) == {version(0)}
        os.dup2(own, fd)
        job.step()
        job.survivor.note(version(1))
        assert (notes_of("job", 0, 1), step_snapshot.page()) == ({}, None)
        step_snapshot.attach(-1)
        assert os.pread(fd, 100, 0) == b"theirs"
    finally:
        step_snapshot.attach(-1)
        survivor_state.remains.forget()
        os.close(own)
        os.close(fd)
