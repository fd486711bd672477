"""A job without a level in memory: too little memory, or no keeper. It saves to storage alone, says so, or refuses."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import holdfast
from holdfast.base import program
from holdfast.base.errors import KeeperNotStarted, LevelNotReached, MemoryRefused
from holdfast.base.events import Events
from holdfast.checkpoint.save.storage_only_schedule import MeetingSchedule
from holdfast.cli import status as status_tool
from holdfast.core.model import Level, Version
from holdfast.core.scheduling import storage_only_steps
from holdfast.keeper.observe import degraded_notice
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import wait_ended
from kit.checkpointers import Make, Trainee
from sample_kit import MORE

NO_MEMORY = {"memory_budget": "100KB"}


def versions(path: Path) -> list[Version]:
    return open_storage(path, Events()).versions()


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keepers end while they start; the returned function repairs that."""
    monkeypatch.setattr(program, "sys", SimpleNamespace(executable="/bin/false"))
    return monkeypatch.undo


def test_too_little_memory_leaves_durable_saves_and_everybody_is_told(
    make: Make,
    tmp_path: Path,
    runtime_dir: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, **NO_MEMORY)
    with caplog.at_level(logging.ERROR):
        assert checkpointer.restore() == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "no level in memory" in line
    assert "of 100000 allowed" in line, "with the numbers of the refusal"
    trainee.train()
    captured = checkpointer.save(0)
    assert captured.reached is Level.NONE
    with pytest.raises(LevelNotReached, match="only durable saves are made"):
        captured.wait()
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    handle = checkpointer.save(1, "durable")
    assert handle.reached is Level.DURABLE, "when the call returns"
    assert versions(tmp_path / "job") == [Version(1, 1)]
    kept = trainee.fingerprint()
    with pytest.raises(LevelNotReached):
        handle.wait("replicated")

    status_tool.status(runtime_dir=str(runtime_dir), watch_s=None, as_json=True)
    (told,) = json.loads(capsys.readouterr().out)["durable_only"]
    assert told["durable"] == str(Version(1, 1))
    assert "of 100000 allowed" in told["reason"]
    status_tool.status(runtime_dir=str(runtime_dir), watch_s=None, as_json=False)
    assert "DURABLE-ONLY" in capsys.readouterr().out
    assert not wait_ended([keeper]), "its memory is needed more elsewhere"

    trainee.train()
    checkpointer.step(2)
    checkpointer.close()
    assert versions(tmp_path / "job")[-1] == Version(1, 2), "the last step is durable"
    assert not list(degraded_notice.posted(runtime_dir))
    other = Trainee()
    again = make(other, **NO_MEMORY)
    assert again.restore("i000001-s0000000001") == 2
    assert other.fingerprint() == kept
    assert again.last_restore is not None
    assert set(again.last_restore.bytes) == {"storage"}


def test_without_a_keeper_training_goes_on_and_the_level_returns_with_one(
    make: Make,
    tmp_path: Path,
    no_keeper: Callable[[], None],
) -> None:
    trainee, told = Trainee(), []
    checkpointer = make(trainee, durable_every=2, on_durable=lambda version, error: told.append((version, error)))
    assert checkpointer.restore() == 0
    states = []
    for step in range(4):
        trainee.train()
        states.append(trainee.fingerprint())
        checkpointer.step(step)
    checkpointer.flush(60)
    assert versions(tmp_path / "job") == [Version(1, 1), Version(1, 3)]
    assert [version for version, error in told if error is None] == [Version(1, 1), Version(1, 3)]
    trainee.train()

    assert checkpointer.restore() == 4, "straight from storage"
    assert trainee.fingerprint() == states[3]
    for step in range(4, 8):
        trainee.train()
        checkpointer.step(step)
    assert versions(tmp_path / "job") == [Version(2, 5), Version(2, 7)], "retention works without a keeper, too"

    no_keeper()
    assert checkpointer.restore() == 8
    trainee.train()
    assert checkpointer.save(8).wait(timeout_s=60) is Level.CAPTURED
    checkpointer.close()
    assert versions(tmp_path / "job")[-1] == Version(3, 8)


def test_who_requires_the_level_in_memory_is_refused(make: Make, no_keeper: Callable[[], None]) -> None:
    with pytest.raises(KeeperNotStarted, match="ended while it started"):
        make(Trainee(), require_memory=True).restore()
    no_keeper()
    with pytest.raises(MemoryRefused, match="of 100000 allowed"):
        make(Trainee(), require_memory=True, **NO_MEMORY).restore()


def test_storage_that_refuses_costs_the_version_and_nothing_else(make: Make, tmp_path: Path) -> None:
    trainee = Trainee()
    checkpointer = make(trainee, **NO_MEMORY)
    checkpointer.restore()
    (tmp_path / "job" / ".tmp").rename(tmp_path / "elsewhere")
    (tmp_path / "job" / ".tmp").write_text("in the way")
    trainee.train()
    handle = checkpointer.save(0, "durable")
    assert handle.given_up
    assert handle.reached is Level.NONE
    with pytest.raises(LevelNotReached, match="i000001-s0000000000"):
        checkpointer.flush(60)
    (tmp_path / "job" / ".tmp").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "job" / ".tmp")
    checkpointer.close()
    assert versions(tmp_path / "job") == [Version(1, 0)], "the last step is tried again at the end"


def test_what_cannot_be_saved_is_refused_before_training(make: Make) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"thing": object()}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with pytest.raises(holdfast.HoldfastError, match="thing"):
        make(Trainee(), odd=Odd(), **NO_MEMORY).restore()


# --- meetings


class Room:
    """A collective among threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.rows: dict[int, bytes] = {}
        self.meetings = 0

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)


class Seat:
    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.world_size = room, rank, room.world_size

    def gather(self, data: bytes) -> list[bytes]:
        self.room.rows[self.rank] = data
        self.room.barrier.wait()
        rows = [self.room.rows[rank] for rank in range(self.world_size)]
        self.room.meetings += self.rank == 0
        self.room.barrier.wait()
        return rows


def run_ranks(cadence: str, *, step_s: float, steps: int, stop: tuple[int, int] | None = None) -> tuple[Room, list]:
    """Steps at which each rank saves, and where it stops. Clocks differ from rank to rank."""
    room = Room(3)
    config = holdfast.Config(durable_every=cadence)

    def rank_of(rank: int) -> tuple[list[int], int | None]:
        now = [1000.0 * rank]
        schedule = MeetingSchedule(config, room.seat(rank), "root", clock=lambda: now[0])
        saved: list[int] = []
        for step in range(steps):
            now[0] += step_s * (1 + 0.1 * rank)
            due = schedule.after(step, stop_wanted=stop is not None and rank == stop[0] and step >= stop[1])
            if due.save:
                saved.append(step)
                schedule.saved(step, durable=True)
            if due.stop:
                return saved, step
        return saved, None

    with ThreadPoolExecutor(3) as pool:
        return room, list(pool.map(rank_of, range(3)))


@pytest.mark.parametrize("step_s", [0.01, 0.3, 7.0])
def test_a_cadence_in_seconds_is_kept_by_all_ranks_at_the_same_steps(step_s: float) -> None:
    steps = int(400 / step_s) if step_s < 1 else 60
    room, ranks = run_ranks("20s", step_s=step_s, steps=steps)
    assert ranks[0] == ranks[1] == ranks[2]
    saved = ranks[0][0]
    gaps = [(b - a) * step_s for a, b in zip([-1, *saved], saved, strict=False)]
    assert len(saved) >= 0.8 * steps * step_s / 20 - 1
    assert all(20 <= gap + 1e-6 < 20 + storage_only_steps.MAX_GAP_S + step_s for gap in gaps), gaps
    assert room.meetings <= 8 + 2 * steps * step_s / storage_only_steps.MAX_GAP_S or step_s > 1, "a collective is rare"


def test_a_stop_on_any_rank_stops_all_after_the_same_step_and_soon() -> None:
    _, ranks = run_ranks("0", step_s=0.1, steps=2000, stop=(2, 700))
    ends = {end for _, end in ranks}
    assert len(ends) == 1
    (end,) = ends
    assert end is not None
    assert 700 <= end <= 700 + storage_only_steps.MAX_GAP_S / 0.1 * 1.2
    assert [saved for saved, _ in ranks] == [[end]] * 3, "the last state is saved"


def test_a_cadence_in_steps_needs_no_meeting_of_its_own() -> None:
    _, ranks = run_ranks("25", step_s=0.5, steps=101)
    assert ranks == [([24, 49, 74, 99], None)] * 3


@MORE
def test_a_bundle_is_written_from_tensors_of_any_strides(make: Make, tmp_path: Path) -> None:
    model = torch.nn.Linear(33, 17)
    with torch.no_grad():
        model.weight = torch.nn.Parameter(torch.randn(33, 17).t())
    before = model.weight.detach().clone()
    first = make(None, model=model, **NO_MEMORY)
    first.restore()
    first.save(0, "durable").wait()
    first.close()
    with torch.no_grad():
        model.weight.zero_()
    make(None, model=model, **NO_MEMORY).restore()
    assert torch.equal(model.weight, before)


def test_the_note_of_a_killed_process_means_nothing_and_goes(make: Make, runtime_dir: Path) -> None:
    checkpointer = make(Trainee(), **NO_MEMORY)
    checkpointer.restore()
    (told,) = degraded_notice.posted(runtime_dir)
    said = json.loads(told.place.notice.read_text())
    told.place.notice.write_text(json.dumps(said | {"since": said["since"] - 1}))
    assert not list(degraded_notice.posted(runtime_dir))
    degraded_notice.sweep(told.place)
    assert not told.place.notice.exists()


def test_a_keeper_that_writes_the_same_version_late_replaces_no_part_of_it(make: Make, tmp_path: Path) -> None:
    """It was slow when the ranks went on with storage alone, and wrote its part of the version when that was committed."""
    checkpointer = make(Trainee(), **NO_MEMORY)
    checkpointer.restore()
    assert checkpointer.save(1, "durable").reached is Level.DURABLE
    store = open_storage(tmp_path / "job", Events())
    before = store.manifest(Version(1, 1))
    store.write_part(Version(1, 1), 0, [], stamp=make_stamp(1))
    assert store.manifest(Version(1, 1)) == before
    for file in before.bundles:
        store.bundles.verify(Version(1, 1), file)
