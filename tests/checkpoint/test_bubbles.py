"""Checkpoints in the waits of real pipelines: turns of the gate, kills, cadence, drift."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from holdfast.checkpoint.pipeline.copy_gate import Gate
from lives_kit import Lives


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
    thread.join(30)
    assert said == [True], "a wait that nobody knows may be used"


def test_chunks_longer_than_the_wait_are_not_begun() -> None:
    gate = Gate()
    gate.open(0.15)
    began = time.monotonic()
    assert gate.turn(30.0)
    assert time.monotonic() - began >= 0.14, "the turn came only after the expected end"


def test_the_fence_and_an_endless_silence_give_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checkpoint.pipeline.copy_gate.PATIENCE_S", 60.0)
    gate = Gate()
    thread, said = turn_of(gate, 0.01)
    while not gate._changed._waiters:  # until it sleeps
        time.sleep(0.001)
    gate.hurry(True)
    thread.join(30)
    assert said == [False], "the fence does not wait for the end of patience"
    gate.hurry(False)
    for patience_s, why in ((0.1, "nobody steered the gate"), (60.0, "nor is what is left held back once more")):
        monkeypatch.setattr("holdfast.checkpoint.pipeline.copy_gate.PATIENCE_S", patience_s)
        thread, said = turn_of(gate, 0.01)
        thread.join(30)
        assert said == [False], why


JOB = Path(__file__).with_name("pipeline_job.py")
DRIFT = Path(__file__).with_name("drift_job.py")


def test_cadence_follows_the_budget_alike_on_all_ranks(
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
        assert 0 < end["inside"] <= end["copies"], "after three proofs the copies go on behind the call, some in waits"


@pytest.mark.slow
def test_replicas_of_a_pipeline_leave_in_its_waits(runtime_dir: Path, tmp_path: Path) -> None:
    with Lives(tmp_path / "job", DRIFT, 17, "every", nodes=2) as job:
        ends = [rows[-1] for rows in job.live()]
    for rank, end in enumerate(ends):
        learnt, last = end["sent"]
        sent, inside = (last[name] - learnt[name] for name in ("sent_bytes", "sent_inside_bytes"))
        print(f"\nrank {rank}: {inside} of {sent} bytes", [round(row["fence_wait_seconds"], 4) for row in end["rows"]])
        assert inside >= 0.9 * sent > 0, "once the waits are known"
        assert not any(end["given_up"])
