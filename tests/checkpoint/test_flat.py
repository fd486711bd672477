"""Save after save nothing grows: memory, descriptors and threads of trainer and keeper, files in storage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from holdfast.core.model import Level
from kit.checkpointers import Make, Trainee

# Versions whose level is remembered are bounded (64 and 128 of them): beyond these nothing may grow.
REMEMBERED = 140
GROWTH_BYTES = 4 << 20
# The keeper may be at work on the last version when it is looked at. Less than one for every save.
IN_PASSING = 4


@dataclass(frozen=True)
class Size:
    """Of one process."""

    resident: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Size:
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


@pytest.mark.parametrize(
    ("warm_up", "saves"),
    [(15, 25), pytest.param(REMEMBERED, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(550)])],
)
def test_nothing_grows_from_save_to_save(make: Make, tmp_path: Path, warm_up: int, saves: int) -> None:
    trainee = Trainee()
    checkpointer = make(trainee)
    checkpointer.restore()
    processes = [psutil.Process(), psutil.Process(checkpointer.keeper_status()["pid"])]

    def save(step: int) -> None:
        trainee.train(1)
        handle = checkpointer.save(step, "durable" if step % 10 == 9 else "captured")
        assert handle.wait(timeout_s=60) >= Level.CAPTURED

    for step in range(warm_up):
        save(step)
    before = [Size.of(process) for process in processes]
    for step in range(warm_up, warm_up + saves):
        save(step)
    after = [Size.of(process) for process in processes]

    for process, old, new in zip(("trainer", "keeper"), before, after, strict=True):
        assert new.resident - old.resident < GROWTH_BYTES, f"{process}: {old} -> {new}"
        assert new.descriptors <= old.descriptors + IN_PASSING, f"{process}: {old} -> {new}"
        assert new.threads <= old.threads + IN_PASSING, f"{process}: {old} -> {new}"
    versions = [path.name for path in (tmp_path / "job").glob("i*-s*")]
    assert len(versions) <= 4, f"two are kept, one may be on its way in and one on its way out: {versions}"
    assert checkpointer.keeper_status()["memory"]["used_bytes"] <= 4 << 20
