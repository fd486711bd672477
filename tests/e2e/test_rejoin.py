"""One rank gets SIGKILL; the other keeps its process, and the run ends bit for bit where an undisturbed one ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.testing.contracts.adapter_processes import keepers_under
from keepers_kit import wait_ended
from sample_kit import MORE

WORKER = Path(__file__).with_name("rejoin_worker.py")
LOOP = Path(__file__).with_name("crash_loop_worker.py")
STEPS = 8


def run(out: Path, *cells: str, ranks: int = 2) -> None:
    command = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=200", str(WORKER), str(out), *cells]
    done = forked.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-5000:]


def survivors_kept_their_processes(out: Path, cells: list[str], ranks: int = 2) -> None:
    """Rank 0 has one process id, unless it was killed too; rank 1 a new one after every kill of it."""
    for rank in range(ranks):
        rows = [line.split() for line in (out / f"runs-{rank}").read_text().splitlines()]
        killed = sum((out / f"killed-{cell}-{rank}").exists() for cell in cells)
        assert len({pid for pid, _ in rows}) == 1 + killed, (rank, rows)


def bit_for_bit(out: Path, cell: str, ranks: int = 2) -> None:
    assert (out / f"killed-{cell}-1").exists(), "nothing was killed"
    for rank in range(ranks):
        expected = json.loads((out / f"reference-{cell}-{rank}.json").read_text())
        runs = [json.loads(path.read_text()) for path in out.glob(f"trained-{cell}-{rank}-*.json")]
        trained = {int(step): digest for rows in runs for step, digest in rows.items()}
        assert set(trained) == set(range(STEPS))
        assert all(rows[step] == expected[int(step)] for rows in runs for step in rows), (cell, rank)


def check(tmp_path: Path, cells: list[str], ranks: int = 2) -> None:
    run(tmp_path, *cells, ranks=ranks)
    survivors_kept_their_processes(tmp_path, cells, ranks)
    for cell in cells:
        bit_for_bit(tmp_path, cell, ranks)


def journal(runtime_dir: Path, event: str) -> list[dict[str, Any]]:
    lines = next(runtime_dir.glob("run-*/journal.jsonl")).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def incidents(runtime_dir: Path) -> list[dict[str, Any]]:
    return journal(runtime_dir, "incident")


def restored(runtime_dir: Path) -> list[int]:
    """How many steps were finished whenever the ranks began anew."""
    return [row["step"] for row in journal(runtime_dir, "restored")]


def test_every_strategy_goes_on_bit_for_bit_and_the_survivor_keeps_its_process(
    tmp_path: Path, runtime_dir: Path
) -> None:
    check(tmp_path, ["ddp:backward", "fsdp:forward", "pp:backward", "resumable:save"])
    # Of four kills three began the survivor's script anew; the resumable function was called again within it.
    assert len((tmp_path / "runs-0").read_text().splitlines()) == 1 + 3


def starts(out: Path, cell: str) -> list[int]:
    """The steps at which rank 0 began, first to last."""
    return sorted({int(path.stem.rsplit("-", 1)[1]) for path in out.glob(f"trained-{cell}-0-*.json")})


def test_live_twin_restores_every_step_but_never_mid_update(tmp_path: Path, runtime_dir: Path) -> None:
    live = ["resumable:backward:3", "ddp:save:100"]
    saved = ["ddp:inside:3", "ddp:caught:3", "ddp:spoilt:3"]
    check(tmp_path, live + saved)
    assert [starts(tmp_path, cell) for cell in live] == [[0, 4], [0, 5]]
    assert [starts(tmp_path, cell) for cell in saved] == [[0, 3], [0, 3], [0, 3]]
    assert (tmp_path / "spoilt").exists(), "nothing of it was sent"
    # What the survivors held is in storage at once (the cadence asks for none), and nothing from the middle of an update.
    durable = {
        cell: sorted((tmp_path / f"root-{cell.replace(':', '-')}").glob("i*/manifest.json")) for cell in live + saved
    }
    assert [durable[cell][0].parent.name for cell in live] == ["i000002-s0000000003", "i000002-s0000000124"]
    assert [len(durable[cell]) for cell in saved] == [1, 1, 1]  # that of the end
    told = incidents(runtime_dir)
    assert [row["steps_lost"] for row in told[:2]] == [0, 0]
    lost = [row["steps_lost"] for row in told[2:4]]
    assert set(lost) <= {1, 2}, lost  # the step that was interrupted was finished, or not
    assert told[0]["came_back"] == {"0": "what it still held", "1": "a twin's live state"}
    assert told[2]["came_back"] == {"0": "its own slot", "1": "its own slot"}
    assert all(row["kept"] == [0] and set(row["seconds"]) >= {"T1", "T2", "T3"} for row in told)
    assert ["T0" in row["seconds"] for row in told[:4]] == [False, False, True, True]
    assert restored(runtime_dir) == [step for cell, at in enumerate((4, 5, 3, 3, 3)) for step in (0, 120 * cell + at)]


@MORE
def test_live_state_has_the_gradients_that_its_step_left(tmp_path: Path, runtime_dir: Path) -> None:
    cells = ["behind:save:100", "adding:save:100"]
    check(tmp_path, cells)
    assert [starts(tmp_path, cell) for cell in cells] == [[0, 5], [0, 5]]
    for told in incidents(runtime_dir):
        assert told["came_back"] == {"0": "what it still held", "1": "a twin's live state"}


@pytest.mark.slow
def test_hybrid_shards_come_from_the_twin_in_the_other_replica(tmp_path: Path, runtime_dir: Path) -> None:
    """HSDP 2 x 2: rank 1 is killed in forward, in backward, and within an update; rank 3 holds the same."""
    cells = ["hsdp:backward:3", "hsdp:forward:3", "hsdp:inside:3"]
    check(tmp_path, cells, ranks=4)
    assert [starts(tmp_path, cell) for cell in cells] == [[0, 4], [0, 4], [0, 3]]
    first, _, second = incidents(runtime_dir)
    assert (first["steps_lost"], first["came_back"]["1"]) == (0, "a twin's live state")
    assert {first["came_back"][rank] for rank in "023"} == {"what it still held"}
    assert second["came_back"]["1"] != "a twin's live state"


@MORE
def test_a_wrapper_that_is_made_before_the_restore_spoils_nothing(tmp_path: Path, runtime_dir: Path) -> None:
    """Rank 1 dies, then rank 0: DDP sends the new rank 0's first parameters into what rank 1 still held."""
    check(tmp_path, ["resumable:restore:3"])
    assert starts(tmp_path, "resumable:restore:3") == [0, 4]


@pytest.mark.slow
@pytest.mark.timeout(560)
@pytest.mark.parametrize("fault", ["kill", "raise", "exit", "stop"])
def test_every_strategy_in_every_phase(fault: str, tmp_path: Path, runtime_dir: Path) -> None:
    """Ninety-five cells; who stops in a restore has as long as a restore may take, so that is left out."""
    phases = ["forward", "backward", "update", "save", *(["restore"] if fault != "stop" else [])]
    check(
        tmp_path,
        [f"{name}:{phase}:1:{fault}" for name in ("ddp", "fsdp", "tp", "pp", "resumable") for phase in phases],
    )


@pytest.mark.slow
def test_a_step_that_always_fails_gets_an_older_version_once_and_then_stops_the_job(
    tmp_path: Path, runtime_dir: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "holdfast.elastic.launch.run_command",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=50",
    ]
    try:
        done = subprocess.run(
            [*command, str(LOOP), str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
        )
    finally:  # a job that stops leaves its keeper to whoever comes next; here nobody does
        keepers = keepers_under(runtime_dir)
        for keeper in keepers:
            keeper.terminate()
        stayed = wait_ended(keepers)
    assert keepers, "the keeper ended with the job"
    assert not stayed
    assert done.returncode == 1
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in range(2)]
    assert starts == [["0", "6", "6", "5"]] * 2, done.stderr[-3000:]
    assert "ZeroDivisionError: always at step 6" in done.stderr.split("the job stops: first error")[1]
