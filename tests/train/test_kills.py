"""What a fault costs: a pipeline is killed again and again at random steps; how many finished steps are made again.

Every life must go on bit for bit: what a rank restores, and every step that it makes again, has the digest that the same
step had in an earlier life. `pytest --slow -s tests/train/test_kills.py` prints the work lost per setting; each takes
about two minutes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import forked

JOB = str(Path(__file__).with_name("kill_job.py"))
RANKS = 2
# Steps of a life are drawn so that a kill hits every place between two checkpoints alike.
SHORTEST = 5


class Campaign:
    """One job, killed at random steps, life after life; the keeper outlives them."""

    def __init__(self, home: Path, *, every: int, seed: int) -> None:
        home.mkdir()
        self.home, self.every = home, every
        self.random = random.Random(seed)
        self.lives = 0
        self.known: dict[tuple[int, int], str] = {}
        self.finished = -1  # the last step that any rank finished before the last kill
        self.lost: list[int] = []

    def live(self) -> None:
        """One life: restore, some steps, `kill -9` of one rank at a random one, and the end of the others."""
        self.lives += 1
        store = str(self.home / f"store{self.lives}")
        tail = [str(RANKS), store, str(self.home / "ckpt"), str(self.every)]
        workers = [
            forked.Popen([sys.executable, JOB, str(rank), *tail], stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        victim = self.random.randrange(RANKS)
        steps = self.random.randrange(SHORTEST, SHORTEST + max(self.every, 10))
        lines: list[list[str]] = [[] for _ in workers]
        try:
            for line in workers[victim].stdout:
                lines[victim].append(line)
                if len(lines[victim]) > steps:
                    break
            for worker in (workers[victim], *workers):
                worker.kill()
            for rank, worker in enumerate(workers):
                lines[rank] += worker.stdout
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(10)
                worker._close()
        self._judge([[json.loads(line) for line in told if line.endswith("\n")] for told in lines])

    def _judge(self, told: list[list[dict]]) -> None:
        starts = {rank: rows[0] for rank, rows in enumerate(told) if rows}
        assert starts, "nobody came as far as its first step"
        assert all(row["watched"] for row in starts.values()), "the schedule is found without being named"
        (start,) = {row["start"] for row in starts.values()}
        if self.lives > 1:
            self.lost.append(self.finished + 1 - start)
            # Only before the first checkpoint there is nothing to come back to.
            assert start > 0 or self.finished < self.every, "the job began anew"
            for rank, row in starts.items() if start else ():
                assert row["digest"] == self.known[rank, start - 1], (
                    f"rank {rank} is not what it was at step {start - 1}"
                )
        for rank, rows in enumerate(told):
            for row in rows[1:]:
                same = self.known.setdefault((rank, row["step"]), row["digest"])
                assert same == row["digest"], f"step {row['step']} of rank {rank} was another one before"
        self.finished = max([start - 1, *(row["step"] for rows in told for row in rows[1:])])


def campaign(home: Path, *, every: int, kills: int, seed: int) -> list[int]:
    """Finished steps that were lost at each kill."""
    job = Campaign(home, every=every, seed=seed)
    try:
        for _ in range(kills + 1):
            job.live()
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if "holdfast.node" in (process.info["cmdline"] or []) and str(home) in " ".join(process.info["cmdline"]):
                process.terminate()
    return job.lost


def test_a_kill_costs_at_most_two_steps_where_every_step_is_saved(runtime_dir: Path, tmp_path: Path) -> None:
    # Killed when seven steps are finished: a checkpoint every four steps would lose three.
    lost = campaign(tmp_path / "job", every=1, kills=1, seed=7)
    assert len(lost) == 1
    assert max(lost) <= 2, "the version of the last step may be on its way, and ranks are a step apart"


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize(("every", "seed"), [(1, 2), (50, 3)])
def test_fifty_kills_per_setting_lose_a_fraction_of_what_a_checkpoint_every_fifty_steps_loses(
    runtime_dir: Path, tmp_path: Path, every: int, seed: int
) -> None:
    lost = campaign(tmp_path / "job", every=every, kills=50, seed=seed)
    mean = statistics.fmean(lost)
    print(
        f"\na checkpoint every {every} steps: {sum(lost)} steps lost in {len(lost)} kills, {mean:.2f} each, at most {max(lost)}"
    )
    if every == 1:
        assert max(lost) <= 2
    else:
        assert mean >= 20.0, "so a checkpoint at every step keeps nine tenths of this, and more"
