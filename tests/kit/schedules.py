"""Save schedules with a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from holdfast.checkpoint.pipeline import schedule_actions

# In torch 2.10 a V-shaped schedule sends from a rank to itself before its first step, which gloo does not.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
NO_V = not hasattr(PipelineStage, "_is_same_rank")
WHY_NO_V = "stages of this PyTorch send to their own rank, and gloo cannot"
NAMES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class Work:
    def wait(self) -> None:
        pass


def nothing(*_: object, **__: object) -> None:
    pass


def schedule_of(model: nn.Module) -> Any:
    """The first of two ranks of a pipeline; a step waits as often as it is told, and computes nothing."""
    stage = SimpleNamespace(
        **{**vars(schedule_actions._stage(0, 2, 1)), **dict.fromkeys(NAMES, nothing), "submod": model}
    )
    return Waiting(stage, 4, loss_fn=nn.functional.mse_loss)


class Waiting(schedules.Schedule1F1B):
    def step(self, num_waits: int, **_: object) -> None:
        for _ in range(num_waits):
            schedules._wait_batch_p2p([Work()])
