"""The rig of the fault drill, under the name by which the tests of nodes know it."""

from __future__ import annotations

from holdfast.testing.faults.rig import (
    TIMEOUT_S,
    Rig,
    Trainer,
    bundles_of,
    eventually,
    image_of,
    reached,
    rig_in,
    save_all,
    start_hurtable,
)

__all__ = [
    "TIMEOUT_S", "Rig", "Trainer", "bundles_of", "eventually", "image_of", "reached", "rig_in", "save_all", "start_hurtable",
]  # fmt: skip
