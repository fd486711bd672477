"""Reaching the store of an incarnation, so that a newer one may interrupt the attempt.

Torch's constructor of a store's client tries for half an hour, in C++, where no exception of ours gets through. Its store
may be gone within milliseconds: a second failure right after the first has opened another one. So the attempt is made in
a thread, which the main thread waits for in Python. One that is given up is left behind, as nothing can end it; it asks
a port that nobody listens on, ever more rarely.

Ranks that meet in a file (`init_method="file://..."`) do so as under torchrun until a fault. The file has what ranks before the fault
wrote there, so a group as large as the job meets at the store of its incarnation from then on. Torch's own handler serves other groups.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import default_pg_timeout
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
    if "file" in handlers:
        handlers["file"] = _met(handlers["file"], _beside(TCPStore), environment)


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
    file: Callable[..., Iterator[Any]], reach: Callable[..., Any], environment: Callable[[], Mapping[str, str]]
) -> Callable[..., Iterator[Any]]:
    """Return torch's handler of files, but for groups as large as a job that came back: they meet at its store.

    Which rank of the group somebody is, and what the script made of its environment, are the script's own. Ranks may reach one
    file by several paths, and one after the other in the same file.
    """
    met: Counter[tuple[str, str, str]] = Counter()

    @functools.wraps(file)
    def meeting(url: str, **kwargs: Any) -> Iterator[Any]:
        parts, order = urlsplit(url), environment()
        asked = parse_qs(parts.query)
        recoveries = order.get("TORCHELASTIC_RESTART_COUNT", "0")
        if not (
            recoveries != "0" and parts.path and "rank" in asked and asked.get("world_size") == [order["WORLD_SIZE"]]
        ):
            yield from file(url, **kwargs)
            return
        limit = kwargs.get("timeout", default_pg_timeout)
        store = reach(order["MASTER_ADDR"], int(order["MASTER_PORT"]), is_master=False, timeout=limit)
        name = PurePath(parts.path).name
        met[recoveries, order["MASTER_PORT"], name] += 1
        prefix = f"file/{name}/{met[recoveries, order['MASTER_PORT'], name]}"
        yield PrefixStore(prefix, store), int(asked["rank"][0]), int(order["WORLD_SIZE"])

    return meeting
