"""Real pipelines on real processes: what is measured in them, and that the event model says the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
from holdfast.core.pipeline import Kind, one_f_one_b
from holdfast.train.gate import Gate
from holdfast.train.pipeline import Profile, predicted
from lives_kit import Lives

WORKER = str(Path(__file__).with_name("bubbles_worker.py"))
ALL = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def run(tmp_path: Path, world: int, *names: str, forward_s: float = 0.02) -> list[dict]:
    """Per rank and schedule what was measured; a forward of all stages of a rank takes so long."""
    workers = [
        forked.Popen(
            [sys.executable, WORKER, str(rank), str(world), str(tmp_path / "store"), str(forward_s), *names],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [json.loads(worker.communicate(timeout=100)[0]) for worker in workers]
    assert all(told_one["seam"] == "torch.distributed.pipelining.schedules" for told_one in told)
    return [{"rank": one["rank"], **row} for one in told for row in one["rows"]]


def test_waits_and_actions_of_a_pipeline_are_seen_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    for row in run(tmp_path, 2, "1F1B", "Interleaved1F1B", forward_s=0.002):
        assert row["steps"] == 6
        assert 0 < row["measured"] < row["period"]
        assert row["parts"] == pytest.approx(row["period"]), "nothing is counted twice or left out"
        assert row["actions"] == row["ordered"], "every action is seen, in the order that the schedule told"
        assert row["left"] == []


@pytest.mark.slow
def test_predicted_idle_time_is_within_a_tenth_of_the_measured(tmp_path: Path) -> None:
    rows = run(tmp_path, 4, *ALL, "GPipe~", "1F1B~")
    ratios = {(row["schedule"], row["rank"]): row["predicted"] / row["measured"] for row in rows}
    off = {key: round(ratio, 3) for key, ratio in ratios.items() if not 0.9 <= ratio <= 1.1}
    assert len(ratios) == 4 * 9
    assert not off


def test_who_is_ahead_or_behind_by_more_than_before_makes_no_step_longer() -> None:
    seen = SimpleNamespace(orders=one_f_one_b(2, 4))
    profiles = [
        Profile(
            {(rank, Kind.FORWARD): 1.0, (rank, Kind.BACKWARD): 2.0}, idle=3.0, period=period, ending=0.0, num_steps=4
        )
        for rank, period in enumerate((14.0, 16.0))
    ]
    step = predicted(seen, profiles)
    assert step.period == pytest.approx(15.0)
    assert [row.idle for row in step.ranks] == pytest.approx([3.0, 3.0])


def turn_of(gate: Gate, seconds: float) -> tuple[threading.Thread, list[bool]]:
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(gate.turn(seconds)), daemon=True)
    thread.start()
    return thread, said


def test_a_turn_is_given_in_a_wait_with_room_and_taken_back_when_it_ends() -> None:
    gate = Gate()
    gate.open(60.0)
    assert gate.turn(0.01)
    gate.shut()
    thread, said = turn_of(gate, 0.01)
    thread.join(0.2)
    assert thread.is_alive(), "no turn while the trainer computes"
    gate.open(None)
    thread.join(10)
    assert said == [True], "a wait that nobody knows may be used"


def test_no_chunk_is_begun_that_would_outlast_the_wait_but_what_lasts_longer_than_ever_is_used() -> None:
    gate = Gate()
    gate.open(0.15)
    began = time.monotonic()
    assert gate.turn(30.0)
    assert time.monotonic() - began >= 0.14, "the turn came only after the expected end"


def test_the_fence_and_an_endless_silence_give_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.gate.PATIENCE_S", 60.0)
    gate = Gate()
    thread, said = turn_of(gate, 0.01)
    while not gate._changed._waiters:  # until it sleeps
        time.sleep(0.001)
    gate.hurry(True)
    thread.join(10)
    assert said == [False], "the fence does not wait for the end of patience"
    gate.hurry(False)
    for patience_s, why in ((0.1, "nobody steered the gate"), (60.0, "nor is what is left held back once more")):
        monkeypatch.setattr("holdfast.train.gate.PATIENCE_S", patience_s)
        thread, said = turn_of(gate, 0.01)
        thread.join(10)
        assert said == [False], why


JOB = Path(__file__).with_name("pipeline_job.py")
DRIFT = Path(__file__).with_name("drift_job.py")


def test_the_cadence_is_found_from_what_a_save_may_cost_and_is_the_same_on_all_ranks(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('overhead = "0.2%"\ndurable_every = "0"\n')
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    with Lives(tmp_path / "job", JOB, 26, "1F1B") as job:
        first, second = (rows[-1] for rows in job.live())
    assert first["cadences"] == second["cadences"]
    (every,) = first["cadences"]
    assert every > 1, "no call takes less than a five-hundredth of such a short step"
    assert f"every {every} steps it is 0." in first["told"]
    for end in (first, second):
        *before, after = [step for step in end["saved"] if step < 15], [s for s in end["saved"] if 15 <= s < 25]
        assert before == [list(range(15))], "every step, until it was measured"
        assert after == [step for step in range(15, 25) if (step + 1) % every == 0]
        assert 0 < end["inside"] <= end["copy"], "after three proofs the copies go on behind the call, some in waits"


@pytest.mark.slow
def test_replicas_of_a_pipeline_leave_in_its_waits(runtime_dir: Path, tmp_path: Path) -> None:
    with Lives(tmp_path / "job", DRIFT, 12, "every", nodes=2) as job:
        ends = [rows[-1] for rows in job.live()]
    for rank, end in enumerate(ends):
        sent = end["sent"]
        print(f"\nrank {rank}: {sent}", [round(row["fence_wait_seconds"], 4) for row in end["rows"]], end["given_up"])
        assert sent["sent_inside_bytes"] >= 0.7 * sent["sent_bytes"] > 0
        assert not any(end["given_up"])
