"""Checks of whole trainings: what a save each step costs, bit for bit after kills, hangs, memory of a killed process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu.card import MIB, Card, Figure, NotHere, host_seconds

import holdfast
from holdfast.testing.gpt import ByteGPT, Shape

JOB = Path(__file__).with_name("job.py")


def slowdown(card: Card) -> list[Figure]:
    """A step that fills the card, with a save at every step, against steps without; blocks in turn."""
    shape = Shape(
        width=card.size(2048, 32), layers=card.size(20, 1), heads=card.size(16, 2), context=card.size(1024, 16)
    )
    torch.manual_seed(0)
    model = ByteGPT(shape).to(card.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    # 32: a step takes longer than the copy of the state and its hashing do.
    batch = torch.randint(0, 256, (card.size(32, 2), shape.context + 1), device=card.device)

    def step() -> None:
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    config = holdfast.Config(every="0", durable_every="0", runtime_dir=str(card.directory / "run"), linger_s=1.0)
    checkpointer = holdfast.Checkpointer(
        card.directory / "checkpoints", model=model, optimizer=optimizer, config=config
    )
    checkpointer.restore()
    number, given_up = 1, 0

    def block(*, saves: bool) -> float:
        nonlocal number, given_up
        handles, began = [], time.perf_counter()
        for _ in range(card.size(10, 2)):
            if saves:
                handles.append(checkpointer.save(number))
            step()  # behind each copy of the block: what it costs is in the time, and no copy outlasts the block
            number += 1
        card.synchronize()
        seconds = time.perf_counter() - began
        given_up += sum(bool(handle.given_up) for handle in handles)
        return seconds

    for _ in range(4):
        checkpointer.save(number).wait("captured")
        step()
        number += 1
    given_up = 0
    pairs = [(block(saves=True), block(saves=False)) for _ in range(card.size(5, 2))]
    checkpointer.abandon()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share = statistics.median(saved / plain for saved, plain in pairs) - 1
    return [
        Figure("slowdown_percent", 100 * share, "%", "<= 1" if not card.small else ""),
        Figure("step_ms", 1e3 * statistics.median(plain for _, plain in pairs) / card.size(10, 2), "ms"),
        Figure("parameters", parameters / 1e9, "1e9"),
        Figure("versions_given_up", float(given_up), "versions"),
    ]


def _job(
    card: Card, directory: Path, *words: object, ranks: int = 0, timeout_s: float = 120.0
) -> tuple[dict[str, Any], float]:
    """What the job's first rank says at its end, and how long it took. With `ranks` under the launcher."""
    launcher = [
        "-m",
        "holdfast.elastic.launch.run_command",
        f"--nproc-per-node={ranks}",
        "--standalone",
        "--max-restarts=3",
        "--watchdog=quick",
    ]
    command = [sys.executable, *(launcher if ranks else []), str(JOB), card.kind, str(directory), *map(str, words)]
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=_environment(directory)
    )
    seconds = time.perf_counter() - began
    ends = [line.split("job ends: ", 1)[1] for line in done.stdout.splitlines() if "job ends: " in line]
    if not ends:
        if done.returncode == -signal.SIGKILL and not ranks:
            return {}, seconds
        raise RuntimeError(f"the job ended with {done.returncode}: {done.stdout[-800:]}{done.stderr[-1500:]}")
    told: dict[str, Any] = json.loads(ends[0])
    return told, seconds


def _environment(directory: Path) -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOLDFAST_RUNTIME_DIR": str(directory / "run")}


def exact(card: Card) -> list[Figure]:
    """Fused AdamW, dropout, GradScaler: killed at a step and back, against an undisturbed run, bit for bit."""
    truth, _ = _job(card, card.directory / "truth", "plain", 0)
    _job(card, card.directory / "hurt", "plain", 7)
    back, _ = _job(card, card.directory / "hurt", "plain", 0)
    return [
        Figure("ends_differ", float(back["digest"] != truth["digest"]), "runs", "<= 0"),
        Figure("resumed_at", float(back["start"]), "step", ">= 1"),
    ]


SCRIPT = Path(__file__).with_name("script.py")


def _script(card: Card, directory: Path, kind: str, kills: str, *, kept: bool) -> tuple[str, list[int]]:
    """How the script ends, and the steps that it says it made, in order."""
    run = [
        "-m",
        "holdfast.adapters.zero_lines.launcher",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--every=1",
        f"--checkpoint-dir={directory / 'checkpoints'}",
    ]
    command = [sys.executable, *(run if kept else []), str(SCRIPT), kind, kills, str(directory)]
    environ = _environment(directory)
    if card.is_simulated:  # nothing in the script loads it
        environ["PYTHONPATH"] = os.pathsep.join([card.simulated.autoload_directory(), environ["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environ)
    ends = re.findall(r"script ends: (\w+)", done.stdout)
    if done.returncode or not ends:
        raise RuntimeError(f"{kind} ended with {done.returncode}: {done.stdout[-800:]}{done.stderr[-2500:]}")
    return ends[0], [int(number) for number in re.findall(r"script makes step (\d+)", done.stdout)]


def scripts(card: Card) -> list[Figure]:
    """Scripts that know nothing of holdfast, killed twice and back, against themselves alone, bit for bit."""
    figures = []
    kinds = ["amp", "clip", "compile", "trainer"]
    if card.is_simulated:
        kinds = kinds[:2]
    elif importlib.util.find_spec("transformers") is None:
        kinds.remove("trainer")
    for kind in kinds:
        truth, _ = _script(card, card.directory / f"{kind}-truth", kind, "", kept=False)
        end, steps = _script(card, card.directory / f"{kind}-hurt", kind, "9,18", kept=True)
        figures += [
            Figure(f"ends_differ:{kind}", float(end != truth), "runs", "<= 0"),
            Figure(f"steps_made_again:{kind}", float(len(steps) - len(set(steps))), "steps", "<= 4"),
        ]
    return figures


HOLDER = """
import os, sys, time, torch
if sys.argv[1] == "sim":
    from holdfast.testing import device
    device.load()
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.zeros(8)
free = torch.get_device_module(sys.argv[1]).mem_get_info()[0]
held = torch.empty(int(free * 0.7), dtype=torch.uint8, device=sys.argv[1])
held[:: 1 << 20] = 1
print("holds", held.numel(), flush=True)
if sys.argv[2] == "stay":
    for _ in DataLoader(Slow(), num_workers=2, multiprocessing_context="spawn"):
        time.sleep(0.1)
"""


def killed_holder(card: Card) -> list[Figure]:
    """A process that holds 70 % of the card is killed with its loaders alive; the next one wants as much."""

    def start(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, card.kind, what]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=_environment(card.directory), start_new_session=True
        )

    alone = start("end")
    usual = host_seconds(alone.communicate)
    first = start("stay")
    try:
        assert first.stdout is not None
        first.stdout.readline()
        first.kill()
        second = start("end")
        seconds = host_seconds(second.communicate)
    finally:
        first.wait()
        for process in (first, alone):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return [
        Figure("next_process_failed", float(second.returncode != 0), "processes", "<= 0"),
        Figure("seconds_beyond_the_usual", seconds - usual, "s", "<= 3"),
    ]


def survivor(card: Card) -> list[Figure]:
    """Two ranks on one card, one is killed: the other keeps its process and its context; the end is exact."""
    truth, _ = _job(card, card.directory / "truth", "ranks", 0, ranks=2)
    back, _ = _job(card, card.directory / "hurt", "ranks", 7, ranks=2)
    return [
        Figure("ends_differ", float(back["digest"] != truth["digest"]), "runs", "<= 0"),
        Figure("survivor_replaced", float(back["pids"] > 1), "processes", "<= 0"),
        Figure("seconds_between_steps", back["longest_s"], "s", "<= 2" if not card.small else ""),
        Figure("card_bytes_grown", back["grown_bytes"] / MIB, "MiB"),
    ]


def groups(card: Card) -> list[Figure]:
    """A group of the vendor's backend with one rank: aborted, destroyed and made anew, again and again."""
    backend = {"cuda": "nccl", "sim": "simccl"}.get(card.kind)
    if backend is None:
        raise NotHere(f"no backend is known for {card.kind}")
    times, starts, free = [], [], []
    for number in range(card.size(20, 3)):
        store = dist.FileStore(str(card.directory / f"store{number}"), 1)
        began = time.perf_counter()
        dist.init_process_group(f"cpu:gloo,{card.kind}:{backend}", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1 << 20, device=card.device))
        card.synchronize()
        starts.append(time.perf_counter() - began)
        group = dist.group.WORLD
        assert group is not None
        try:
            group._get_backend(card.device).abort()
        except (RuntimeError, AttributeError) as error:
            raise NotHere(f"the backend does not abort: {error}") from error
        dist.destroy_process_group()
        times.append(time.perf_counter() - began)
        free.append(card.free_bytes())
    return [
        Figure("seconds_each", statistics.median(times), "s", "<= 1" if not card.small else ""),
        Figure("seconds_to_the_first_collective", statistics.median(starts), "s"),
        Figure("card_bytes_grown", (free[0] - free[-1]) / MIB, "MiB", "<= 50"),
    ]


def hang(card: Card) -> list[Figure]:
    """A rank whose device does not come back is found, replaced, and the job ends as if nothing had been."""
    truth, _ = _job(card, card.directory / "truth", "ranks", 0, ranks=2)
    back, _ = _job(card, card.directory / "hurt", "hang", 7, ranks=2, timeout_s=240.0)
    return [
        Figure("ends_differ", float(back["digest"] != truth["digest"]), "runs", "<= 0"),
        Figure("seconds_until_the_next_step", back["longest_s"], "s", "<= 30" if not card.small else ""),
    ]
