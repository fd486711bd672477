"""The kept loop at run time: looks at what is there when it begins, restores, saves after every step, ends in good order.

Put into the script under the name `script.HOOK`. What it may never do: change how a script runs that it does not keep.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.adapters.door import Checkpointer
from holdfast.adapters.zero.objects import Kept, sort_out
from holdfast.adapters.zero.script import Loop
from holdfast.base.errors import UsageError
from holdfast.train import agree, alive

logger = logging.getLogger(__name__)

# What it means that a loop which trains is not kept, and what to do.
UNKEPT = (
    "it runs as under torchrun: nothing of it is saved, and a restart begins it anew; "
    "holdfast.Checkpointer in the script keeps it"
)


class KeptLoop:
    """What the loop of one script iterates over.

    Args:
        loop: what the text of the script told.
        root: directory or URL of the checkpoints.

    Attributes:
        back: whether the coming step is the first one after a restore, and has values to take.
    """

    def __init__(self, loop: Loop, root: str) -> None:
        self._loop = loop
        self._root = root
        self._begun = False
        self._values: tuple[Any, ...] = ()
        self.back = False

    def take(self) -> tuple[Any, ...]:
        """The carried values of the version, once."""
        self.back = False
        return self._values

    def __call__(self, steps: range) -> Iterator[int]:
        """The numbers that are left of `steps`."""
        frame = sys._getframe(1)
        names = lambda: {**frame.f_globals, **frame.f_locals}  # noqa: E731 - f_locals is made anew at every look
        checkpointer = None if self._begun else self._begin(names)
        self._begun = True
        return iter(steps) if checkpointer is None else self._kept(steps, checkpointer)

    def _begin(self, names: Callable[[], Mapping[str, Any]]) -> Checkpointer | None:
        """A Checkpointer of what is there; None, and a reason told, if anything is unsure on any rank."""
        try:
            group = agree.ranks()
        except UsageError as error:
            say(str(error.what))
            return None
        found = sort_out(self._loop.used, self._loop.carried, names())
        if any(isinstance(thing, Checkpointer) for thing in alive.opened()):
            found = "the script has a Checkpointer of its own"
        told = agree.gather_json(group, found if isinstance(found, str) else "")
        reasons = [f"rank {rank}: {reason}" if len(told) > 1 else reason for rank, reason in enumerate(told) if reason]
        if isinstance(found, str) or reasons:
            if group.rank == 0:
                say(f"this script is not kept, {reasons[0]}; {UNKEPT}")
            return None
        carried = _Carried(self._loop.carried, found, names)
        checkpointer = Checkpointer(self._root, main_values=carried, **found.objects)
        carried.owner = self
        if group.rank == 0:
            say(f"this script is kept in {self._root}: {', '.join(sorted(found.objects))}")
        return checkpointer

    def got(self, values: tuple[Any, ...]) -> None:
        """A version was restored that carries these."""
        self._values, self.back = values, bool(values)

    def _kept(self, steps: range, checkpointer: Checkpointer) -> Iterator[int]:
        start = checkpointer.restore()
        if start >= len(steps) > 0:
            say(f"all {len(steps)} steps are made")
            checkpointer.close()
            raise SystemExit(0)
        count = _Count()
        ended = False
        try:
            for number in range(start, len(steps)):
                before = count.steps
                yield steps[number]
                if count.steps > before:  # between two steps of the optimizer gradients are on their way: no version
                    checkpointer.step(number)
            ended = True
        finally:
            count.close()
            if ended:
                checkpointer.close()
            else:  # left by break or by an error: what was saved counts
                checkpointer.__exit__(UsageError, None, None)


class _Count:
    """How many steps optimizers have made."""

    def __init__(self) -> None:
        self.steps = 0
        self._handle = register_optimizer_step_post_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.steps += 1

    def close(self) -> None:
        """Counts no more."""
        self._handle.remove()


class _Carried:
    """Carried values and containers, as an object with a state."""

    def __init__(self, carried: tuple[str, ...], kept: Kept, names: Callable[[], Mapping[str, Any]]) -> None:
        self._carried = carried
        self._containers = kept.containers
        self._names = names
        self.owner: KeptLoop | None = None

    def state_dict(self) -> dict[str, Any]:
        """As they are now."""
        now = self._names()
        return {"carried": {name: now[name] for name in self._carried}, "containers": dict(self._containers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Containers in place; carried values when the first step begins."""
        for name, value in state["containers"].items():
            live = self._containers.get(name)
            if isinstance(live, list):
                live[:] = value
            elif live is not None:
                live.clear()
                live.update(value)
        if self.owner is not None:
            self.owner.got(tuple(state["carried"][name] for name in self._carried))


def say(what: str) -> None:
    """One line for the person who started the job."""
    sys.stderr.write(f"holdfast: {what}\n")
