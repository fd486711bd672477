"""Watches the steps of one run of a script: writes each down, kills its process where that was drawn, and lets no checkpoint lie where
others may be.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.base.errors import UsageError
from holdfast.base.events import Event, Events
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.worker_main import Runner
from holdfast.testing.prove.run_notes import BEFORE, NOTES_VARIABLE, RunNotes
from holdfast.testing.prove.step_digests import OptimizerParts, random_digest
from holdfast.testing.prove.step_log import Made, Parts, Said, StepLog


class WatchedScript:
    """Runs a script and writes down what its optimizers leave.

    Args:
        events: what of holdfast is written down besides.
    """

    def __init__(self, script: Callable[[RunOrder], None], events: Events) -> None:
        self._script, self._events = script, events

    def __call__(self, order: RunOrder) -> None:
        """Runs the order's script."""
        watch = Watch(RunNotes.parse(order.environment[NOTES_VARIABLE]), int(order.environment.get("RANK", "0")))
        self._events.subscribe(watch.hear)
        wish = open_checkpointers.wish
        told = wish.works_on

        def works_on(root: str, job: str) -> None:
            watch.allow(root)
            told(root, job)

        wish.works_on = works_on
        try:
            self._script(order)
        finally:
            wish.works_on = told
            watch.close()


class Watch:
    """Watches one run of a script in one process."""

    def __init__(self, notes: RunNotes, rank: int) -> None:
        self._notes, self._rank, self._pid = notes, rank, os.getpid()
        self._entry = self._order()
        self._begin()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._behind),
        ]

    def _begin(self) -> None:
        self._log: StepLog | None = StepLog(Path(self._notes.log), self._rank)
        self._made = 0
        self._parts: weakref.WeakKeyDictionary[Optimizer, tuple[int, OptimizerParts]] = weakref.WeakKeyDictionary()
        self._names: dict[int, list[str]] = {}

    def hear(self, event: Event) -> None:
        if self._log is not None and os.getpid() == self._pid:
            self._log.write(Said(event.name, event.fields))

    def allow(self, root: str) -> None:
        """Returns if checkpoints may lie there.

        Raises:
            UsageError: it is no place of this run.
        """
        if not any(root == place or root.startswith(place + os.sep) for place in self._notes.places):
            self.hear(Event("foreign_root", 0.0, {"root": root}))
            raise UsageError(
                "a script that is proved keeps its checkpoints in a new directory in each run",
                where=root,
                remedy="write {dir} in the script's arguments, or give --fresh-copy where the path is relative",
            )

    def close(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()
        if self._log is not None:
            self._log.close()
        self._log = None

    @staticmethod
    def _order() -> int:
        runner = Runner.current
        return runner.running.number if runner is not None and runner.running is not None else 0

    def _before(self, *_: Any) -> None:
        if os.getpid() == self._pid and self._notes.moment == BEFORE:
            self._die_at(self._made + 1)

    def _behind(self, optimizer: Optimizer, *_: Any) -> None:
        if os.getpid() != self._pid or self._log is None:
            return  # a process that the script, or a rehearsal, has forked
        if self._entry != self._order():  # a resumable function was entered again
            self._log.close()
            self._entry = self._order()
            self._begin()
        number, parts = self._parts.get(optimizer, (-1, None))
        if parts is None or not parts.fits(optimizer):
            number, parts = len(self._names), OptimizerParts(optimizer)
            self._parts[optimizer] = number, parts
        found = parts.look(optimizer)
        names = [name for name, _ in found]
        if self._names.get(number) != names:
            self._names[number] = names
            self._log.write(Parts(number, parts.label, names))
        self._log.write(Made(number, b"".join(each for _, each in found), random_digest()))
        self._made += 1
        if self._notes.moment != BEFORE:
            self._die_at(self._made)

    def _die_at(self, step: int) -> None:
        if self._log is not None and self._log.life == 0 and (self._rank, step) == (self._notes.rank, self._notes.step):
            os.kill(self._pid, signal.SIGKILL)
