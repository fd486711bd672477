"""Tells whether this thread holds a condition, or the lock of one.

The interpreter notes the owner of the lock in the step that takes it. An owner that is noted by us would be wrong for a
signal's handler that strikes in between.
"""

from __future__ import annotations

import threading

from holdfast.base.handler_errors import pass_on


def is_mine(condition: threading.Condition) -> bool:
    """Return whether this thread holds it, and may so wake those that wait; wakes none. A wait lets go of it."""
    try:
        condition.notify(0)
    except RuntimeError as error:
        pass_on(error)
        return False
    return True
