"""A loop with Accelerate killed at every kind of moment ends as if it had not been: rows, state, evaluations. Real package.

The matrix is configurations times moments. A few of its cases, drawn once, run where the package is installed; all of them with
--slow. One rank is a fork of a process that has loaded everything; two ranks start under the launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.hf_parts.accelerate_loaders import Loaders
from holdfast.adapters.huggingface import _refuse_local_sgd
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries import carried_tensors
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


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Forty rows in order, from a place of its own that goes back behind the last one."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 40:
            self.place += 1
            yield torch.tensor([self.place])
        self.place = 0


STORY = Path(__file__).with_name("accelerate_story.py")

pytestmark = [pytest.mark.rival("accelerate"), pytest.mark.rival("torchdata"), pytest.mark.timeout(300)]

# Moments of each plan; five steps are an epoch of one rank, with `every batch` ten, with `odd` four. Before a step, within one,
# in an evaluation, behind a save, in the last step of an epoch and behind it, behind the end.
MATRIX = {
    "process": "begin:4 part:6 backward:7 step:8 step:5 epoch:5 epoch:10 backward:14 step:15 over:15",
    "generator": "begin:4 step:5 backward:7 step:8 epoch:10 begin:11 step:15",
    "seedable": "begin:4 step:5 part:7 step:8 epoch:10 begin:11 step:15",
    "stateful": "begin:4 step:5 part:7 step:8 epoch:10 begin:11 step:15",
    "both": "begin:4 step:5 part:7 step:11 epoch:10 begin:13 step:15",
    "evaluates": "begin:2 eval:4 step:4 begin:5 epoch:5 eval:8 eval:10 epoch:10 begin:11 eval:14 step:15 over:15",
    "stops": "begin:2 eval:4 step:4 begin:5 eval:6 step:6 eval:8 step:8 over:8",
    "best": "begin:3 saving:4 step:4 eval:4 begin:5 eval:8 saving:8 epoch:10 saving:12 step:12 step:15",
    "every batch": "begin:4 backward:9 step:10 epoch:10 begin:11 step:17 epoch:20 step:30",
    "odd": "begin:2 part:2 begin:3 backward:3 step:4 epoch:4 part:5 step:7 epoch:8 step:12",
    "workers": "begin:7 step:8 epoch:10 begin:11 step:15",  # not in the first epoch, whose order nobody can tell
    "stream": "begin:3 part:3 step:5 epoch:5 begin:6 step:8 epoch:10 step:15",
    "limit": "begin:2 eval:4 step:5 epoch:5 begin:6 eval:6 step:7 over:7",
    "compiled": "begin:3 eval:4 step:5 begin:6 eval:8 epoch:10 step:15",
    "mixed": "begin:3 part:4 step:5 begin:6 step:8 epoch:10 step:15",
    "plateau": "begin:3 eval:4 step:4 step:5 eval:6 begin:7 eval:10 step:12 over:12",
    "drawn": "begin:3 step:5 begin:6 part:7 step:10 begin:12 step:15",
}
# One rank: two loaders side by side, batches by a sampler of the script's own, an evaluation that is broken off; steps that are
# reported within an accumulation.
MORE = {
    "parts": "begin:3 step:3 step:8 begin:9 step:10 epoch:10 begin:15",
    "others": "begin:2 part:3 eval:4 step:4 begin:5 step:5 part:7 step:8 epoch:10 begin:11 step:15",
}
# Where the order comes from, what two ranks come to, and who is killed there.
TWO = [
    ("process", "step:4", 0), ("generator", "step:8", -1), ("seedable", "step:8", -1), ("stateful", "step:8", -1),
    ("parts", "step:3", -1), ("named", "saving:8", -1), ("evaluates", "eval:4", 1), ("evaluates", "eval:4", -1), ("best", "saving:4", 1), ("best", "epoch:6", -1),
]  # fmt: skip

# Of two ranks, three steps are an epoch, and twelve are all. In the evaluation behind a step, between it and Accelerate's own save, in that,
# behind it, behind the report; the last step of an epoch, and behind it; the last of all.
AROUND = ["eval:4", "evaluated:4", "within:4", "saving:4", "step:4", "eval:6", "step:6", "epoch:6"]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    with stories(STORY, tmp_path_factory.mktemp("accelerate")) as made:
        yield made


@pytest.mark.parametrize(("plan", "moment"), [*drawn(MATRIX, 6), *drawn(MORE, 0)])
def test_killed_at_a_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    assert lives.undisturbed(plan)["step"] >= 7
    facts, told = lives.killed(plan, moment)
    step = int(moment.partition(":")[2])
    assert facts["starts"][0] in (step, step - 1, step - 2), told
    same(facts, lives.undisturbed(plan))


@pytest.mark.parametrize(
    "plan", ["stateful", pytest.param("both", marks=pytest.mark.slow), pytest.param("stream", marks=pytest.mark.slow)]
)
def test_from_the_end_of_an_epoch_on_the_next_ones_are_the_undisturbed_ones(lives: Stories, plan: str) -> None:
    """There a stateful loader has an iterator that was made for its first epoch alone."""
    facts, told = lives.killed(plan, "step:12", "--every", "5")
    assert facts["starts"] == [10], told
    same(facts, lives.undisturbed(plan))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("read", [2, 5], ids=["within an epoch", "between two"])
def test_rows_of_a_stream_cut_for_two_ranks_go_on(read: int) -> None:
    """Accelerate's shard hides the state of such data, whose place would stay behind what is read to find the position."""
    accelerate = pytest.importorskip("accelerate")

    def loaders() -> tuple[Any, Loaders]:
        stream = torch.utils.data.DataLoader(Stream(), batch_size=4)
        shard = accelerate.data_loader.prepare_data_loader(
            stream, num_processes=2, process_index=1, dispatch_batches=False, use_stateful_dataloader=True
        )
        gradients = accelerate.state.GradientState()
        return shard, Loaders(
            SimpleNamespace(
                _dataloaders=[shard],
                _optimizers=[],
                gradient_state=gradients,
                step=0,
                sync_gradients=True,
                project_configuration=SimpleNamespace(automatic_checkpoint_naming=False),
            )
        )

    whole, saved = loaders()
    epoch = [batch.tolist() for batch in whole]
    assert len(epoch) == 5
    rows = iter(whole)
    assert [next(rows).tolist() for _ in range(read)] == epoch[:read]
    state = saved.state_dict()
    rows.close()
    again, restored = loaders()
    restored.load_state_dict(state)
    assert [batch.tolist() for batch in again] == (epoch[read:] or epoch)
    assert [batch.tolist() for batch in again] == epoch


def test_local_sgd_is_refused() -> None:
    """Ranks differ there, and of parameters that DDP keeps equal one rank's are saved."""
    accelerate = pytest.importorskip("accelerate")
    local_sgd = pytest.importorskip("accelerate.local_sgd")
    kind = accelerate.utils.DistributedType.MULTI_CPU
    model = torch.nn.Linear(1, 1)
    model.no_sync = nullcontext  # type: ignore[assignment]
    wrapped, other = SimpleNamespace(distributed_type=kind), SimpleNamespace(distributed_type=kind)
    for _ in range(2):
        _refuse_local_sgd(wrapped)
    with pytest.raises(UsageError, match="LocalSGD lets the parameters of the ranks differ"):
        local_sgd.LocalSGD(wrapped, model, 2).__enter__()
    assert local_sgd.LocalSGD(other, model, 2).__enter__() is not None
    assert local_sgd.LocalSGD(wrapped, model, 2, enabled=False).__enter__() is not None


@pytest.mark.parametrize("is_whole", [True, False])
def test_gradients_within_an_accumulation_that_are_too_many_are_refused(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    accelerator = SimpleNamespace(
        _dataloaders=[], _optimizers=[torch.optim.SGD([parameter], 0.1)], gradient_state=None, step=1,
        sync_gradients=is_whole, project_configuration=SimpleNamespace(automatic_checkpoint_naming=False),
    )  # fmt: skip
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", 8)
    if is_whole:
        assert Loaders(accelerator).state_dict()["gradients"] == {}
        return
    with pytest.raises(UsageError, match="within an accumulation, and its gradients cannot be saved"):
        Loaders(accelerator).state_dict()


@pytest.mark.slow
def test_an_order_that_nobody_can_tell_is_named(lives: Stories) -> None:
    _, told = lives.killed("workers", "begin:7")
    assert "drew the order of the first epoch" in told


@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("process", "part:6"),
        pytest.param("evaluates", "eval:4", marks=pytest.mark.slow),
        pytest.param("best", "saving:8", marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_at_a_moment_no_step_is_lost(lives: Stories, plan: str, moment: str) -> None:
    facts, told = lives.killed(plan, moment, "--term", "--every", "100")
    assert facts["starts"] == [int(moment.partition(":")[2]) + moment.startswith("part")], told
    same(facts, lives.undisturbed(plan))


@pytest.mark.slow
def test_a_rank_that_is_killed_under_accelerate_launch_is_started_again_and_ends_undisturbed(lives: Stories) -> None:
    words = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --max_restarts 2"
    free_port = "--rdzv_backend c10d --main_process_port 0"
    launch = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", *words.split(), *free_port.split()]
    killed = lives.ranks(2, "evaluates", "eval:4", 1, launch)
    for facts, undisturbed in zip(killed, lives.ranks(2, "evaluates"), strict=True):
        assert facts["starts"][-1] > 0
        same(facts, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment", "of"), TWO)
def test_of_two_ranks_killed_both_end_undisturbed(lives: Stories, plan: str, moment: str, of: int) -> None:
    both_end_undisturbed_when_killed(lives, plan, moment, of, more="named")


@pytest.mark.parametrize("moment", ["begin:10", pytest.param("saving:8", marks=pytest.mark.slow)])
def test_saves_that_accelerate_names_by_number_go_on_behind_those_that_are_there(lives: Stories, moment: str) -> None:
    """Accelerate stops where the directory of the next number exists, and a new process would count from 0."""
    facts, _ = lives.killed("named", moment)
    same(facts, lives.undisturbed("named"), more="named")
    assert len(facts["named"]) == len(lives.undisturbed("named")["named"]) + (moment == "saving:8")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment", "step", "of"), [("process", "part:4", 5, 0), ("evaluates", "eval:4", 4, 1)])
def test_of_two_ranks_one_is_asked_to_stop_and_both_stop_behind_one_step_that_is_saved(
    lives: Stories, plan: str, moment: str, step: int, of: int
) -> None:
    """The other may be in a later step by then: they agree on one that none has passed."""
    both_stop_behind_one_step(lives, plan, moment, step, of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize("moment", [*AROUND, "step:12", "over:12"])
def test_of_two_ranks_killed_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, moment: str, of: int
) -> None:
    both_end_undisturbed_when_killed(lives, "best", moment, of)


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, -1], ids=["one", "all"])
@pytest.mark.parametrize("moment", [*AROUND, "step:12"])
def test_of_two_ranks_asked_to_stop_around_what_is_done_for_a_step_both_end_undisturbed(
    lives: Stories, moment: str, of: int
) -> None:
    step, is_end = int(moment.partition(":")[2]), moment == "step:12"
    both_end_undisturbed_when_stopped(lives, "best", moment, step, of, is_end=is_end)


@pytest.mark.slow
@pytest.mark.parametrize("whom", WHOM)
@pytest.mark.parametrize("plan", MATRIX)
def test_of_two_ranks_struck_at_a_drawn_moment_both_end_undisturbed(lives: Stories, plan: str, whom: str) -> None:
    least = 4 if plan == "workers" else 2  # not in the first epoch, whose order nobody can tell
    both_end_undisturbed_at_a_drawn_moment(lives, plan, whom, least=least)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "moment"), drawn(MATRIX, 0))
def test_asked_to_stop_at_any_moment_the_end_is_the_undisturbed_one(lives: Stories, plan: str, moment: str) -> None:
    ends_undisturbed_when_stopped(lives, plan, moment)
