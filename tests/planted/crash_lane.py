"""A lane of the crash drill whose keepers may have a bug planted: `python -m holdfast.testing.drill.lane` otherwise."""

from __future__ import annotations

import os

from holdfast.testing.drill import lane, shared, trial_processes
from planted.crash import IN_KEEPERS

if __name__ == "__main__":
    shared.PLANTS.update(IN_KEEPERS)
    trial_processes.FORKSERVER = "planted.crash_forkserver"
    os._exit(lane.main())  # nothing is left to clean up
