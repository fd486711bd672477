"""Checkpointers of one process with a real keeper, and what tests do to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import holdfast
from keeper.rig import eventually
from keepers_kit import wait_ended

Make = Callable[..., holdfast.Checkpointer]


class Trainee:
    """A small model with everything that has state: two optimizers, scheduler, scaler, dropout, a loader."""

    def __init__(self, width: int = 32) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 4)
        )
        first, *rest = self.model.parameters()
        self.optimizers = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.SGD([first], lr=1e-2, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.loader = Loader()

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizers, "scheduler": self.scheduler,
            "scaler": self.scaler, "loader": self.loader,
        }  # fmt: skip

    def train(self, micro_batches: int = 2) -> float:
        """One step with gradient accumulation."""
        total = 0.0
        for _ in range(micro_batches):
            loss = self.model(torch.randn(8, 16) + self.loader.take()).square().mean()
            self.scaler.scale(loss).backward()
            total += loss.item()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.scheduler.step()
        return total

    def fingerprint(self) -> bytes:
        """All bytes of parameters, buffers and moments."""
        tensors = [*self.model.state_dict().values()]
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                tensors += [t for _, t in sorted(optimizer.state.get(parameter, {}).items()) if torch.is_tensor(t)]
        return b"".join(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def take(self) -> int:
        self.position += 1
        return self.position % 3

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.fixture
def make(tmp_path: Path, runtime_dir: Path) -> Iterator[Make]:
    """Builds checkpointers; whatever is still open at the end is left without a save, and its keeper ends."""
    made: list[holdfast.Checkpointer] = []

    def build(trainee: Trainee | None = None, *, path: Path | None = None, **options: Any) -> holdfast.Checkpointer:
        names = {field: options.pop(field) for field in tuple(options) if field in CONFIG_FIELDS}
        settings: dict[str, Any] = {"every": "0", "durable_every": "0", "linger_s": 1.0, **names}
        config = holdfast.Config(runtime_dir=str(runtime_dir), **settings)
        objects = trainee.objects() if trainee is not None else {}
        checkpointer = holdfast.Checkpointer(path or tmp_path / "job", config=config, **{**objects, **options})
        made.append(checkpointer)
        return checkpointer

    yield build
    for checkpointer in made:
        checkpointer.abandon()


CONFIG_FIELDS = {
    "stop_file",
    "keep_every",
    "memory_budget",
    "require_memory",
    "fence_timeout_s",
    "begin_timeout_s",
    "num_slots",
    "linger_s",
    "close_timeout_s",
    "expect_checkpoint",
    "encryption_key",
    "encryption_required",
}


def leave(checkpointer: holdfast.Checkpointer) -> None:
    """Ends without a save, as an exception in training does."""
    checkpointer.abandon()


def kill_keeper(checkpointer: holdfast.Checkpointer) -> None:
    """SIGKILL to the keeper; returns when it is gone and this rank has noticed: a save then asks for a new one."""
    client = checkpointer._run.link.require()  # type: ignore[union-attr]
    keeper = psutil.Process(client.welcome.pid)
    keeper.kill()
    wait_gone(keeper)
    eventually(lambda: not client.alive)


def wait_gone(process: psutil.Process) -> None:
    """Returns when a process that is not our child has ended."""
    assert not wait_ended([process])
