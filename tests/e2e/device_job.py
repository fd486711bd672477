"""Ranks that train on the simulated device, its host ahead of it, and are hurt once: device_job.py DIRECTORY KIND WHERE.

KIND is one of `KINDS`; WHERE tells what becomes of the last rank at one step, in which part of the step, or before or behind
all steps. The end of a rank is a
digest of its parameters and its optimizer's state, to be compared with that of a run that nobody hurt (WHERE is `nowhere`).
With a fourth word a rule of ours is taken out, and the end is another one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint.device import chunk_staging
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.save.memory_saver import Saver
from holdfast.testing import device

STEPS, AT = int(os.environ.get("DEVICE_JOB_STEPS", "24")), int(os.environ.get("DEVICE_JOB_AT", "12"))
DIRECTORY, KIND, WHERE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def hurt(step: int, where: str) -> None:
    """Kills this process, hangs its device or raises, once in the life of the job."""
    how, _, place = WHERE.partition("-")
    mark = DIRECTORY.with_suffix(".hurt")
    if place != where or step != AT or RANK != SIZE - 1 or mark.exists():
        return
    mark.touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fault":
        device.fault(now=True)
    if how == "hang":
        device.hang()
    if how == "behind":
        device.sleep(3.0)  # the other ranks' devices wait for it in the next collective
    if how == "raise":
        raise RuntimeError("an error of the script's own, in the middle of a step")


class Job:
    """A model, what trains it, and the parts of a step.

    Attributes:
        objects: what is saved beside the two.
        backends: of the group, by the device's name.
    """

    width = 64  # of the middle
    backends = "cpu:gloo,{0}:simccl"

    def __init__(self, place: torch.device) -> None:
        self.place = place
        torch.manual_seed(0)
        self.data = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).to(place)
        self.model: Any = self.wrap(self.layers().to(place))
        self.optimizer = self.optimizer_of(self.model)
        self.objects: dict[str, Any] = {}

    def layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, self.width), nn.GELU(), nn.Linear(self.width, 8))

    def wrap(self, model: nn.Sequential) -> nn.Module:
        return DistributedDataParallel(model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def batch(self, step: int) -> torch.Tensor:
        return self.data * (1.0 + step * 0.01 + RANK * 0.1)

    def forward(self, step: int) -> torch.Tensor:
        return self.model(self.batch(step)).square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Halves(nn.Module):
    """A model whose second half lies on another device."""

    def __init__(self, first: nn.Module, second: nn.Module, place: torch.device) -> None:
        super().__init__()
        self.first, self.second, self.place = first, second.to(place), place

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch).to(self.place))


class Apart(Job):
    """A model over two devices of each rank, whose gradients are reduced on both."""

    def wrap(self, model: nn.Sequential) -> nn.Module:
        other = torch.device(self.place.type, self.place.index + SIZE)
        return DistributedDataParallel(Halves(model[:2], model[2:], other))


class OneBackend(Job):
    """Its group has no gloo, as after `init_process_group("nccl")`: what ranks agree on goes through the device as well."""

    backends = "{0}:simccl"


class Eager(Job):
    """Compiled, as far as no compiler of kernels is needed."""

    backend = "eager"

    def wrap(self, model: nn.Sequential) -> nn.Module:
        return torch.compile(DistributedDataParallel(model), backend=self.backend)  # type: ignore[return-value]


class Compiled(Eager):
    """Forward and backward are traced."""

    backend = "aot_eager"


class Sharded(Job):
    """FSDP2 over all ranks."""

    more: dict[str, Any] = {}  # noqa: RUF012 - nobody writes it

    def mesh(self) -> Any:
        return init_device_mesh(self.place.type, (SIZE,), mesh_dim_names=("shard",))

    def wrap(self, model: nn.Sequential) -> nn.Module:
        mesh = self.mesh()
        fully_shard(model[0], mesh=mesh, **self.more)
        return fully_shard(model, mesh=mesh, **self.more)


class Hybrid(Sharded):
    """FSDP2 in pairs, which are replicas of each other."""

    def mesh(self) -> Any:
        return init_device_mesh(self.place.type, (SIZE // 2, 2), mesh_dim_names=("replicate", "shard"))


class Resharded(Sharded):
    """Comes to the same numbers with every number of ranks, and its end is a digest of whole tensors."""

    def batch(self, step: int) -> torch.Tensor:
        return self.data * (1.0 + step * 0.01)


class ReshardedInPairs(Resharded, Hybrid):
    """The same, in pairs that are replicas of each other."""


class Uneven(Sharded):
    """The last rank has less of every tensor, and of one nothing."""

    width = 37

    def layers(self) -> nn.Sequential:
        return nn.Sequential(*super().layers(), nn.Linear(8, 1))


class Offloaded(Uneven):
    """Parameters and their state lie in memory of the host, and the device computes gradients."""

    more = {"offload_policy": CPUOffloadPolicy(pin_memory=True)}  # noqa: RUF012 - nobody writes it


class Tensors(Job):
    """Tensor parallel: all ranks work on the same batch."""

    def wrap(self, model: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh(self.place.type, (SIZE,), mesh_dim_names=("tensor",))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def batch(self, step: int) -> torch.Tensor:
        return self.data * (1.0 + step * 0.01)


class Scaled(Job):
    """Autocast, a scaler that grows and meets a step with infinities, and a fused optimizer, which asks it on the device."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.scaler = torch.amp.GradScaler(place.type, init_scale=256.0, growth_interval=4)
        self.objects = {"scaler": self.scaler}

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def batch(self, step: int) -> torch.Tensor:
        return super().batch(step) * (1e30 if step == AT - 3 else 1.0)

    def forward(self, step: int) -> torch.Tensor:
        with torch.autocast(self.place.type, dtype=torch.bfloat16):
            return super().forward(step)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Capturable(Job):
    """An optimizer whose counts of steps lie on the device as well."""

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True, amsgrad=True)


class Fresh(torch.optim.Optimizer):
    """Momentum that writes nothing in place: what a copy still reads is free after a step, and used again at once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state.get("momentum")
                state["momentum"] = parameter.grad.clone() if before is None else 0.9 * before + parameter.grad
                parameter.data = parameter - group["lr"] * state["momentum"]
                del before


class Reused(Job):
    """New memory for everything at every step."""

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return Fresh(model.parameters())


class Pipeline(Job):
    """Two stages; activations and gradients are sent from device to device."""

    def wrap(self, model: nn.Sequential) -> nn.Module:
        part = nn.Sequential()
        for name, layer in list(model.named_children())[2 * RANK : 2 * RANK + 2]:  # as they are called in the whole
            part.add_module(name, layer)
        stage = PipelineStage(part, RANK, SIZE, self.place)
        self.schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, _: output.square().mean())
        return part

    def batch(self, step: int) -> torch.Tensor:
        return self.data * (1.0 + step * 0.01)

    def forward(self, step: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        last = {"target": self.data, "losses": losses} if RANK == SIZE - 1 else {}
        self.schedule.step(*([self.batch(step)] if RANK == 0 else []), **last)
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.place)

    def backward(self, loss: torch.Tensor) -> None:
        """It was a part of the schedule."""


KINDS: dict[str, type[Job]] = {
    "ddp": Job,
    "fsdp": Sharded,
    "hsdp": Hybrid,
    "uneven": Uneven,
    "offloaded": Offloaded,
    "tensor": Tensors,
    "scaled": Scaled,
    "capturable": Capturable,
    "reused": Reused,
    "pipeline": Pipeline,
    "apart": Apart,
    "one-backend": OneBackend,
    "eager": Eager,
    "compiled": Compiled,
    "resharded": Resharded,
    "resharded-hsdp": ReshardedInPairs,
}


def digest(job: Job) -> str:
    """Of what this rank holds of parameters and the optimizer's state; of the whole of it where ranks may become more."""
    found = xxhash.xxh3_128()
    for parameter in job.model.parameters():
        for tensor in (parameter, *(value for _, value in sorted(job.optimizer.state[parameter].items()))):
            whole = isinstance(job, Resharded)
            local = tensor
            if hasattr(tensor, "to_local"):
                local = tensor.full_tensor() if whole else tensor.to_local()
            found.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def evaluate(job: Job, step: int) -> None:
    """One batch without gradients; not of a pipeline, which has its schedule."""
    if not isinstance(job, Pipeline):
        with torch.no_grad():
            job.model.eval()
            hurt(step, "evaluation")
            job.forward(step).item()
            job.model.train()


def main() -> None:
    if "no-void" in sys.argv[4:]:
        open_checkpointers.void = lambda: None
    if "no-patience" in sys.argv[4:]:
        Saver._behind = lambda _: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    device.load()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    place = torch.device(device.name(), int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(KINDS[KIND].backends.format(device.name()))
    hurt(AT, "start")
    job = KINDS[KIND](place)
    chunk_staging.TAKE_S = 5.0
    # On a busy machine a script that begins again needs more than seconds to come to the keeper that has its state.
    config = holdfast.Config(linger_s=60.0)
    checkpointer = holdfast.Checkpointer(
        DIRECTORY, model=job.model, optimizer=job.optimizer, config=config, **job.objects
    )
    hurt(AT, "restore")
    start = checkpointer.restore()
    print(f"rank {RANK} starts at {start}", flush=True)
    device.set_kernel_time(0.001)
    for step in range(start, STEPS):
        hurt(step, "forward")
        loss = job.forward(step)
        if step < AT or not WHERE.startswith("behind"):
            loss.item()  # as most loops do: until here the host waits for the device, so it is interrupted between two updates
        if step == AT and not WHERE.startswith("behind"):
            device.sleep(0.5)  # from here on it does not
        hurt(step, "backward")
        job.backward(loss)
        hurt(step, "collective")
        job.update()
        hurt(step, "optimizer")
        checkpointer.step(step)
        hurt(step, "save")
        if step == AT and WHERE.endswith("evaluation"):
            evaluate(job, step)
    hurt(AT, "end")
    os.write(1, f"rank {RANK} ends with {digest(job)}\n".encode())  # in one piece
    hurt(AT, "close")
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
