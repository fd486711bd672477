"""torchrun's agent with an orderly end, for commands that are not forked; `train.agent` builds on it.

Two things differ from torch's own. When one worker failed its survivors are ended within seconds: they wait for a dead
peer, nothing is lost with them. And a signal to the launcher reaches the workers only, not their children (data
loaders), who are given time to save; a second signal ends them at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

POLL_S = 0.02
# How long workers that are to be ended may take after SIGTERM before they are killed: what they hold is in the keeper.
SURVIVOR_GRACE_S = 5.0


class PlainAgent(LocalElasticAgent):
    """Restarts all workers when one fails.

    Args:
        grace_s: how long workers may take to save when the job is told to end.
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
        self._grace_s = grace_s

    def exit_code_after(self, sigval: signal.Signals) -> int:
        """0 if every worker ended well after the signal, else the shell's 128 + signal."""
        codes = [process.poll() for process in self._processes()]
        return 0 if codes and all(code == 0 for code in codes) else 128 + sigval

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Facts of the workers. If one failed, its survivors are ended within our bound before torch looks."""
        if any(process.poll() not in (None, 0) for process in self._processes()):
            # Noted before the survivors end, so that torch's report names the worker that failed first.
            getattr(self._pcontext, "_capture_process_failures", set)(set())
            self._end(signal.SIGTERM, SURVIVOR_GRACE_S)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """Ends the workers: with time to save when the launcher was told to end, else quickly."""
        told = isinstance(sys.exc_info()[1], SignalException)
        try:
            self._end(death_sig, self._grace_s if told else SURVIVOR_GRACE_S)
        except SignalException:
            logger.warning("second signal: the workers are ended at once")
            self._end(signal.SIGKILL, SURVIVOR_GRACE_S)
        super()._shutdown(death_sig, *args, **kwargs)

    def _end(self, death_sig: signal.Signals, grace_s: float) -> None:
        """Signals each living worker, not its children; after `grace_s` whatever is left of its process group dies."""
        processes = self._processes()
        for process in processes:
            if process.poll() is None and (death_sig == signal.SIGKILL or process.pid not in self._spared()):
                process.send_signal(death_sig)
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the group is gone: the worker and all its children ended

    def _spared(self) -> set[int]:
        """Process ids that end by themselves."""
        return set()

    def _processes(self) -> list[Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", None) or {}
        return [handler.proc for handler in handlers.values()]
