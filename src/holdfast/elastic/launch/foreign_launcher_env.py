"""Start scripts that were written for another launcher: their variables as defaults of the flags of `holdfast run`.

A script of MindSpore's dynamic cluster starts a scheduler and one process per worker, each with MS_* variables. With
`holdfast run` in the place of `python` the same script works: the scheduler keeps the rendezvous store until every worker
is done, each worker is a node with one rank, and starting a dead worker once more with its variables brings it back.
Flags that are given win. Each variable that has an effect gets one line that says which.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from holdfast.base.errors import UsageError

SCHEDULER, WORKER = "MS_SCHED", "MS_WORKER"
DONE = "holdfast/aliases/done"
POLL_S = 0.2
DEFAULT_PORT = 8118


@dataclass(frozen=True, slots=True)
class Aliases:
    """Says what the variables ask for.

    Attributes:
        defaults: of flags, by their names in the parser.
        notes: a line for each variable that has an effect.
        scheduler: this process only keeps the store.
        endpoint: host and port of the store, if there is a scheduler.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    scheduler: bool = False
    endpoint: tuple[str, int] | None = None
    workers: int = 0


def read(variables: Mapping[str, str]) -> Aliases:
    """The meaning of the variables (`base.config.aliases`).

    Raises:
        UsageError: a number that is none, an unknown role.
    """
    role = variables.get("MS_ROLE", "")
    if role not in ("", SCHEDULER, WORKER):
        raise UsageError(f"MS_ROLE={role} is neither {SCHEDULER} nor {WORKER}", remedy="unset it or give one of them")
    defaults: dict[str, Any] = {}
    notes: list[str] = []

    def take(variable: str, flag: str, value: Any) -> None:
        defaults[flag] = value
        notes.append(f"{variable}={variables[variable]} is taken as --{flag.replace('_', '-')}={value}")

    workers = _number(variables, "MS_WORKER_NUM") if "MS_WORKER_NUM" in variables else 0
    if workers:
        take("MS_WORKER_NUM", "nnodes", str(workers))
        defaults["nproc_per_node"] = "1"
    host = variables.get("MS_SCHED_HOST", "")
    endpoint = (host, _number(variables, "MS_SCHED_PORT") or DEFAULT_PORT) if host else None
    if endpoint is not None:
        take("MS_SCHED_HOST", "rdzv_endpoint", f"{endpoint[0]}:{endpoint[1]}")
        # The scheduler has the store; without one the first worker that can opens it.
        defaults |= {"rdzv_backend": "c10d", "rdzv_id": "cluster"} | ({"rdzv_conf": "is_host=0"} if role else {})
    if "MS_NODE_ID" in variables:
        node = variables["MS_NODE_ID"]
        take("MS_NODE_ID", "holdfast_node_label", f"worker-{node}")
        if endpoint is not None and node.isdigit() and _is_loopback(endpoint[0]):
            # Agents are ranked by address: a worker that comes back under its own takes its rank again.
            defaults["local_addr"] = f"127.0.0.{int(node) % 250 + 1}"
    if "MS_RECOVERY_PATH" in variables:
        take("MS_RECOVERY_PATH", "checkpoint_dir", variables["MS_RECOVERY_PATH"])
    if variables.get("MS_ENABLE_RECOVERY") == "0":
        take("MS_ENABLE_RECOVERY", "max_restarts", 0)
    if variables.get("MS_COMPILER_CACHE_ENABLE") == "0":
        take("MS_COMPILER_CACHE_ENABLE", "compile_cache", "off")
    elif "MS_COMPILER_CACHE_PATH" in variables:
        take("MS_COMPILER_CACHE_PATH", "compile_cache", variables["MS_COMPILER_CACHE_PATH"])
    return Aliases(defaults, tuple(notes), role == SCHEDULER, endpoint, workers)


def keep_store(found: Aliases) -> int:
    """The scheduler: keeps the store until every worker said that it is done. SIGTERM ends it."""
    if found.endpoint is None or not found.workers:
        raise UsageError("a scheduler needs MS_SCHED_HOST and MS_WORKER_NUM", remedy="set them as for the workers")
    store = TCPStore(*found.endpoint, is_master=True, wait_for_workers=False)
    while store.add(DONE, 0) < found.workers:
        time.sleep(POLL_S)
    return 0


def tell_done(found: Aliases) -> None:
    """A worker ended well; the scheduler may go when all have."""
    if found.endpoint is None or "rdzv_conf" not in found.defaults:
        return
    try:
        store = TCPStore(*found.endpoint, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        store.add(DONE, 1)
    except (DistError, RuntimeError):
        pass  # the scheduler is gone already: nobody waits


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "0")
    if not text.isdigit():
        raise UsageError(f"{name}={text} is not a number")
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
