"""A script that counts its own iterations: a `while` loop, the first batch before it and each next one inside.

With the lines that the tutorial shows it is killed at drawn iterations under `holdfast run` and ends bit for bit as undisturbed; with a
value left out it is told which, in its first run.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import forked
from sample_kit import MORE, sampled

ITERATIONS = 14
KEPT = ("X", "Y", "best", "smooth")
SCRIPT = """
import hashlib, math, os, pathlib, signal, sys, time
import torch
from torch import nn
import holdfast

root, marks = sys.argv[1:3]
kills = {int(number) for number in sys.argv[3].split(",") if number}
torch.manual_seed(1337)
torch.set_num_threads(1)
text = (torch.arange(600) ** 2 + 7 * torch.arange(600)) % 31
parts = {"train": text[:500], "val": text[500:]}


def get_batch(part):
    places = torch.randint(len(parts[part]) - 9, (4,))
    rows = torch.stack([parts[part][place : place + 9] for place in places])
    return rows[:, :8], rows[:, 1:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.drop, self.head = nn.Embedding(31, 24), nn.Linear(24, 24), nn.Dropout(0.2), nn.Linear(24, 31)

    def forward(self, x, y):
        h = self.table(x)
        h = h.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return nn.functional.cross_entropy(self.head(self.drop(torch.relu(self.inner(h)))).flatten(0, 1), y.flatten())


net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.95))


def rate(iteration):
    return 1e-2 * (iteration + 1) / 4 if iteration < 3 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * iteration / 20)) / 2


@torch.no_grad()
def estimate():
    net.eval()
    found = {part: torch.stack([net(*get_batch(part)) for _ in range(3)]).mean().item() for part in parts}
    net.train()
    return found


X, Y = get_batch("train")  # the very first
best, smooth = 1e9, -1.0
ckpt = holdfast.Checkpointer(root, model=net, optimizer=optimizer)
iteration = ckpt.restore()
{carry}
began = time.time()
while True:
    for group in optimizer.param_groups:
        group["lr"] = rate(iteration) * (1.0 if best > 3.0 else 0.5)
    if iteration % 3 == 0:
        losses = estimate()
        if losses["val"] < best:
            best = losses["val"]
    for _ in range(2):
        loss = net(X, Y) / 2
        X, Y = get_batch("train")  # the next, while the device would be busy
        loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    now = time.time()
    took, began = now - began, now
    value = loss.item() * 2
    smooth = value if smooth < 0 else 0.9 * smooth + 0.1 * value
    if iteration in kills and not pathlib.Path(marks, f"{iteration}").exists():
        pathlib.Path(marks, f"{iteration}").touch()
        os.kill(os.getpid(), 9)
    ckpt.step({step})
    iteration += 1
    if iteration >= {iterations}:
        break
ckpt.close()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print("END", digest, f"{best:.17g} {smooth:.17g}", hashlib.sha256(X.numpy().tobytes()).hexdigest(), flush=True)
"""


def script(directory: Path, kept: Sequence[str]) -> Path:
    """The script with the values that it keeps."""
    carry = "\n".join(f'{name} = ckpt.carry("{name}", {name})' for name in kept)
    step = ", ".join(["iteration", *(f"{name}={name}" for name in kept)])
    text = SCRIPT.replace("{carry}", carry).replace("{step}", step).replace("{iterations}", str(ITERATIONS))
    path = directory / "train.py"
    path.write_text(text)
    return path


def run(directory: Path, kept: Sequence[str] = KEPT, kills: Sequence[int] = ()) -> tuple[str, str]:
    """The last line of one run under the launcher, and what it said."""
    directory.mkdir()
    launcher = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node", "1"]
    told = [str(directory / "ckpts"), str(directory), ",".join(map(str, kills))]
    command = [*launcher, "--max-restarts", "9", str(script(directory, kept)), *told]
    result = forked.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ), warm_children=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all((directory / str(number)).exists() for number in kills)
    return re.findall(r"END .*", result.stdout)[-1], result.stdout + result.stderr


def seeds(default: int, slow: int) -> list[object]:
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= default else []) for seed in range(default + slow)]


@pytest.mark.parametrize("seed", seeds(1, 19))
def test_killed_at_drawn_iterations_it_ends_bit_for_bit(seed: int, tmp_path: Path, runtime_dir: Path) -> None:
    kills = sorted(random.Random(seed).sample(range(1, ITERATIONS), 2))
    undisturbed, said = run(tmp_path / "undisturbed")
    assert "in no version" not in said
    assert run(tmp_path / "killed", kills=kills)[0] == undisturbed


@pytest.mark.parametrize("left_out", sampled([((name,),) for name in KEPT] + [(KEPT,)], (KEPT,)), ids="-".join)
def test_a_value_that_is_left_out_is_named(left_out: tuple[str, ...], tmp_path: Path, runtime_dir: Path) -> None:
    kept = [name for name in KEPT if name not in left_out]
    directory = tmp_path / "job"
    directory.mkdir()
    command = [sys.executable, str(script(directory, kept)), str(directory / "ckpts"), str(directory), ""]
    result = forked.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    told = re.findall(r"^    (\w+): a \w+ that lives", result.stderr, re.MULTILINE)
    assert sorted(told) == sorted(left_out)
    if len(left_out) == 1:
        passed = ", ".join(["iteration", *(f"{name}={name}" for name in (*kept, *left_out))])
        assert f"ckpt.step({passed})\n" in result.stderr


LAYOUT = """
import os, sys, torch, holdfast
from torch import distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = holdfast.Checkpointer(sys.argv[1], model=model, optimizer=optimizer)
start = ckpt.restore()
own = ckpt.carry("own", torch.full((2,), -1.0))
alike = ckpt.carry("alike", 0)
sys.stdout.write(f"BEGAN {rank} {start} {own.tolist()} {alike}\\n")  # in one piece: the ranks share the pipe, and Python runs with -u
for step in range(start, start + 3):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    own, alike = torch.full((2,), float(rank)), step
    ckpt.step(step, own=own, alike=alike)
ckpt.close()
dist.destroy_process_group()
"""


@MORE
def test_values_of_a_rank_that_is_gone_keep_nobody_from_coming_back(tmp_path: Path, runtime_dir: Path) -> None:
    """What is carried is each rank's own: the one that is left has its own."""
    path = tmp_path / "train.py"
    path.write_text(LAYOUT)
    began = []
    for ranks in (2, 1):
        launcher = [
            sys.executable,
            "-m",
            "holdfast.elastic.launch.run_command",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [*launcher, str(path), str(tmp_path / "ckpts")]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        result = forked.run(command, capture_output=True, text=True, timeout=120, env=environment, warm_children=True)
        assert result.returncode == 0, result.stdout + result.stderr
        began.append(sorted(re.findall(r"BEGAN (.*)", result.stdout)))
    assert began == [["0 0 [-1.0, -1.0] 0", "1 0 [-1.0, -1.0] 0"], ["0 3 [0.0, 0.0] 2"]]
