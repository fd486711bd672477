"""Recovery from a twin's file, as in MindSpore's guide: every rank saves its own slices; one rank's are lost; all go on.

    holdfast run --nproc-per-node 8 examples/rank_files.py run
    rm -r checkpoints/rank_files/rank_0
    holdfast run --nproc-per-node 8 examples/rank_files.py recover

Eight ranks in two rows of four. The first weight is cut into four parts, so ranks 0 and 4 hold the same one; the others
are whole on every rank. The text is Python's own help: from 64 bytes guess what kind of byte comes next.
"""

from __future__ import annotations

import argparse
from pydoc_data import topics

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.adapters.mindspore.rank_files import RankCheckpoints

STEPS_PER_EPOCH, BATCH, CONTEXT = 4, 16, 64


class Net(nn.Module):
    """Three matrices: MatMul strategy ((2, 4), (4, 1)) for the first, data parallel on all ranks for the others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        whole = [Replicate(), Replicate()]
        self.w1 = self._weight((CONTEXT, 32), [Replicate(), Shard(0)])
        self.w2, self.w3 = self._weight((32, 32), whole), self._weight((32, 16), whole)

    def _weight(self, shape: tuple[int, int], placements: list[Replicate | Shard]) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(torch.randn(shape) / shape[0] ** 0.5, self.mesh, placements))

    def forward(self, x: torch.Tensor) -> DTensor:
        rows = [Shard(0), Replicate()]
        hidden = torch.relu(
            torch.matmul(distribute_tensor(x, self.mesh, [Shard(0), Shard(1)]), self.w1).redistribute(placements=rows)
        )
        return torch.matmul(torch.relu(torch.matmul(hidden, self.w2)), self.w3)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text, the same on every rank: what step `number` of the run trains on."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    windows = [text[at : at + CONTEXT + 1] for at in range(number * BATCH * 97, (number + 1) * BATCH * 97, 97)]
    data = torch.tensor([list(window) for window in windows])
    return data[:, :-1].float() / 128 - 0.5, data[:, -1] >> 4


def build(mesh: DeviceMesh) -> tuple[Net, torch.optim.SGD]:
    model = Net(mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def train(model: Net, optimizer: torch.optim.SGD, number: int) -> float:
    """One step; the loss."""
    x, y = batch(number)
    logits = model(x).full_tensor()
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "recover"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoints", default="checkpoints/rank_files")
    parser.add_argument("--copies", type=int, help="ranks that save each slice (default: all that hold it)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model, optimizer = build(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "mp")))
    files = RankCheckpoints(options.checkpoints, {"model": model, "optimizer": optimizer}, copies=options.copies)
    done = files.recover() if options.what == "recover" else None
    start = 0 if done is None else (done[0] - 1) * STEPS_PER_EPOCH + done[1]
    print(f"rank {dist.get_rank()} goes on after {done}; its slices are also on {files.interchangeable}", flush=True)
    for number in range(start, options.epochs * STEPS_PER_EPOCH):
        loss = train(model, optimizer, number)
        print(f"rank {dist.get_rank()} step {number} loss {loss:.17g}", flush=True)
        files.save(number // STEPS_PER_EPOCH + 1, number % STEPS_PER_EPOCH + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
