"""The end of what a Checkpointer has, step by step. What a signal's handler raises in a step leaves the rest to the next call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from holdfast.base.handler_errors import pass_on

Step = Callable[[], object]


class Leaving:
    """Steps that are done in their order.

    Args:
        steps: each MUST bear to be done twice, for it stays until it has returned.
    """

    def __init__(self, *steps: Step) -> None:
        self._steps = deque(steps)
        self._is_going = False

    @property
    def left(self) -> tuple[Step, ...]:
        """Return what is still to be done, if nobody is at it: neither another thread, nor this one that a handler interrupted."""
        return () if self._is_going else tuple(self._steps)

    def first(self, step: Step) -> None:
        """Adds a step that comes before all others."""
        self._steps.appendleft(step)

    def go_on(self) -> None:
        """Does what is left. What fails in a step keeps no other one from being done, and is raised behind the last.

        Raises:
            BaseException: as a signal's handler or a step raised it.
        """
        if self._is_going:
            return
        failed: Exception | None = None
        try:
            self._is_going = True
            while self._steps:
                step = self._steps[0]
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - raised below
                    pass_on(error)
                    failed = failed or error
                with suppress(ValueError):
                    self._steps.remove(step)
        finally:
            self._is_going = False
        if failed is not None:
            raise failed
