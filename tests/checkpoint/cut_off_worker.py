"""One of two ranks on two nodes whose keepers cannot reach each other: `cut_off_worker.py RANK STORE ROOT WAY [SETTING=VALUE...]`.

WAY: `both` is refused; what the first says to the second is `dropped`, and nothing comes back; only the second is refused by the first, `back`;
they have one name and a keeper each, `namesakes`.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.job import bootstrap, lost_contact


def main() -> None:
    rank, store, root, way, *settings = sys.argv[1:]
    told: list[str] = []
    catcher = logging.Handler(logging.WARNING)
    catcher.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(catcher)
    addresses = bootstrap._addresses

    def elsewhere(*given: Any) -> tuple[str, ...]:
        """As on another machine: its path leads nowhere here."""
        if way == "namesakes":
            return addresses(*given)
        first, second = addresses(*given)
        if int(rank) == 0:
            return first, {"both": f"{second}-elsewhere", "dropped": f"unix:{store}.deaf", "back": second}[way]
        return (first if way == "dropped" else f"{first}-elsewhere"), second

    deaf = socket.socket(socket.AF_UNIX)
    if way == "dropped" and rank == "0":
        deaf.bind(f"{store}.deaf")
        deaf.listen()
    bootstrap._addresses = elsewhere
    lost_contact.SILENT_S = 1.0
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
    torch.manual_seed(int(rank))
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {name: json.loads(value) for name, value in (one.split("=") for one in settings)}
    label = f"node{rank}"
    if way == "namesakes":
        label, given["runtime_dir"] = "host", f"{store}.{rank}"
    facts: dict[str, Any] = {"reached": []}
    try:
        checkpointer = holdfast.Checkpointer(
            root,
            model=model,
            optimizer=optimizer,
            config=holdfast.Config(node_label=label, durable_every="2", linger_s=1.0, **given),
        )
        facts["start"] = start = checkpointer.restore()
        run, step, end = checkpointer._run, start, start + 4
        while step < end:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = checkpointer.step(step)
            step += 1
            if way == "back" and run is not None and run.saver.memory is not None:
                time.sleep(0.01)  # what a step would take
                dist.barrier()
                end = step + 4
                continue
            facts["reached"].append(handle.reached.name if handle is not None else None)
        checkpointer.close()
    except HoldfastError as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    facts["told"] = told
    print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
