"""What something costs in calls of a function that does nothing: a measure that a shared machine's slow moments leave alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

CALLS = 10_000


def worth(work: Callable[[], object], *, rounds: int = 20) -> float:
    """How many such calls cost the processor what `work` costs: each held against calls of the same moment, the median.

    A call in a loop takes 35 to 50 ns of a processor of this decade.
    """
    shares = []
    gc.collect()
    gc.disable()  # it looks at all that earlier tests left
    try:
        for _ in range(rounds):
            began = time.thread_time()
            work()
            worked, began = time.thread_time() - began, time.thread_time()
            for _ in range(CALLS):
                _nothing()
            shares.append(CALLS * worked / (time.thread_time() - began))
    finally:
        gc.enable()
    return median(shares)


def _nothing() -> None:
    pass
