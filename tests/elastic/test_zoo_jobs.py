"""Some of the zoo through a Checkpointer, a keeper and storage: a save at every step, an end without one, a new start."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.errors import MismatchError, UsageError
from sample_kit import MORE, sampled
from zoo_kit import AFTER, BEFORE, Make
from zoo_modules import Beside
from zoo_optimizers import Accelerated, Forgets, Hollow, Lookahead, Sam, Shampoo, both_hooks, post_local


def job_of(make_optimizer: Callable[[nn.Module], Any], *, closure: bool = False) -> Make:
    def make() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        torch.manual_seed(7)
        model = Beside(torch.tensor([0.5]).expand(5))
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)

        def step() -> torch.Tensor:
            x = torch.randn(4, 6)

            def loss() -> torch.Tensor:
                model.zero_grad()
                value = model(x).square().mean()
                value.backward()
                return value

            value = loss()
            optimizer.step(loss) if closure else optimizer.step()
            scheduler.step()
            return value.detach()

        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step

    return make


JOBS: dict[str, Make] = {
    "state_dict of its own, wrapped": job_of(lambda m: Accelerated(Lookahead(m.parameters(), momentum=0.9))),
    "an optimizer inside": job_of(lambda m: Sam(m.parameters()), closure=True),
    "hooks of both directions": job_of(both_hooks),
    "torch's own wrapper": job_of(post_local),
    "memory that lies otherwise": job_of(lambda m: Shampoo(m.parameters())),
}


def checkpointer(root: Path, runtime_dir: Path, objects: dict[str, Any], **options: Any) -> holdfast.Checkpointer:
    config = holdfast.Config(runtime_dir=str(runtime_dir), every="1", durable_every="12", linger_s=1.0)
    return holdfast.Checkpointer(root, config=config, **objects, **options)


@pytest.mark.parametrize(
    ("lost", "kind"),
    sampled(
        product(["process", "memory"], sorted(JOBS)),
        ("memory", "an optimizer inside"),
        ("process", "hooks of both directions"),
        ("process", "torch's own wrapper"),
    ),
)
def test_a_job_comes_back_bit_for_bit(kind: str, lost: str, tmp_path: Path, runtime_dir: Path) -> None:
    objects, step = JOBS[kind]()
    expected = [step() for _ in range(BEFORE + AFTER)]

    objects, step = JOBS[kind]()
    job = checkpointer(tmp_path / "job", runtime_dir, objects)
    assert job.restore() == 0
    for number in range(BEFORE):
        assert torch.equal(step(), expected[number])
        handle = job.step(number)
        assert handle is not None
    handle.wait("durable" if lost == "memory" else "captured", 20)
    assert job._run is not None
    assert job._run.saver.fence.num_steps >= BEFORE, "the fence stands before every step"
    job.abandon()

    objects, step = JOBS[kind]()
    runtime = runtime_dir / "other" if lost == "memory" else runtime_dir
    runtime.mkdir(mode=0o700, exist_ok=True)
    job = checkpointer(tmp_path / "job", runtime, objects)
    assert job.restore() == BEFORE
    assert [torch.equal(step(), expected[number]) for number in range(BEFORE, BEFORE + AFTER)] == [True] * AFTER
    job.abandon()


def test_a_wrapper_that_is_not_understood_is_refused_by_restore(tmp_path: Path, runtime_dir: Path) -> None:
    model = nn.Linear(2, 2)
    job = checkpointer(tmp_path / "job", runtime_dir, {"model": model, "optimizer": Hollow(model.parameters())})
    with pytest.raises(UsageError, match=r"Hollow never called Optimizer.__init__"):
        job.restore()
    job.abandon()


@MORE
def test_what_is_not_taken_back_ends_the_restore_unless_it_is_not_strict(tmp_path: Path, runtime_dir: Path) -> None:
    def forgetting() -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
        return job_of(lambda m: Forgets(m.parameters()))()

    objects, step = forgetting()
    job = checkpointer(tmp_path / "job", runtime_dir, objects)
    job.restore()
    step()
    job.save(0, "durable").wait("durable", 60)
    job.abandon()
    job = checkpointer(tmp_path / "job", runtime_dir, forgetting()[0])
    with pytest.raises(MismatchError, match=r"did not take back k"):
        job.restore()
    job.abandon()
    job = checkpointer(tmp_path / "job", runtime_dir, forgetting()[0])
    assert job.restore(strict=False) == 1
    assert job.last_restore is not None
    assert "did not take back k" in job.last_restore.misfit[0]
    job.abandon()
