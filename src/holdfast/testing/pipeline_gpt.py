"""The small GPT of `testing.gpt`, cut into pipeline stages: what benchmarks, tests and examples of pipelines train.

The first stage embeds bytes, the last one predicts them; blocks are dealt evenly. Nothing here knows holdfast.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from holdfast.testing.gpt import Block, Shape


class GPTStage(nn.Module):
    """Stage `index` of `count`: int64 [batch, length] or activations in, activations or logits out."""

    def __init__(self, shape: Shape, index: int, count: int) -> None:
        super().__init__()
        first, last = shape.layers * index // count, shape.layers * (index + 1) // count
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if index == 0 else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(first, last))
        self.head = nn.Linear(shape.width, shape.vocabulary) if index == count - 1 else None
        self.scale = math.sqrt(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch."""
        if self.embedding is not None:
            x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


class Sleep(torch.autograd.Function):
    """Waits so many seconds, forward and backward, and passes on what it was given.

    Compute of known length that leaves the processor alone, as an accelerator does.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class SleepingStage(nn.Module):
    """The same state as a `GPTStage`; its blocks only take time."""

    def __init__(self, stage: GPTStage, seconds: float) -> None:
        super().__init__()
        self.stage = stage
        self.seconds = seconds
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch."""
        if self.stage.embedding is not None:
            x = self.stage.embedding(x) * self.stage.scale
        x = Sleep.apply(x, self.seconds)  # type: ignore[no-untyped-call]  # torch's
        return self.stage.head(x) if self.stage.head is not None else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of next bytes; `logits` [batch, length, vocabulary], `targets` int64 [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stage(shape: Shape, index: int, count: int, group: Any = None, *, sleep_s: float = 0.0) -> PipelineStage:
    """The stage of this rank on the CPU, with weights that depend on `index` alone.

    With `sleep_s` its blocks sleep so many seconds instead of computing, per micro-batch and direction.
    """
    torch.manual_seed(index)
    computing = GPTStage(shape, index, count)
    part = SleepingStage(computing, sleep_s) if sleep_s else computing
    return PipelineStage(part, index, count, torch.device("cpu"), group=group)
