"""One of two ranks that share all: `frozen_twins_worker.py RANK STORE ROOT FROZEN LEVEL`. Not a test itself.

The ranks named in FROZEN ("0", "1", "01", "") have frozen the critic when the checkpointer first looks, as one that was interrupted
while it trained the generator stands beside one that has just begun. LEVEL: `memory`, `storage` (there is no level in memory), or
`unlike` (storage, and the ranks do not agree). Each rank saves a version and tells what came of it, and what it began with.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.checkpoint.state.training_state import State


def digest(*models: torch.nn.Module) -> float:
    return sum(tensor.double().abs().sum().item() for model in models for tensor in model.state_dict().values())


def main() -> None:
    rank, store, root, frozen, level = int(sys.argv[1]), *sys.argv[2:6]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    generator, critic, teacher = (torch.nn.Linear(1024, 512) for _ in range(3))
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    critic.requires_grad_(str(rank) not in frozen)
    teacher.requires_grad_(False)
    patch = pytest.MonkeyPatch()
    if level == "unlike":
        patch.setattr(State, "agree_on_frozen", lambda *_: None)
    budget = {} if level == "memory" else {"memory_budget": "100KB"}
    checkpointer = holdfast.Checkpointer(
        root, config=holdfast.Config(every="0", durable_every="0", linger_s=1.0, **budget), optimizer=optimizer,
        generator=generator, critic=critic, teacher=teacher, replicated=["generator*", "critic*", "teacher*", "optimizer*"],
    )  # fmt: skip
    start = checkpointer.restore()
    began = digest(generator, critic, teacher)
    critic.requires_grad_(True)
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter += 1
    handle = checkpointer.save(start, "durable")
    try:
        handle.wait("durable", 60)
        came = ""
    except holdfast.HoldfastError as error:
        came = str(error)
    print(json.dumps({"start": start, "began": began, "came": came, "now": digest(generator, critic, teacher)}))
    checkpointer.abandon()
    dist.destroy_process_group()
    patch.undo()


if __name__ == "__main__":
    main()
