"""The small GPT of `testing.gpt`, cut into pipeline stages: what benchmarks, tests and examples of pipelines train.

The first stage embeds bytes, the last one predicts them; blocks are dealt evenly. Nothing here knows holdfast.
"""

from __future__ import annotations

import math
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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of next bytes; `logits` [batch, length, vocabulary], `targets` int64 [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stage(shape: Shape, index: int, count: int, group: Any = None) -> PipelineStage:
    """The stage of this rank on the CPU, with weights that depend on `index` alone."""
    torch.manual_seed(index)
    return PipelineStage(GPTStage(shape, index, count), index, count, torch.device("cpu"), group=group)
