"""A Trainer killed at every kind of moment ends as if it had not been: state, log, callbacks, evaluations. With the real package.

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

STORY = Path(__file__).with_name("hf_story.py")

pytestmark = [pytest.mark.rival("transformers"), pytest.mark.timeout(300)]

# Moments of each plan: before a step, between the batches of one, in and behind log, evaluation and save, in the last step of an
# epoch, in what is done for the epoch, in the end of the training and behind it.
MATRIX = {
    "steps": "begin:3 begin:6 begin:7 begin:8 begin:9 step:6 log:6 eval:6 evaluated:6 saving:6 saved:6 step:10 epoch:10 begin:10 end:13 over:13",
    "epochs": "begin:5 begin:7 eval:5 evaluated:5 saving:5 saved:5 step:10 epoch:10 log:10 begin:11 eval:13 saved:13 end:13",
    "whole": "begin:4 begin:5 eval:5 saved:10 step:15 epoch:15 eval:15 saving:15 end:15 over:15",
    "stops": "begin:1 begin:2 eval:2 evaluated:2 saved:2 begin:3 eval:3 saving:3 evaluated:4 end:4",
    "accumulate": "begin:2 part:1 part:3 eval:2 saving:4 step:3 epoch:3 begin:3 log:6 eval:6 part:7 begin:9 eval:12 epoch:12 end:12",
    "best": "begin:4 eval:4 evaluated:4 saving:2 saved:2 begin:5 epoch:10 eval:10 begin:11 eval:12 end:13",
    "workers": "begin:2 eval:3 begin:5 step:5 epoch:5 begin:7 eval:9 begin:10 eval:15 end:15",
    "stream": "begin:3 eval:4 saving:4 begin:5 log:6 begin:9 eval:12 saved:12 end:13",
    "limits": "begin:1 begin:2 log:2 begin:4 eval:4 saving:4 saved:4 begin:5 epoch:5 saving:6 end:7 over:7",
    "first": "begin:1 log:3 eval:3 begin:4 begin:5 epoch:5 begin:7 eval:12 end:13",
    "two": "begin:3 step:4 eval:3 begin:5 epoch:5 begin:6 eval:9 epoch:10 end:10",
    "hooks": "begin:3 eval:3 log:3 begin:5 eval:6 begin:7 saving:7 saved:7 begin:8 eval:12 epoch:15 end:15",
    "plateau": "begin:3 eval:4 evaluated:4 begin:5 epoch:5 begin:7 eval:10 eval:12 end:13",
    "compiled": "begin:2 eval:3 begin:4 epoch:5 begin:8 end:13",
    "unseeded": "begin:3 begin:5 step:6 epoch:10 begin:12",
    "plain": "begin:1 begin:4 log:5 epoch:5 begin:5 begin:6 epoch:10 end:13 over:13",
}

# One rank: epochs that end before their data does, data that ends where nobody says, a layer that is trained from a step on, a loader
# of the script's own, and a sampler; the same data evaluated, saved and stopped early by epochs.
MORE = {
    "drawn": "begin:3 begin:5 step:6 epoch:5 begin:12",
    "by epochs": "step:5 epoch:5 eval:5 saved:5 begin:6 eval:10 end:20",
    "cut": "begin:2 epoch:3 begin:3 begin:5 epoch:7 step:8 begin:9 begin:14 end:17",
    "short": "begin:3 begin:5 step:6 begin:7 eval:9 begin:12 end:13",
    "thaws": "begin:3 step:4 begin:4 begin:8 end:13",
    "loader": "begin:3 begin:5 eval:6 begin:8 end:13",
}

# Of two ranks, three steps are an epoch: step 6 is evaluated and saved, and is the last of one. Before and in the evaluation, between
# it and the save, in the save and behind it, in what is done for the epoch.
AROUND = ["log:6", "eval:6", "evaluated:6", "saving:6", "saved:6", "epoch:6"]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with stories(STORY, tmp_path_factory.mktemp("hf")) as made:
        yield made


@pytest.mark.parametrize(("plan", "moment"), [*drawn(MATRIX, 4), *drawn(MORE, 0)])
def test_killed_at_a_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    facts, told = lives.killed(plan, moment)
    assert facts["starts"][0] > 0, told
    same(facts, lives.undisturbed(plan))


@pytest.mark.parametrize(
    ("plan", "moment", "step"),
    [
        ("steps", "begin:7", 8),
        pytest.param("steps", "eval:6", 6, marks=pytest.mark.slow),
        pytest.param("epochs", "step:5", 5, marks=pytest.mark.slow),
        pytest.param("accumulate", "part:4", 5, marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_at_a_moment_no_step_is_lost(lives: Stories, plan: str, moment: str, step: int) -> None:
    """The step that SIGTERM came in is finished, with all that the trainer does for it, and saved, whatever the cadence."""
    facts, told = lives.killed(plan, moment, "--term", "--every", "100")
    assert facts["starts"] == [step], told
    same(facts, lives.undisturbed(plan))


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "step"), [("steps", 13), ("by epochs", 20)])
def test_the_version_of_the_last_step_has_its_weights_and_not_the_best_ones(
    lives: Stories, plan: str, step: int
) -> None:
    """The cadence leaves the last step out, so it is saved at the end, where the trainer loads the best weights."""
    facts, told = lives.killed(plan, f"over:{step}", "--every", "7")
    assert facts["starts"] == [step], told
    same(facts, lives.undisturbed(plan))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begin:5", "eval:8", "begin:11"])
def test_told_the_last_checkpoint_a_restart_goes_on_with_a_later_step_of_the_same_run(
    lives: Stories, moment: str
) -> None:
    facts, told = lives.killed("rare", moment, "--resume", "last")
    assert facts["starts"][0] in (int(moment.partition(":")[2]), int(moment.partition(":")[2]) - 1), told
    same(facts, lives.undisturbed("rare"))


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "is_same"), [("begin:1", False), ("begin:7", True)])
def test_a_smaller_batch_that_is_looked_for_is_trained_on(lives: Stories, moment: str, is_same: bool) -> None:
    """Memory is short in step 2. What follows then begins anew in an undisturbed run, and with the newest version in one that goes on."""
    facts, told = lives.killed("fits", moment)
    undisturbed = lives.undisturbed("fits")
    assert facts["step"] == undisturbed["step"] == 13, told
    if is_same:
        same(facts, undisturbed)


@pytest.mark.slow
def test_data_that_draws_is_undisturbed_neither_here_nor_after_the_trainers_own_resume(lives: Stories) -> None:
    """Both skip batches before the random numbers are put back. If one of them comes to end undisturbed, the page has to say so."""
    undisturbed = lives.undisturbed("draws")
    facts, told = lives.killed("draws", "begin:7")
    assert facts["starts"][0] in (6, 7), told
    own, told = lives.killed("draws", "begin:7", "--resume", "last", plain=True)
    assert own["starts"] == [7], told
    for ended in (facts, own):
        assert ended["parameters"] != undisturbed["parameters"]
        for name in ("step", "rates", "checkpoints"):
            assert ended[name] == undisturbed[name]
        assert [entry.keys() for entry in ended["history"]] == [entry.keys() for entry in undisturbed["history"]]


@pytest.mark.slow
def test_with_another_batch_size_the_trainer_warns_goes_on_with_the_step_and_its_epoch_jumps(lives: Stories) -> None:
    """Five steps were an epoch, then three are. The trainer's own resume does the same; if that changes, the page has to say so."""
    facts, told = lives.killed("plain", "begin:7", then=("--batch", "8"))
    assert facts["starts"][0] in (6, 7), told
    own, own_told = lives.killed("draws", "begin:7", "--resume", "last", plain=True, then=("--batch", "8"))
    assert own["starts"] == [7], own_told
    for ended, printed in ((facts, told), (own, own_told)):
        assert "per_device_train_batch_size: 8 (from args) != 4 (from trainer_state.json)" in printed
        assert ended["step"] == 13
        epochs = {entry["step"]: entry["epoch"] for entry in ended["history"] if "loss" in entry}
        before, behind = max(step for step in epochs if step < 7), min(step for step in epochs if step > 7)
        assert epochs[before] == before / 5
        assert epochs[behind] == pytest.approx(behind / 3, abs=0.01)


@pytest.mark.slow
def test_train_called_again_goes_on_with_the_version_and_anew_where_it_is_told_so(lives: Stories) -> None:
    facts, _ = lives.again("plain", "--more")
    assert facts["steps of each"] == [13, 0, 13]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment", "step", "of"), [("steps", "begin:4", 5, 0), ("job", "eval:4", 4, 1)])
def test_of_two_ranks_one_is_asked_to_stop_and_both_stop_behind_one_step_that_is_saved(
    lives: Stories, plan: str, moment: str, step: int, of: int
) -> None:
    """The other may be in a later step by then: they agree on one that none has passed."""
    both_stop_behind_one_step(lives, plan, moment, step, of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize("moment", [*AROUND, "end:13"])
def test_of_two_ranks_asked_to_stop_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, moment: str, of: int
) -> None:
    both_end_undisturbed_when_stopped(lives, "steps", moment, 6, of, is_end=moment == "end:13")


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize("moment", [*AROUND, "end:13", "over:13"])
def test_of_two_ranks_killed_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, moment: str, of: int
) -> None:
    both_end_undisturbed_when_killed(lives, "steps", moment, of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 1, -1], ids=["first", "one", "all"])
@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("steps", "begin:4"),
        ("steps", "eval:3"),
        ("steps", "saving:6"),
        ("steps", "step:9"),
        ("job", "part:4"),
        ("job", "eval:4"),
    ],
)
def test_of_two_ranks_killed_both_end_undisturbed(lives: Stories, plan: str, moment: str, of: int) -> None:
    both_end_undisturbed_when_killed(lives, plan, moment, of)


@pytest.mark.slow
@pytest.mark.parametrize("whom", WHOM)
@pytest.mark.parametrize("plan", MATRIX)
def test_of_two_ranks_struck_at_a_drawn_moment_both_end_undisturbed(lives: Stories, plan: str, whom: str) -> None:
    both_end_undisturbed_at_a_drawn_moment(lives, plan, whom)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment"), drawn(MATRIX, 0))
def test_asked_to_stop_at_any_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    ends_undisturbed_when_stopped(lives, plan, moment)


@pytest.mark.slow
def test_a_new_launch_of_a_run_that_stopped_early_goes_on(lives: Stories) -> None:
    """A restart by the launcher trains nothing."""
    ended, facts = lives.again("stops")
    assert (ended["step"], facts["starts"]) == (4, [4])
    assert facts["step"] > 4
