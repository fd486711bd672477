"""The fork server of such a lane: its trainers may have a bug planted."""

from __future__ import annotations

import os

from holdfast.testing.drill import shared, trainer_forkserver
from planted.crash_trainer import IN_TRAINERS

if __name__ == "__main__":
    shared.PLANTS.update(IN_TRAINERS)
    os._exit(trainer_forkserver.main())  # taking PyTorch apart takes most of a second, in each fork server
