"""One rank of the node-loss test: a small HSDP 2 x 2 model, shards inside a node, twins across. Not a test itself.

With the variable ALL_SHARDED every rank holds a shard of its own.

python hsdp_worker.py first|second ROOT OUT: `first` trains a reference without holdfast, starts again with it, and
waits to be killed when step LAST_OF_FIRST is replicated. `second` comes back and trains until SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.adapters.mindspore import restore_group_info_list

STEPS = 300
LAST_OF_FIRST = 6


class Job:
    """Model, optimizer and random numbers of this rank, always the same at the start."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(12, 33), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(33, 5)
        )
        if "ALL_SHARDED" in os.environ:  # no two ranks hold the same
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (self.model[0], self.model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(100 + dist.get_rank())
        random.seed(dist.get_rank())

    def train(self) -> str:
        """One step; a digest of this rank's part of the parameters."""
        loss = self.model(torch.randn(4, 12) * random.random()).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = hashlib.blake2b(digest_size=8)
        for parameter in self.model.parameters():
            state.update(parameter.to_local().detach().contiguous().numpy().tobytes())
        return state.hexdigest()


def main() -> None:
    part, root, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    facts: dict[str, object] = {"reference": [], "trained": {}, "saved": []}
    if part == "first":
        job = Job()
        facts["reference"] = [job.train() for _ in range(STEPS)]
    job = Job()
    every = "1" if part == "first" else "100ms"
    checkpointer = holdfast.Checkpointer(root, model=job.model, optimizer=job.optimizer, every=every, durable_every="0")
    facts["start"] = checkpointer.restore()
    assert checkpointer.last_restore is not None
    if "GROUP_INFO_FILE" in os.environ:  # nothing is trained yet
        path = os.environ["GROUP_INFO_FILE"].replace("{rank}", str(rank))
        facts["group_info"] = [restore_group_info_list(path), os.stat(path).st_mode & 0o777]
    facts["bytes"] = dict(checkpointer.last_restore.bytes)
    facts["version"] = str(checkpointer.last_restore.version)
    try:
        for step in range(checkpointer_start(facts), STEPS):
            facts["trained"][step] = job.train()  # type: ignore[index]
            handle = checkpointer.step(step)
            if handle is not None:
                facts["saved"].append(step)  # type: ignore[attr-defined]
            if part == "first" and step == LAST_OF_FIRST:
                assert handle is not None
                handle.wait("replicated", 60)
                write(out / f"first-{rank}.json", facts)
                threading.Event().wait(120)  # the test kills this process
            if part == "second" and len(facts["saved"]) == 2:  # type: ignore[arg-type]
                (out / f"trains-{rank}").touch()
    finally:
        write(out / f"{part}-{rank}.json", facts)


def checkpointer_start(facts: dict[str, object]) -> int:
    start = facts["start"]
    assert isinstance(start, int)
    return start


def write(path: Path, facts: dict[str, object]) -> None:
    """Complete or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


if __name__ == "__main__":
    main()
