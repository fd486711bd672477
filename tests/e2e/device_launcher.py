"""The launcher, and one more mode of its watchdog: `short` is `quick` with a minute where that has half an hour.

A device that hangs in a start, a restore, a save or an evaluation is found in a test as it is found in a job, and sooner.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from holdfast.core.elastic.watch_mode import MODES
from holdfast.core.elastic.worker_facts import Phase
from holdfast.elastic.launch import run_command, run_flags
from holdfast.elastic.watchdog import watchdog

LONG_S = 60.0
quick = MODES["quick"]
phases = (Phase.START, Phase.COMPILE, Phase.LOADING, Phase.SAVING, Phase.EVALUATION)
floors = dict.fromkeys(phases, (LONG_S, LONG_S))
floors |= {phase: (low, LONG_S) for phase, (low, _) in quick.floors_s.items() if phase not in phases}
# Of the modules that read the modes: they may be imported already, in a process that was forked.
run_flags.MODES = watchdog.MODES = {**MODES, "short": replace(quick, name="short", floors_s=floors)}

if __name__ == "__main__":
    sys.exit(run_command.main())
