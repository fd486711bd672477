"""Tells what torchrun tells a worker about itself, in torchrun's words."""

from __future__ import annotations

import os
from string import Template

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup


def environment(group: WorkerGroup, worker: Worker, *, address: str, port: int, recoveries: int) -> dict[str, str]:
    """The variables of one worker of the node; `address` and `port` are those of the store of its incarnation."""
    spec = group.spec
    values = {
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": recoveries,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store of an incarnation is its agent's
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}


def prefixes(template: str | None, group: WorkerGroup) -> dict[int, str] | None:
    """Return what stands before each line of a worker's log, by local rank."""
    if not template:
        return None
    text = Template(template)
    return {
        worker.local_rank: text.safe_substitute(
            role_name=group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in group.workers
    }
