"""Reaching the store of an incarnation, so that a newer one may interrupt the attempt.

Torch's constructor of a store's client tries for half an hour, in C++, where no exception of ours gets through. Its store
may be gone within milliseconds: a second failure right after the first has opened another one. So the attempt is made in
a thread, which the main thread waits for in Python. One that is given up is left behind, as nothing can end it; it asks
a port that nobody listens on, ever more rarely.

All ranks of a job that meet in a file (`init_method="file://..."`) meet at the store of their incarnation instead. The file has what ranks
before them wrote there, and nothing interrupts who waits for more. Torch's own handler serves other groups.

Used by `elastic.worker.worker_main`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# Not `torch.distributed.rendezvous`, which is a function of the same name.
_torch: Any = sys.modules[rendezvous.__module__]


def install(environment: Callable[[], Mapping[str, str]]) -> None:
    """Let the main thread be interrupted, from now on, while it reaches for a store. Once per process.

    Args:
        environment: returns that of the order which runs.
    """
    reach = getattr(_torch, "_create_c10d_store", None)
    if reach is not None:  # else this torch reaches elsewhere; who is stuck there is killed by the agent
        _torch._create_c10d_store = _beside(reach)
    handlers = getattr(_torch, "_rendezvous_handlers", {})
    if "file" in handlers and "env" in handlers:
        handlers["file"] = _met(handlers["file"], handlers["env"], environment)


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


def _met(
    file: Callable[..., Iterator[Any]], env: Callable[..., Iterator[Any]], environment: Callable[[], Mapping[str, str]]
) -> Callable[..., Iterator[Any]]:
    """Return torch's handler of files, but for all ranks of a job: those get what that of `env://` gives."""

    @functools.wraps(file)
    def meeting(url: str, **kwargs: Any) -> Iterator[Any]:
        parts, order = urlsplit(url), environment()
        asked = parse_qs(parts.query)
        if any(asked.get(name) != [order.get(name.upper())] for name in ("rank", "world_size")):
            yield from file(url, **kwargs)
            return
        for store, rank, size in env(f"env://?{parts.query}", **kwargs):
            yield PrefixStore(parts.path, store), rank, size

    return meeting
