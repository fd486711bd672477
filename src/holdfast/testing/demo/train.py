"""The training job of the demo: a byte-level GPT with HSDP 2 x 2, as a user would write it, plus a log of JSON lines.

Started by `holdfast run` (or plain torchrun with `--plain`, which trains without holdfast and is what the demo
compares with). Shards lie inside a node and twins across the nodes, so every sum has two terms and is bit-equal in
every run. Every rank appends facts to `<facts>/rank<N>.jsonl`: when it started, what it restored, each step with its
loss. At the end it writes its shards of all parameters and optimizer moments to `<facts>/final-rank<N>.safetensors`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.testing.gpt import ByteGPT, Text


def main() -> None:
    """Trains until `--steps`; whatever happens in between, this function knows nothing about it."""
    options = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = Log(options.facts, rank)
    log.write("start", pid=os.getpid(), node=os.environ.get("HOLDFAST_NODE_LABEL", ""))

    torch.manual_seed(0)
    model = ByteGPT()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    text = Text(rank=rank, world_size=world_size)
    torch.manual_seed(1000 + rank)  # every rank drops out its own units
    random.seed(rank)

    checkpointer = None
    start = 0
    if not options.plain:
        checkpointer = holdfast.Checkpointer(
            options.checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, loader=text
        )
        start = checkpointer.restore()
        log.write("restored", start=start, report=_plain(checkpointer.last_restore))
    for step in range(start, options.steps):
        loss = train_one_step(model, optimizer, next(text))
        scheduler.step()
        log.write("step", step=step, loss=loss)
        if checkpointer is not None:
            checkpointer.step(step)
    if checkpointer is not None:
        checkpointer.close()
    log.write_state(model, optimizer)
    log.write("end")
    dist.destroy_process_group()


def train_one_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """One forward, backward and update; returns this rank's loss."""
    loss: torch.Tensor = model(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Log:
    """Appends facts as JSON lines, each with one write, so that a kill leaves at most one half line."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._file = open(directory / f"rank{rank}.jsonl", "ab", buffering=0)  # noqa: SIM115 - lives as long as the rank

    def write(self, event: str, **facts: Any) -> None:
        """One line; `time` is seconds since the epoch, comparable between the processes of one machine."""
        line = json.dumps({"event": event, "rank": self._rank, "time": time.time(), **facts}, default=str)
        self._file.write(line.encode() + b"\n")

    def write_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Every parameter and optimizer moment of this rank, as `final-rank<N>.safetensors`."""
        tensors = {}
        for name, parameter in model.named_parameters():
            moments = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
            for kind, tensor in {"parameter": parameter.detach(), **moments}.items():
                tensors[f"{kind}:{name}"] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
        save_file(tensors, self._directory / f"final-rank{self._rank}.safetensors")


def _plain(report: holdfast.RestoreReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "version": str(report.version),
        "bytes": dict(report.bytes),
        "seconds": dict(report.seconds),
        "reason": report.reason,
        "refused": list(report.refused),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--facts", type=Path, required=True, help="directory of the JSON lines and the final state")
    parser.add_argument("--checkpoints", help="path of the checkpoints")
    parser.add_argument("--plain", action="store_true", help="train without holdfast")
    return parser.parse_args()


if __name__ == "__main__":
    main()
