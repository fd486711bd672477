"""A sampler of a script's own, for stories. Not a test itself."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch


class Drawn(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Rows in an order that depends on the orders before it: a generator of its own, a count, a list that is shuffled in place."""

    def __init__(self, number: int) -> None:
        self.rows, self.epoch, self.numbers = list(range(number)), 0, np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.rows)
        cut = int(self.numbers.integers(len(self.rows))) + self.epoch
        yield from (self.rows[(row + cut) % len(self.rows)] for row in range(len(self.rows)))
