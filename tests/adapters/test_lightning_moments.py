"""A fit of Lightning killed at every kind of moment ends as if it had not been: state, log, callbacks, evaluations. Real package.

The matrix is configurations times moments. A few of its cases, drawn once, run where the package is installed; all of them with
--slow. One rank is a fork of a process that has loaded everything; two ranks start under the launcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stories_kit import (
    WHOM,
    Stories,
    both_end_undisturbed_at_a_drawn_moment,
    both_end_undisturbed_when_killed,
    both_end_undisturbed_when_stopped,
    both_stop_behind_one_step,
    drawn,
    ends_undisturbed_when_stopped,
    same,
    stories,
)

STORY = Path(__file__).with_name("lightning_story.py")

pytestmark = [pytest.mark.rival("lightning"), pytest.mark.rival("torchdata"), pytest.mark.timeout(300)]

# Moments of each plan: within an epoch, in and behind a validation, in the last batch of an epoch, in what is done for the epoch,
# behind it, in the end of the training.
MATRIX = {
    "whole": "begin:4 val:5 begin:5 batch:11 val:10 epoch:12 begin:12 begin:13 begin:14 val:17 batch:23 epoch:24 end:24",
    "limit": "begin:4 val:5 begin:6 batch:9 val:10 epoch:10 begin:10 begin:11 begin:20 begin:21 val:15 epoch:30 end:30",
    "accumulate": "begin:2 begin:3 val:2 begin:4 begin:5 val:5 epoch:4 epoch:8 begin:7 begin:8 epoch:12 end:12",
    "steps": "begin:3 val:4 begin:5 epoch:12 begin:12 begin:13 val:8 val:12 begin:14 val:16 epoch:17 end:17",
    "plateau": "begin:7 begin:11 begin:14 val:5 val:10 epoch:12 begin:12 begin:13 val:17 begin:23 epoch:24 end:24",
    "stops": "begin:2 val:2 begin:5 val:6 begin:7 val:8 epoch:8 end:8",
    "manual": "begin:3 val:7 begin:10 val:14 epoch:16 begin:16 begin:18 val:23 epoch:32 end:32",
    "iterable": "begin:4 val:5 begin:7 epoch:12 begin:12 begin:13 begin:14 val:17 epoch:24 end:24",
    "workers": "begin:4 val:5 begin:7 epoch:12 begin:12 begin:13 val:17 end:24",
    "saves": "begin:4 val:3 begin:4 val:6 epoch:12 begin:12 begin:13 val:18 epoch:24 end:24",
    "average": "begin:4 val:5 begin:7 epoch:12 begin:13 val:17 epoch:24 end:24",
    "own": "begin:3 begin:8 epoch:7 begin:9 val:14 epoch:14 end:14",
    "compiled": "begin:7 val:5 epoch:12 begin:13 end:24",
    "weighted": "begin:4 val:5 epoch:12 begin:14 begin:20 begin:30 end:36",
    "endless": "begin:3 begin:8 begin:14 end:18",
    "plain": "begin:0 begin:4 val:5 batch:11 val:10 epoch:12 begin:12 begin:13 begin:20 val:29 begin:35 epoch:36 end:36",
    "plain job": "begin:2 val:5 saved:5 begin:4 epoch:6 begin:6 begin:8 begin:12 end:18",
}
# One rank: loaders that say no place; callbacks that change the trainer or its optimizer by the number of the epoch, a generator of the loader's own, an order by the
# number of the epoch, metrics, loaders that are made anew, the best so far in a directory of the logger's, a learning rate that is found before the first
# step of each process.
MORE = {
    "by epoch": "begin:7 epoch:12 begin:14 val:17 begin:20 end:24",
    "swa": "begin:7 epoch:12 begin:14 begin:26 epoch:36 begin:40 end:48",
    "groups": "begin:7 epoch:12 begin:13 begin:20 begin:30 end:36",
    "own order": "begin:4 val:5 begin:7 epoch:12 begin:14 begin:30",
    "cuts": "begin:4 epoch:7 begin:7 begin:11 val:15 begin:21 end:26",
    "shuffled": "begin:4 epoch:12 begin:14 begin:20 begin:30",
    "measured": "begin:4 epoch:12 begin:14 begin:22 begin:24",
    "reloads": "begin:4 epoch:12 begin:12 begin:14 begin:24 begin:30",
    "best": "begin:1 begin:4 val:5 begin:5 begin:7 end:9",
    "finds": "begin:4 val:10 begin:14 end:24",
    "plain in order": "begin:4 val:17 end:24",
    "plain limit": "begin:2 begin:3 epoch:4 begin:7 begin:10 end:12",
    "plain augmented": "begin:4 val:10 begin:14 begin:22",
    "plain workers": "begin:4 val:5 batch:11 epoch:12 begin:14 begin:30",
    "plain stays": "begin:4 begin:7 epoch:12 begin:14 begin:26 begin:30",
    "plain stays and draws": "begin:4 begin:7 val:10 epoch:10 begin:10 begin:12 begin:24",
    "plain validation stays": "begin:4 begin:7 val:10 epoch:12 begin:14",
    "plain validation own": "begin:4 begin:7 epoch:12",
    "plain validation reloads": "begin:7 epoch:12 begin:14 begin:19",
    "plain weighted": "begin:4 begin:14",
    "plain stream": "begin:1 begin:4 batch:11 epoch:12 begin:14 begin:30",
    "plain stream of workers": "begin:4 epoch:12 begin:14 begin:22",
    "plain pair": "begin:3 begin:6 begin:11 epoch:12 begin:14 begin:30",
    "plain manual": "begin:3 begin:10 epoch:16 begin:20",
    "plain reloads": "begin:4 begin:12 begin:14 begin:30",
    "plain cuts": "begin:4 begin:7 begin:11 val:15 begin:21",
    "plain steps": "begin:3 val:4 begin:5 epoch:12 begin:13 val:16 end:17",
    "plain drawn": "begin:4 val:5 epoch:12 begin:14",
    "plain drawn twice": "begin:4 epoch:12 begin:14 begin:30",
}
OWN = "own"  # files that Lightning wrote: one that it had not told us of may be left

# Of two ranks: before a validation, behind it, in what is done for an epoch; between a validation and Lightning's own save, in that, behind it.
AROUND = [
    ("limit", "batch:5"), ("limit", "begin:5"), ("limit", "epoch:10"),
    ("job", "val:8"), ("job", "validated:8"), ("job", "saving:5"), ("job", "saved:5"),
]  # fmt: skip


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with stories(STORY, tmp_path_factory.mktemp("lt")) as made:
        yield made


@pytest.mark.parametrize(("plan", "moment"), [*drawn(MATRIX, 8), *drawn(MORE, 2)])
def test_killed_at_a_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    facts, told = lives.killed(plan, moment)
    assert facts["starts"][0] > 0 or moment == "begin:0", told
    same(facts, lives.undisturbed(plan), more=OWN)


@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("limit", "begin:7"),
        pytest.param("limit", "begin:21", marks=pytest.mark.slow),
        pytest.param("stops", "val:6", marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_at_a_moment_no_step_is_lost(lives: Stories, plan: str, moment: str) -> None:
    """SIGTERM comes to Lightning and to us; the step that it came in is finished and saved, whatever the cadence."""
    facts, told = lives.killed(plan, moment, "--term", "--every", "100")
    assert facts["starts"] == [int(moment.partition(":")[2]) + moment.startswith("begin")], told
    same(facts, lives.undisturbed(plan), more=OWN)


@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("seldom", "begin:7"),
        pytest.param("seldom", "batch:5", marks=pytest.mark.slow),
        pytest.param("seldom", "batch:9", marks=pytest.mark.slow),
        pytest.param("manual and seldom", "batch:10", marks=pytest.mark.slow),
        pytest.param("manual and seldom", "begin:10", marks=pytest.mark.slow),
    ],
)
def test_told_the_last_checkpoint_a_restart_goes_on_with_the_same_or_a_later_step_of_the_same_run(
    lives: Stories, plan: str, moment: str
) -> None:
    """Lightning's own is of step 4 or 8; a launch of its own is given what it asks for."""
    facts, told = lives.killed(plan, moment, "--resume", "last")
    assert int(moment.partition(":")[2]) - facts["starts"][0] in (0, 1, 2), told
    same(facts, lives.undisturbed(plan), more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment", "step", "of"), [("limit", "begin:7", 8, 0), ("job", "val:8", 8, 1)])
def test_of_two_ranks_one_is_asked_to_stop_and_both_stop_behind_one_step_that_is_saved(
    lives: Stories, plan: str, moment: str, step: int, of: int
) -> None:
    """The other may be in a later step by then: they agree on one that none has passed."""
    both_stop_behind_one_step(lives, plan, moment, step, of, more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize(("plan", "moment"), [*AROUND, ("limit", "end:30")])
def test_of_two_ranks_asked_to_stop_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, plan: str, moment: str, of: int
) -> None:
    step, is_end = int(moment.partition(":")[2]), moment.startswith("end")
    both_end_undisturbed_when_stopped(lives, plan, moment, step, of, is_end=is_end, more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize(("plan", "moment"), [*AROUND, ("limit", "end:30")])
def test_of_two_ranks_killed_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, plan: str, moment: str, of: int
) -> None:
    both_end_undisturbed_when_killed(lives, plan, moment, of, more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 1, -1], ids=["first", "one", "all"])
@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("limit", "begin:4"),
        ("limit", "val:5"),
        ("limit", "epoch:10"),
        ("limit", "begin:11"),
        ("job", "begin:4"),
        ("job", "val:8"),
        ("shared", "begin:6"),
        ("shared", "begin:9"),
        ("weighted", "begin:6"),
        ("weighted", "begin:9"),
        ("manual norms", "begin:10"),
        ("plain", "begin:4"),
        ("plain", "begin:13"),
        ("plain shared", "begin:6"),
        ("plain shared", "begin:9"),
        ("plain weighted", "begin:9"),
        ("plain workers", "begin:14"),
    ],
)
def test_of_two_ranks_killed_both_end_undisturbed(lives: Stories, plan: str, moment: str, of: int) -> None:
    both_end_undisturbed_when_killed(lives, plan, moment, of, more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize("whom", WHOM)
@pytest.mark.parametrize("plan", MATRIX)
def test_of_two_ranks_struck_at_a_drawn_moment_both_end_undisturbed(lives: Stories, plan: str, whom: str) -> None:
    both_end_undisturbed_at_a_drawn_moment(lives, plan, whom, more=OWN)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment"), drawn(MATRIX, 0))
def test_asked_to_stop_at_any_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    ends_undisturbed_when_stopped(lives, plan, moment, more=OWN)


@pytest.mark.slow
def test_a_new_launch_of_a_run_that_stopped_early_goes_on(lives: Stories) -> None:
    """As after Lightning's own resume: early stopping ends it with the next validation. A restart by the launcher trains nothing."""
    facts, told = lives.stopped("stops", "end:8")
    assert facts["starts"] == [8], told
    assert facts["step"] == 10
