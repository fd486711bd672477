"""Waits that no longer come: an evaluation, fewer micro-batches, a schedule that makes no steps, a job that broke off."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.events import Events
from holdfast.checkpoint.capture.copy_plan import Batch
from holdfast.checkpoint.capture.optimizer_fence import Fence, LateCopyJob
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.pipeline.copy_gate import Gate
from holdfast.cli.timeline import read
from kit.schedules import nothing, schedule_of

WORKER = str(Path(__file__).with_name("stay_worker.py"))


@pytest.fixture
def bubbles() -> Iterator[Bubbles]:
    made = Bubbles(schedule_of(nn.Identity()), Events())
    made.attach()
    yield made
    made.detach()


def expected(bubbles: Bubbles) -> int:
    return len(bubbles._waits.windows())


def test_waits_that_the_last_step_did_not_have_are_not_expected(bubbles: Bubbles) -> None:
    step = bubbles._schedule.step
    for _ in range(50):
        step(6)
    assert expected(bubbles) == 6
    step(2)
    step(2)
    assert expected(bubbles) == 2, "fewer micro-batches"
    step(0)
    step(0)
    assert not bubbles.has_waits


def test_an_evaluation_is_no_step(bubbles: Bubbles) -> None:
    schedule = bubbles._schedule
    for _ in range(3):
        schedule.step(6)
    schedule.eval(2)
    assert (bubbles.profile().num_steps, expected(bubbles)) == (3, 6)
    assert sum(seen.what == "wait" for seen in bubbles.spans) == 18


def test_a_schedule_that_makes_no_steps_holds_no_copy_back(bubbles: Bubbles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy begins at once, beside the work, as without a pipeline; not a second later, and not at the fence."""
    monkeypatch.setattr("holdfast.checkpoint.capture.optimizer_fence.UNTOLD_S", 60.0)
    monkeypatch.setattr("holdfast.checkpoint.pipeline.copy_gate.PATIENCE_S", 60.0)
    fence, source = Fence(timeout_s=5.0, events=Events()), torch.ones(1000)
    fence.pace, bubbles.on_wait = bubbles, fence.nudge

    def job() -> LateCopyJob:
        return LateCopyJob([Batch([torch.zeros(1000)], [source], source.nbytes)], None, nothing)

    try:
        for _ in range(2):
            bubbles._schedule.step(6)
        kept = job()
        fence.begin()
        fence.start(kept)
        assert not kept.done.wait(0.1), "a step may come, with waits"
        fence.release()
        stale = job()
        fence.begin()
        fence.start(stale)
        assert stale.done.wait(60)
        assert [seen.what for seen in bubbles.spans if seen.what.startswith("copy")] == ["copy beside"] * 2
        fence.release()
        fence.begin()
        assert bubbles.left_cost > 0, "and the cadence knows"
    finally:
        fence.close()


def test_a_turn_is_waited_for_as_long_as_two_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that computes for seconds before its first wait is not one that nobody steers."""
    monkeypatch.setattr("holdfast.checkpoint.pipeline.copy_gate.PATIENCE_S", 0.0)
    gate, said = Gate(), []
    gate.period_s = 60.0
    thread = threading.Thread(target=lambda: said.append(gate.turn(0.01)), daemon=True)
    thread.start()
    thread.join(0.2)
    assert not said
    gate.open(None)
    thread.join(30)
    assert said == [True]


def test_after_an_interruption_the_schedule_is_looked_for_again(
    tmp_path: Path, make: Callable[..., holdfast.Checkpointer]
) -> None:
    """The script builds it anew, as its groups are gone; the checkpointer stays, and so does its track."""
    model = nn.Linear(4, 4)
    checkpointer = make(trace_dir=tmp_path / "trace", model=model)
    schedule = schedule_of(model)
    checkpointer.restore()
    first = checkpointer.bubbles
    assert first is not None
    assert first._schedule is schedule
    checkpointer.interrupted()
    assert "step" not in vars(schedule), "nothing is left in it"
    del first, schedule
    gc.collect()
    schedule = schedule_of(model)
    start = checkpointer.restore()
    assert checkpointer.bubbles is not None
    assert checkpointer.bubbles._schedule is schedule
    for step in range(start, start + 2):
        schedule.step(3)
        checkpointer.step(step)
    checkpointer.close()
    assert "step" not in vars(schedule)
    (whats,) = ([span.what for span in track.spans] for track in read([tmp_path / "trace"]) if track.name == "rank 0")
    assert (whats.count("wait"), whats.count("step"), whats.count("saved")) == (6, 2, 2), "each is told once"


def test_a_schedule_that_was_named_is_used_again(make: Callable[..., holdfast.Checkpointer]) -> None:
    model = nn.Linear(4, 4)
    schedule, other = schedule_of(model), schedule_of(model)
    checkpointer = make(model=model, schedule=schedule)
    checkpointer.restore()
    checkpointer.interrupted()
    checkpointer.restore()
    assert checkpointer.bubbles is not None
    assert checkpointer.bubbles._schedule is schedule
    assert "step" in vars(schedule)
    assert "step" not in vars(other)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., holdfast.Checkpointer]]:
    made: list[holdfast.Checkpointer] = []

    def make(*, model: nn.Module, trace_dir: Path | None = None, **more: Any) -> holdfast.Checkpointer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = holdfast.Config(runtime_dir=str(tmp_path / "rt"), trace_dir=str(trace_dir or ""))
        made.append(holdfast.Checkpointer(tmp_path / "ckpt", model=model, optimizer=optimizer, config=config, **more))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.slow
def test_a_stage_that_stays_copies_in_the_waits_of_the_schedule_that_it_builds_anew(
    tmp_path: Path, runtime_dir: Path
) -> None:
    """Rank 1 is killed; rank 0 keeps its process, and both end bit for bit where an undisturbed run ends."""
    told = {}
    for name, kill_at in (("undisturbed", -1), ("killed", 7)):
        out = tmp_path / name
        out.mkdir()
        command = [
            sys.executable,
            "-m",
            "holdfast.elastic.launch.run_command",
            "--standalone",
            "--nproc-per-node=2",
            WORKER,
        ]
        done = subprocess.run(
            [*command, str(out), str(kill_at)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told[name] = {
            rank: sorted((json.loads(file.read_text()) for file in out.glob(f"{rank}-*.json")), key=itemgetter("start"))
            for rank in range(2)
        }
    for rank in range(2):
        (undisturbed,), (_, last) = told["undisturbed"][rank], told["killed"][rank]
        assert last["start"] in (7, 8), "no step more than the one that was under way"
        assert (last["step"], last["weights"]) == (undisturbed["step"], undisturbed["weights"])
        copies = copies_since(out / "trace", last["pid"], steps=last["step"] + 1 - last["start"])
        assert copies.count("copy") > copies.count("copy beside"), "the new schedule's waits"
    assert len({row["pid"] for row in told["killed"][0]}) == 1
    assert len({row["pid"] for row in told["killed"][1]}) == 2


def copies_since(trace_dir: Path, pid: int, *, steps: int) -> list[str]:
    """Where each batch was copied since the last so many steps began: `copy` is inside a wait, `copy beside` is not."""
    (track,) = (track for track in read([trace_dir]) if track.pid == pid)
    first = [span.start for span in track.spans if span.what == "step"][-steps]
    return [span.what for span in track.spans if span.what.startswith("copy") and span.start >= first]
