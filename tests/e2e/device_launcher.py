"""The launcher, and one more mode of its watchdog: `short` is `quick` with a minute where that has half an hour.

A device that hangs in a start, a restore, a save or an evaluation is found in a test as it is found in a job, and sooner.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from holdfast.core.elastic import watch_mode
from holdfast.core.elastic.worker_facts import Phase

LONG_S = 60.0
quick = watch_mode.MODES["quick"]
phases = (Phase.START, Phase.COMPILE, Phase.LOADING, Phase.SAVING, Phase.EVALUATION)
floors = dict.fromkeys(phases, (LONG_S, LONG_S))
floors |= {phase: (low, LONG_S) for phase, (low, _) in quick.floors_s.items() if phase not in phases}
watch_mode.MODES = {**watch_mode.MODES, "short": replace(quick, name="short", floors_s=floors)}

from holdfast.elastic.launch import run_command  # noqa: E402 - it reads the modes

if __name__ == "__main__":
    sys.exit(run_command.main())
