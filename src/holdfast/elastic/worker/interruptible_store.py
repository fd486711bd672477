"""Reaching the store of an incarnation, so that a newer one may interrupt the attempt.

Torch's constructor of a store's client tries for half an hour, in C++, where no exception of ours gets through. Its store
may be gone within milliseconds: a second failure right after the first has opened another one. So the attempt is made in
a thread, which the main thread waits for in Python. One that is given up is left behind, as nothing can end it; it asks
a port that nobody listens on, ever more rarely.

Used by `elastic.worker.worker_main`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.rendezvous import rendezvous

# Not `torch.distributed.rendezvous`, which is a function of the same name.
_torch: Any = sys.modules[rendezvous.__module__]


def install() -> None:
    """Let the main thread be interrupted, from now on, while it reaches for a store. Once per process."""
    reach = getattr(_torch, "_create_c10d_store", None)
    if reach is not None:  # else this torch reaches elsewhere; who is stuck there is killed by the agent
        _torch._create_c10d_store = _beside(reach)


def _beside(reach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reach)
    def reaching(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return reach(*args, **kwargs)
        found: list[Any] = []
        errors: list[BaseException] = []

        def attempt() -> None:
            try:
                found.append(reach(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - raised again by who asked
                errors.append(error)

        thread = threading.Thread(target=attempt, name="holdfast-store", daemon=True)
        thread.start()
        thread.join()  # an exception of a signal's handler ends it
        if errors:
            raise errors.pop()
        return found.pop()

    return reaching
