"""One of two ranks on two nodes whose keepers cannot reach each other: `cut_off_worker.py RANK STORE ROOT [SETTING=VALUE...]`."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.job import bootstrap


def main() -> None:
    rank, store, root, *settings = sys.argv[1:]
    told: list[str] = []
    catcher = logging.Handler(logging.WARNING)
    catcher.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(catcher)
    addresses = bootstrap._addresses

    def elsewhere(*given: Any) -> tuple[str, ...]:
        """As on another machine: its path leads nowhere here."""
        first, second = addresses(*given)
        return (first, second + "-elsewhere") if int(rank) == 0 else (first + "-elsewhere", second)

    bootstrap._addresses = elsewhere
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
    torch.manual_seed(int(rank))
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {name: json.loads(value) for name, value in (one.split("=") for one in settings)}
    facts: dict[str, Any] = {"reached": []}
    try:
        checkpointer = holdfast.Checkpointer(
            root,
            model=model,
            optimizer=optimizer,
            config=holdfast.Config(node_label=f"node{rank}", durable_every="2", linger_s=1.0, **given),
        )
        facts["start"] = start = checkpointer.restore()
        for step in range(start, start + 4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = checkpointer.step(step)
            facts["reached"].append(handle.reached.name if handle is not None else None)
        checkpointer.close()
    except HoldfastError as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    facts["told"] = told
    print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
