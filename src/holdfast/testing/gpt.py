"""A small GPT over bytes and a shuffled text to train it on: the real training that demo, benchmarks and examples share.

No download: the text is Python's own help (`pydoc_data.topics`, about 700 KB). Dropout draws from torch's global
generator and the windows come in a shuffled order, so a job that comes back with a wrong random state or a wrong
position ends at other weights. Nothing here knows holdfast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model. The default makes a step of some 70 ms with four ranks on two cores."""

    vocabulary: int = 256
    width: int = 96
    layers: int = 2
    heads: int = 4
    context: int = 64
    dropout: float = 0.1


class Block(nn.Module):
    """Attention and feed-forward with residuals: twelve parameters."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))), self.dropout, self.training)


class ByteGPT(nn.Module):
    """Next-byte prediction; the output layer shares the embedding. `forward` gives the mean loss of a batch."""

    positions: Tensor

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        shape = shape or Shape()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.register_buffer("positions", _sinusoids(shape.context, shape.width), persistent=False)
        self.width = shape.width

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Args: inputs, targets: int64 [batch, length]."""
        x = self.embedding(inputs) * math.sqrt(self.width) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(F.layer_norm(x, (self.width,)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Text:
    """Shuffled windows of Python's help text, dealt over the ranks; iterating never ends, every epoch shuffles anew.

    `state_dict` holds epoch and position, so a restored loader goes on with the next window.
    """

    def __init__(self, *, context: int = 64, batch: int = 8, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        raw = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self._bytes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._context, self._batch, self._seed = context, batch, seed
        self._rank, self._world_size = rank, world_size
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def __iter__(self) -> Text:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, context] each."""
        step = self._batch * self._world_size
        if (self._position + 1) * step > len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        first = self._position * step + self._rank * self._batch
        starts = self._order[first : first + self._batch] * self._context
        self._position += 1
        windows = self._bytes[starts[:, None] + torch.arange(self._context + 1)].long()
        # A pipeline of torch 2.10 takes only inputs whose strides are those of their shape.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> Tensor:
        windows = (len(self._bytes) - 1) // self._context
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(windows, generator=generator)


def _sinusoids(length: int, width: int) -> Tensor:
    """Fixed position signals, [length, width] (Vaswani et al. 2017, section 3.5)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
