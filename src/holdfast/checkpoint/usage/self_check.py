"""`Checkpointer(..., prove=True)`: the first steps are made a second time as a restart would make them, and compared.

The child of `replay_check.py` is forked where `restore()` begins, so it is what a script that was started again is at that call; in it
`restore()` returns the number behind the version that it was given, and the script goes on with the lines that it has. What is
compared are everything that a version holds, and the names of the loop that live from step to step: these are named first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import xxhash
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.base.errors import UsageError
from holdfast.checkpoint.state import unsaved_state
from holdfast.checkpoint.state.loop_values import CarriedPart
from holdfast.checkpoint.state.step_observer import register_skipped_step_hook
from holdfast.checkpoint.state.training_state import State
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.loop_analysis import around
from holdfast.checkpoint.usage.replay_check import COMPARED, SelfCheck

logger = logging.getLogger(__name__)


class Proof:
    """One proof.

    Args:
        objects: what is given to the Checkpointer, by name.
        state: makes, or finds, the state of it.
        says: whether this rank speaks for the job.

    Attributes:
        is_child: whether this process is the one that makes the steps a second time.
    """

    def __init__(self, objects: Mapping[str, Any], state: Callable[[], State], *, says: bool) -> None:
        self._says = says
        self._check = SelfCheck(state, clock=False)
        self._steps = self._seen = 0
        self._living: dict[str, str] = {}
        self._changed: set[str] = set()
        self.is_child = False
        self._handles = [
            register_optimizer_step_post_hook(self._count),
            register_skipped_step_hook(self._skipped),
        ]
        self._check.begin(objects)
        self.is_child = self._check.child
        self._tell_why()

    def resume(self) -> int:
        """Waits for a version, in the child, and takes it over; returns the step to go on with."""
        return self._check.taken() + 1

    @property
    def carried(self) -> CarriedPart:
        """The values that the loop carries, in the child."""
        return self._check.state().carried

    def again(self, step: int, carry: Mapping[str, Any], frame: FrameType) -> None:
        """Notes a step of the child; the process ends behind the last one that is compared."""
        self.carried.give(step, carry)
        self._check.state().gradients.note()
        if self._stepped():
            self._check.told(_living(frame))

    def made(self, step: int, frame: FrameType) -> None:
        """Tells of a step of the script.

        Raises:
            UsageError: the steps were made otherwise after a restart; names what differs.
        """
        if not self._stepped():
            return
        before, self._living = self._living, _living(frame)
        self._changed |= {name for name, token in self._living.items() if before.get(name, token) != token}
        name = self._check.made(step, self._living)
        if name:
            self.end()
            raise UsageError(
                f"these lines are not right: made again as after a restart, step {step} or one before differs in {name!r}",
                where=", ".join(f"{each} lives on and is in no version" for each in sorted(self._changed)),
                remedy="give the Checkpointer what the steps depend on, or carry it; a script that differs from run to run "
                "cannot be proven",
            )
        if self._check.pending:
            return
        if self._says and not self._check.reason:
            logger.info("%d steps were made again as after a restart, and were the same", COMPARED)
        self._tell_why()
        self.end()

    def leave(self) -> None:
        """The script closes its Checkpointer, in the child: nothing more of it runs."""
        self._check.tell()

    def end(self) -> None:
        """Compares nothing more; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._check.end()

    def _stepped(self) -> bool:
        seen, self._seen = self._seen, self._steps
        return seen != self._steps

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps += 1
        state = self._check.state() if self.is_child else None  # which nobody else tells there
        if state is not None and any(optimizer is each for each in state.optimizers):
            state.stepped(optimizer)

    def _skipped(self, optimizer: Optimizer) -> None:
        state = self._check.state() if self.is_child else None
        if state is not None and any(optimizer is each for each in state.optimizers):
            state.stepped(optimizer, made=False)

    def _tell_why(self) -> None:
        if self._check.reason and self._says:
            logger.warning(
                "the first steps are not proven: %s. Prove a small job once: one rank on a CPU, without a process group, "
                "OMP_NUM_THREADS=1, no files written and no workers started in the first steps",
                self._check.reason,
            )


def _living(frame: FrameType) -> dict[str, str]:
    """Returns digests of the names of the user's loop that live from one step to the next, by name and line."""
    user = user_frames.users(frame)
    found = around(user_frames.text(user), user.f_lineno) if user is not None else None
    if user is None or found is None:
        return {}
    now = user_frames.names(user)
    tokens = {f"{name} (line {line})": unsaved_state.token(now.get(name)) for name, line in found.lives.items()}
    return {name: xxhash.xxh3_128_hexdigest(repr(token).encode()) for name, token in tokens.items()}
