"""Trainers of TRL, killed at every kind of moment, end as if they had not been. With the real package.

They are Trainers of transformers that count in attributes of their own, and keep completions that several steps learn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stories_kit import Stories, drawn, same, stories

STORY = Path(__file__).with_name("trl_story.py")

pytestmark = [pytest.mark.rival("trl"), pytest.mark.timeout(300)]

MATRIX = {
    "sft": "begin:1 part:2 eval:3 begin:3 begin:4 step:5 epoch:5 log:6 begin:8 end:9",
    "packed": "begin:3 part:4 begin:6 end:9",
    "completion": "begin:3 epoch:5 begin:6 begin:7",
    "dpo": "begin:3 part:4 eval:6 begin:7",
    "grpo": "begin:1 part:1 begin:2 begin:3 part:3 begin:4 step:5 log:6 begin:6 begin:7 begin:8 end:9",
    "fresh": "begin:2 part:2 eval:3 begin:4 begin:7",
    "synced": "begin:3 begin:4 part:5 begin:6 begin:7",
    "entropy": "begin:2 begin:3 part:4 begin:6 begin:7",
    "rloo": "begin:1 begin:2 begin:3 part:5 begin:7",
}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with stories(STORY, tmp_path_factory.mktemp("trl")) as made:
        yield made


@pytest.mark.parametrize(("plan", "moment"), drawn(MATRIX, 2))
def test_killed_at_a_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    facts, told = lives.killed(plan, moment)
    assert facts["starts"][0] > 0, told
    same(facts, lives.undisturbed(plan))


@pytest.mark.slow
@pytest.mark.timeout(600)  # two jobs, each with a limit of its own of 250 s
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize(("plan", "moment"), [("sft", "begin:4"), ("grpo", "begin:3"), ("grpo", "part:5")])
def test_of_two_ranks_killed_both_end_undisturbed(lives: Stories, plan: str, moment: str, of: int) -> None:
    for facts, undisturbed in zip(lives.ranks(2, plan, moment, of), lives.ranks(2, plan), strict=True):
        assert facts["starts"][-1] > 0
        same(facts, undisturbed)
