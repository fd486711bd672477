"""Checkpoints in the waits of real pipelines: turns of the gate, kills, cadence, drift."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import forked
from holdfast.train.gate import Gate


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


JOB = str(Path(__file__).with_name("pipeline_job.py"))


class Job:
    """A pipeline of two stages on one path; several lives, one after the other. `inside`: `fsdp` or `tp` in four ranks."""

    def __init__(self, home: Path, schedule: str, steps: int, inside: str = "") -> None:
        home.mkdir(exist_ok=True)
        self.home, self.schedule, self.steps, self.inside = home, schedule, steps, inside
        self.lives = 0

    def live(self, *, kill_at: int | None = None, victim: int = 0) -> list[dict]:
        """What the ranks ended with; nothing, if one was killed after it had finished step `kill_at`."""
        self.lives += 1
        store = str(self.home / f"store{self.lives}")
        world = 4 if self.inside else 2
        command = [str(world), store, str(self.home / "ckpt"), str(self.steps), self.schedule]
        command += [self.inside] if self.inside else []
        workers = [
            forked.Popen([sys.executable, JOB, str(rank), *command], stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        try:
            if kill_at is not None:
                assert workers[victim].stdout is not None
                for line in workers[victim].stdout:
                    if json.loads(line).get("step") == kill_at:
                        break
                return []
            return [json.loads(worker.communicate(timeout=100)[0].splitlines()[-1]) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(10)
                worker._close()


@pytest.mark.slow
def test_a_pipeline_killed_in_the_middle_ends_where_an_undisturbed_one_ends(runtime_dir: Path, tmp_path: Path) -> None:
    straight = Job(tmp_path / "straight", "1F1B", 14).live()
    killed = Job(tmp_path / "killed", "1F1B", 14)
    killed.live(kill_at=9, victim=1)
    back = killed.live()
    assert back[0]["start"] == back[1]["start"] >= 8, "the version of the last step may still be on its way"
    assert [end["weights"] for end in back] == [end["weights"] for end in straight]
    assert back[1]["last_loss"] == straight[1]["last_loss"]
    assert "storage" not in back[0]["sources"]
    for end in straight:
        assert end["late"] > 0, "after three proofs the copies go on behind the call"
        assert end["copy"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["fsdp", "tp"])
def test_stages_that_several_ranks_divide_are_copied_in_their_waits_and_come_back(
    runtime_dir: Path, tmp_path: Path, inside: str
) -> None:
    straight = Job(tmp_path / "straight", "1F1B", 12, inside).live()
    killed = Job(tmp_path / "killed", "1F1B", 12, inside)
    killed.live(kill_at=8, victim=2)
    back = killed.live()
    (start,) = {end["start"] for end in back}
    assert start >= 7, "the version of the last step may still be on its way"
    assert [end["weights"] for end in back] == [end["weights"] for end in straight]
    for end in straight:
        assert end["late"] > 0
        assert end["inside"] >= 0.5 * end["copy"] > 0


@pytest.mark.slow
def test_a_schedule_that_hardly_waits_is_saved_beside_the_work_and_comes_back(
    runtime_dir: Path, tmp_path: Path
) -> None:
    straight = Job(tmp_path / "straight", "ZBVZeroBubble", 12).live()
    killed = Job(tmp_path / "killed", "ZBVZeroBubble", 12)
    killed.live(kill_at=8, victim=1)
    back = killed.live()
    assert back[0]["start"] == back[1]["start"] >= 7, "the version of the last step may still be on its way"
    assert [end["weights"] for end in back] == [end["weights"] for end in straight]
    for end in straight:
        assert end["late"] > 0
        assert end["saved"] == list(range(12)), "every step was saved"
        assert end["stalled"] < 12 * 0.1, "a bounded time per step"


def test_the_cadence_is_found_from_what_a_save_may_cost_and_is_the_same_on_all_ranks(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('overhead = "0.2%"\ndurable_every = "0"\n')
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    first, second = Job(tmp_path / "job", "1F1B", 26).live()
    assert first["cadences"] == second["cadences"]
    (every,) = first["cadences"]
    assert every > 1, "no call takes less than a five-hundredth of such a short step"
    assert f"every {every} steps it is 0." in first["told"]
    for end in (first, second):
        *before, after = [step for step in end["saved"] if step < 15], [s for s in end["saved"] if 15 <= s < 25]
        assert before == [list(range(15))], "every step, until it was measured"
        assert after == [step for step in range(15, 25) if (step + 1) % every == 0]
        assert 0 < end["inside"] <= end["copy"], "after three proofs the copies go on behind the call, some in waits"


DRIFT = str(Path(__file__).with_name("drift_job.py"))


def drift(home: Path, life: int, steps: int, *, kill: bool, num_nodes: int = 1) -> list[list[dict]]:
    """What two ranks said at their beginning and at the end; then both are killed, or close."""
    tail = ["2", str(home / f"store{life}"), str(home / "ckpt"), str(steps)]
    workers = [
        forked.Popen(
            [sys.executable, DRIFT, str(rank), *tail],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOLDFAST_NODE_LABEL": f"n{rank % num_nodes}"},
        )
        for rank in range(2)
    ]
    try:
        told = [[json.loads(worker.stdout.readline()) for _ in range(2)] for worker in workers]
        if not kill:
            for worker in workers:
                worker.stdin.write("close\n")
                worker.stdin.close()
            assert [worker.wait(60) for worker in workers] == [0, 0]
        return told
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
            worker._close()


@pytest.mark.slow
def test_stages_that_change_in_mid_run_cost_little_and_every_version_is_right(
    runtime_dir: Path, tmp_path: Path
) -> None:
    """A stage becomes three times as slow, then its peer hangs in a wait, then all waits are cut to a third."""
    before: list[str] = []
    for life, (first, last) in enumerate([(0, 18), (18, 30)]):
        told = drift(tmp_path, life, last, kill=life == 0)
        for rank, (begun, ended) in enumerate(told):
            assert begun["start"] == first, "the last step before the kill was captured"
            assert not before or begun["digest"] == before[rank], "the version is what training had"
            assert not any(ended["given_up"])
            for row in ended["rows"]:
                stall = row["save_seconds"] + row["fence_wait_seconds"]
                assert stall < 0.25, "a change costs a bounded time, here far less than a wait that was mispredicted"
        before = [ended["digest"] for _, ended in told]
        for phase in ("slow", "short"):
            rows = [row for _, ended in told for row in ended["rows"] if row["phase"] == phase and row["step"] % 6 >= 2]
            copied = sum(row["copy_seconds"] for row in rows)
            assert sum(row["copy_seconds_in_waits"] for row in rows) >= 0.5 * copied, f"{phase}: learnt anew"


@pytest.mark.slow
def test_replicas_of_a_pipeline_leave_in_its_waits(runtime_dir: Path, tmp_path: Path) -> None:
    told = drift(tmp_path, 0, 12, kill=False, num_nodes=2)
    for rank, (_, ended) in enumerate(told):
        sent = ended["sent"]
        print(
            f"\nrank {rank}: {sent}", [round(row["fence_wait_seconds"], 4) for row in ended["rows"]], ended["given_up"]
        )
        assert sent["sent_inside_bytes"] >= 0.7 * sent["sent_bytes"] > 0
        assert not any(ended["given_up"])
