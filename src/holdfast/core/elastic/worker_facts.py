"""The facts about one worker that the watchdog judges: what it wrote of itself, and what the kernel and its stack show.

Values only. Written by checkpoint.liveness.heartbeat_page and elastic.watchdog.watchdog, read by core.elastic.failure_detector and core.elastic.worker_activity.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

# Some of what `WorkerSample.waits_in` may say. Who is held by a person is left alone.
DEBUGGER, PERSON, SLEEP = "a debugger", "a person at a terminal", "a time that it has set itself"
HELD = (DEBUGGER, PERSON)


class Phase(enum.IntEnum):
    """A rank's occupation, as far as it says."""

    START = 0
    COMPILE = 1
    STEP = 2
    COLLECTIVE = 3
    DATA = 4
    EVALUATION = 5
    SAVING = 6
    LOADING = 7


# Phases of which every step has some: their limits are learned from it.
STEPPING = (Phase.STEP, Phase.COLLECTIVE, Phase.DATA)


@dataclass(frozen=True, slots=True)
class Beat:
    """Holds what a worker wrote into its page, and what its page tells of the past.

    Attributes:
        changes: grows with every sign of progress; 0 means that it never wrote.
        step: optimizer steps that it finished.
        collective: the one that it stands in or stood in last; empty if none is known.
        sequence: how many collectives it has entered, of whatever group.
        inside: whether it has not left it yet.
        p99_s, samples: per phase, what passed between two signs of progress.
        longest_s: per phase, the longest such pause that ended.
        step_p99_s: what a whole step takes.
        settled: whether it trains: it made an optimizer step, or many collectives for long.
        group_s: the longest time limit that the script itself gave to a process group; 0: it left that to torch.
    """

    changes: int = 0
    step: int = 0
    phase: Phase = Phase.START
    collective: str = ""
    sequence: int = 0
    inside: bool = False
    p99_s: Mapping[Phase, float] = field(default_factory=dict)
    samples: Mapping[Phase, int] = field(default_factory=dict)
    step_p99_s: float = 0.0
    longest_s: Mapping[Phase, float] = field(default_factory=dict)
    settled: bool = True
    group_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """Holds what the kernel shows of one process at one moment. Counters run from its start.

    Attributes:
        state: the kernel's letter: R running, S sleeping, D waiting for a device, T stopped, t held by a debugger, Z ended;
            and F: its control group is frozen.
        busy_s: processor seconds of its main thread; `spent_s`: of all its threads, as a collective that moves bytes spends
            some; `family_s`: of all processes that descend from it.
        starved_s: seconds that its main thread was ready and got no processor.
        wakes: how often its main thread went to sleep by itself.
        file_bytes: what it and its descendants read and wrote through files and pipes, pages from disks included.
        socket_bytes: what its TCP connections and those of its descendants sent and received; None: not known.
        memory_bytes: what it and its descendants hold in memory.
        device: it has an accelerator open, for which it may wait in ways that nothing here shows.
        waits_in: what its stack or its system call shows it waiting for of its own will; empty if nothing is known.
        call: the system call that its main thread waits in, or, if that is at a lock, one in which another of its threads waits
            for somebody outside. Empty for a lock or a driver alone, in which hangs stand too, or if its stack shows a
            phase that accounts for it.
        catches: the signals that it handles, as the kernel's mask.
    """

    state: str = "S"
    busy_s: float = 0.0
    spent_s: float = 0.0
    family_s: float = 0.0
    starved_s: float = 0.0
    wakes: int = 0
    file_bytes: int = 0
    socket_bytes: int | None = None
    memory_bytes: int = 0
    device: bool = False
    waits_in: str = ""
    call: str = ""
    catches: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSample(ProcessStats):
    """Holds what is seen of one worker at one moment.

    Attributes:
        stands: where its last stack dump shows it: a phase, or None if there is no dump of this silence.
        places: the innermost frames of each stack dump of this silence.
    """

    rank: int
    beat: Beat
    _: KW_ONLY
    stands: Phase | None = None
    places: tuple[str, ...] = ()
