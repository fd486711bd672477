"""The rig of the fault drill, under the name by which the tests of nodes know it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.testing.faults.rig import (
    TIMEOUT_S,
    Rig,
    Trainer,
    bundles_of,
    image_of,
    reached,
    save_all,
    start_hurtable,
)

__all__ = [
    "TIMEOUT_S", "Rig", "Trainer", "bundles_of", "eventually", "image_of", "reached", "rig_in", "save_all", "start_hurtable",
]  # fmt: skip


def eventually(check: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Polls a fact that only shows from outside (a file, a process, a status page) until it holds."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() >= deadline:
            raise AssertionError("it did not happen in time")
        time.sleep(0.01)


@contextlib.contextmanager
def rig_in(base: Path, **options: Any) -> Iterator[Rig]:
    """A rig whose processes end with the block."""
    rig = Rig(base, **options)
    try:
        yield rig
    finally:
        rig.close()
