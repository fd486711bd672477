"""torchrun's agent with an orderly end, for commands that are not forked; `elastic.launch.agent` builds on it.

Two things differ from torch's own. When one worker failed its survivors are ended within seconds: they wait for a dead
peer, nothing is lost with them. And a signal to the launcher reaches the workers only, not their children (data
loaders), who are given time to save; SIGINT or SIGQUIT ends them at once then, another SIGTERM does nothing. Workers that a signal has stopped are continued
for that. Who of them hangs is not waited for (`_hang`), and `elastic.processes.exit_guard` sees to it that nothing else is.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig

from holdfast.elastic.processes.exit_guard import HURRY
from holdfast.elastic.watchdog import proc_stats
from holdfast.elastic.worker.kill_descendants import kill_group, was_given_away

logger = logging.getLogger(__name__)

POLL_S = 0.02
# How long workers that are to run again may take after SIGTERM before they are killed: what they hold is in the keeper.
SURVIVOR_GRACE_S = 5.0
# The same where the job stops, if nothing else is asked for: torchrun's.
STOP_GRACE_S = 30.0
# How long workers that are told to end may take to show that they are alive.
HEED_S = 10.0


def handed_on(number: int) -> signal.Signals:
    """Return what workers get of a signal to the launcher: a terminal that closes is a wish to end, at which they save."""
    return signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)


class BaseAgent(LocalElasticAgent):
    """Restarts all workers when one fails.

    Args:
        grace_s: how long workers may take to save when the job is told to end.

    Attributes:
        grace_s: the same.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, *, grace_s: float) -> None:
        known = inspect.signature(LocalElasticAgent.__init__).parameters
        optional = {name: getattr(config, name) for name in ("shutdown_timeout",) if name in known}
        super().__init__(
            spec=spec,
            logs_specs=config.logs_specs or DefaultLogsSpecs(),
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            **optional,
        )
        self.grace_s = grace_s
        given = getattr(config, "shutdown_timeout", None)
        self._stop_grace_s = STOP_GRACE_S if given is None else float(given)
        self._is_ending = False
        self._ends_by = 0  # the signal that told this launcher to end
        self._is_over = False
        self._told: set[int] = set()  # a script may take a second signal for "at once"

    # What the guard of the launcher's end asks, in a thread of its own.

    def is_ending(self) -> bool:
        return self._is_ending

    def any_lives(self) -> bool:
        return any(proc_stats.state(pid) not in ("", "Z", "X") for pid in self._unreaped())

    def tell(self, number: int) -> None:
        """Sends a signal to every worker that lives and has none yet, and continues those that are stopped."""
        for pid in self._unreaped():
            if pid in self._told:
                continue
            self._told.add(pid)
            for each in (handed_on(number), signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or became another user's
                    os.kill(pid, each)

    def kill(self) -> None:
        """Kills the workers and all that they started."""
        for pid in self._unreaped():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or is another user's
                os.killpg(pid, signal.SIGKILL)

    def ended_well(self) -> bool:
        codes = [process.returncode for process in self._processes()]
        return bool(codes) and not any(code != 0 for code in codes)

    def safe(self) -> str:
        """Returns what was saved, as far as workers told."""
        return "what was saved is in its storage"

    def _unreaped(self) -> list[int]:
        return [process.pid for process in self._processes() if process.returncode is None]

    def exit_code_after(self, sigval: signal.Signals) -> int:
        """0 if every worker ended well after the signal, else the shell's 128 + signal."""
        for process in self._processes():
            process.poll()
        return 0 if self.ended_well() else 128 + sigval

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = dict(super()._start_workers(worker_group))
        self._take_signals()
        return started

    def _take_signals(self) -> None:
        """Takes the signals that torch has just taken: its handler would break off the end at every one that is repeated."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.Signals:
            if getattr(signal.getsignal(number), "__module__", "") == SignalException.__module__:
                signal.signal(number, self._on_signal)

    def rest(self) -> None:
        """The job is over here, and its exit code is known: a signal changes nothing any more. The guard still hears it."""
        self._is_over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python gives both
        if self._is_over or (self._ends_by and number not in HURRY):
            return
        self._ends_by = number
        raise SignalException(f"process {os.getpid()} got {signal.strsignal(number)}", signal.Signals(number))

    def _raise_swallowed_signal(self) -> None:
        """Raise for a signal whose exception code that catches all has swallowed: it is raised wherever the main thread is.

        Raises:
            SignalException: one came, and the workers have not been told to end.
        """
        if self._ends_by and not self._is_ending:
            raise SignalException(f"process {os.getpid()} was told to end", signal.Signals(self._ends_by))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Facts of the workers. If one failed, its survivors are ended within our bound before torch looks."""
        self._raise_swallowed_signal()
        if any(process.poll() not in (None, 0) for process in self._processes()):
            # Noted before the survivors end, so that torch's report names the worker that failed first.
            getattr(self._pcontext, "_capture_process_failures", set)(set())
            self._end(signal.SIGTERM, self._survivor_grace_s())
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """Ends the workers: with time to save when the launcher was told to end, else quickly where they run again."""
        told = isinstance(sys.exc_info()[1], SignalException)
        try:
            self._end(death_sig, self.grace_s if told else self._survivor_grace_s(), told=told)
        except SignalException:
            logger.warning("another signal: the workers are ended at once")
            self._end(signal.SIGKILL, SURVIVOR_GRACE_S)
        super()._shutdown(death_sig, *args, **kwargs)

    def _survivor_grace_s(self) -> float:
        """Return how long workers may take to end because another one failed: a job that stops waits as torchrun does."""
        return SURVIVOR_GRACE_S if self._remaining_restarts > 0 else self._stop_grace_s

    def _end(self, death_sig: signal.Signals, grace_s: float, *, told: bool = False) -> None:
        """Signals each living worker, not its children; after `grace_s` whatever is left of its process group dies."""
        processes = self._processes()
        death_sig = handed_on(death_sig)
        if told:
            logger.warning(
                "the workers have %.0f s to save and end (--shutdown-timeout); SIGINT ends them at once",
                grace_s,
            )
        for process in processes:
            if told and process.pid in self._told:
                continue
            if process.poll() is None and (death_sig == signal.SIGKILL or process.pid not in self._spared()):
                process.send_signal(death_sig)
                if told:
                    self._told.add(process.pid)
                    process.send_signal(signal.SIGCONT)  # one that is stopped can neither save nor end
        self._is_ending = self._is_ending or told
        began = time.monotonic()
        while any(process.poll() is None for process in processes) and (now := time.monotonic()) - began < grace_s:
            if told and now - began > HEED_S and (why := self._hang(now)):
                logger.error("%s: they are not waited for any longer", why)
                break
            time.sleep(POLL_S)
        for process in processes:
            if was_given_away(process.pid, process.returncode):
                continue
            if told or process.poll() != 0:  # what one that ended well has left in the background is the script's own
                kill_group(process.pid)

    def _hang(self, now: float) -> str:  # noqa: ARG002 - of an agent that sees its workers
        """Returns why no worker that lives will save or end any more; empty if one may."""
        return ""

    def _spared(self) -> set[int]:
        """Process ids that end by themselves."""
        return set()

    def _processes(self) -> list[Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        return [handler.proc for handler in list(handlers.values())]
