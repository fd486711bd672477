"""What a fault costs: a pipeline is killed again and again at random moments; how many finished steps are made again.

Every life must go on bit for bit: what a rank restores, and every step that it makes again, has the digest that the same
step had in an earlier life. `pytest --slow -s tests/checkpoint/test_kills.py` prints the work lost per setting and how much
less it is with a checkpoint at every step than at every fiftieth.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from lives_kit import Lives, Row

JOB = Path(__file__).with_name("kill_job.py")
RANKS = 2
# Steps of a life are drawn so that a kill hits every place between two checkpoints alike.
SHORTEST = 5
KILLS = 50


class Campaign:
    """One job, killed at random steps and at random moments of them, life after life; the keeper outlives them."""

    def __init__(self, home: Path, *, every: int, seed: int) -> None:
        self.every = every
        self.random = random.Random(seed)
        self.job = Lives(home, JOB, every, ranks=RANKS, every=every)

    def live(self) -> None:
        """One life: restore, some steps, `kill -9` of one rank somewhere in the next one, and the end of the others."""
        victim = self.random.randrange(RANKS)
        steps = self.random.randrange(SHORTEST, SHORTEST + max(self.every, 10))
        # The first life leaves a version, so that every kill after it has one to come back to.
        steps += self.every * (self.job.lives == 0)
        # A share of a step, so that kills fall into windows, chunks and the fence, and into the call of `step` too.
        share = self.random.random()
        begun: list[int] = []

        def is_last(row: Row) -> bool:
            begun.extend([row["start"]] if "start" in row else [])
            return row.get("step") == begun[0] + steps - 1

        told = self.job.live(until=is_last, victim=victim, later=lambda step_s: share * step_s)
        assert all(rows[0]["watched"] for rows in told if rows), "the schedule is found without being named"


def campaign(home: Path, *, every: int, kills: int, seed: int) -> list[int]:
    """Finished steps that were lost at each kill."""
    made = Campaign(home, every=every, seed=seed)
    with made.job as job:
        for _ in range(kills + 1):
            made.live()
        return job.lost


def test_a_kill_costs_at_most_two_steps_where_every_step_is_saved(runtime_dir: Path, tmp_path: Path) -> None:
    # Killed at such a step that a checkpoint every four steps would lose three.
    lost = campaign(tmp_path / "job", every=1, kills=1, seed=7)
    assert len(lost) == 1
    assert max(lost) <= 2, "the version of the last step may be on its way, and ranks are a step apart"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_at_every_step_loses_a_fraction_of_what_one_at_every_fiftieth_loses(
    runtime_dir: Path, tmp_path: Path
) -> None:
    often, seldom = (
        campaign(tmp_path / f"every{every}", every=every, kills=KILLS, seed=seed) for every, seed in ((1, 2), (50, 3))
    )
    means = [statistics.fmean(lost) for lost in (often, seldom)]
    less = 1 - means[0] / means[1]
    for every, lost, mean in zip((1, 50), (often, seldom), means, strict=True):
        print(
            f"\na checkpoint every {every} steps: {sum(lost)} steps lost in {len(lost)} kills, {mean:.2f} each,"
            f" at most {max(lost)}",
            end="",
        )
    print(f"\n{less:.1%} less")
    assert len(often) == len(seldom) == KILLS
    assert max(often) <= 2
    assert max(seldom) <= 50 + 2, "and never more than what lies between two of them, and on its way"
    assert less >= 0.95
