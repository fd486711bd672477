"""Where a script cannot run again in its process, that process is replaced by a fork; a job of real launchers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
from launch_kit import LAUNCH

# Makes steps together; the last rank is killed in the first runs, each time at another step. `FIRST` runs before, on each rank.
SCRIPT = """
import os, pathlib, signal, sys, threading, time
import torch
from torch import distributed as dist
here, rank = pathlib.Path(os.environ["HERE"]), int(os.environ["RANK"])
run, world = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])
with open(here / f"pids{rank}", "a") as file:
    file.write(f"{os.getpid()}\\n")
FIRST
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kills = int(os.environ["KILLS"])
for step in range(20 + kills):
    if rank == world - 1 and run < kills and step == 5 + run:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""

Launch = Callable[..., subprocess.CompletedProcess[Any]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    def start(first: str, *flags: str, kills: int = 1, limit_s: float = 60) -> subprocess.CompletedProcess[Any]:
        (tmp_path / "script").mkdir(exist_ok=True)
        script = tmp_path / "script" / "script.py"
        script.write_text(SCRIPT.replace("FIRST", first))
        environment = {
            **os.environ,
            "HERE": str(tmp_path),
            "KILLS": str(kills),
            "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run"),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        command = [*LAUNCH, "--standalone", *flags, str(script)]
        return forked.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)

    return start


def pids(tmp_path: Path, rank: int) -> list[str]:
    return (tmp_path / f"pids{rank}").read_text().split()


def test_a_clean_script_keeps_the_processes_of_those_that_live(tmp_path: Path, launch: Launch) -> None:
    done = launch("", "--nproc-per-node=2", "--max-restarts=2", kills=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(set(pids(tmp_path, 0))) == 1
    assert len(pids(tmp_path, 0)) == 3


THREAD = """
def save():
    while True:
        with open(here / "wrote", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.01)
if rank == 0:
    threading.Thread(target=save, daemon=True, name="saver").start()
import subprocess
with open(here / f"children{rank}", "a+") as file:
    file.seek(0)
    for before in file.read().split():
        stat = pathlib.Path(f"/proc/{before}/stat")
        assert not stat.exists() or stat.read_text().split()[2] in "ZX", "what a dead rank had started lives"
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "600"], stdin=quiet, stdout=quiet, stderr=quiet)
    file.write(f"{child.pid}\\n")
    import atexit
    atexit.register(child.kill)  # what a good end leaves is left
"""


def test_threads_and_children_of_the_old_run_are_gone_before_the_new_one(tmp_path: Path, launch: Launch) -> None:
    """Ranks that have some are replaced, which is no failure, and the reason is said once."""
    done = launch(THREAD, "--nproc-per-node=3", "--max-restarts=2", kills=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("cannot run again in its process") == 1
    assert [len(set(pids(tmp_path, rank))) for rank in range(3)] == [3, 3, 3]
    assert {line for line in (tmp_path / "wrote").read_text().split() if line} <= set(pids(tmp_path, 0))
    last = [line for line in (tmp_path / "wrote").read_text().split() if line][-1]
    assert last == pids(tmp_path, 0)[-1]


LOADER = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index): return torch.tensor(index)
batches = iter(torch.utils.data.DataLoader(Numbers(), num_workers=2))
next(batches)
import secrets
assert secrets.mine, "a module of the launcher's in the place of the script's own"
"""


def test_a_loader_in_a_global_costs_no_survivor_its_process(tmp_path: Path, launch: Launch) -> None:
    """The collector that frees it would wait five seconds for each of its workers, and that is no hang."""
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "secrets.py").write_text("mine = True\n")
    done = launch(LOADER, "--nproc-per-node=2", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stands in a wait" not in done.stderr
    assert len(set(pids(tmp_path, 0))) == 1


# What the launcher holds, and the process that it forks from, when a run begins; a hook keeps rank 0 from a run in its process.
HOLDS = """
if rank == 0:
    import json, psutil
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: None)
    forkserver = psutil.Process(os.getppid())
    rows = [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in (forkserver, forkserver.parent())]
    with open(here / "holds", "a") as file:
        file.write(json.dumps(rows) + "\\n")
"""
WARM_UP, MAY_GROW_BYTES = 4, 12 << 20


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_many_runs_in_forks_leave_nothing_in_the_launcher(tmp_path: Path, launch: Launch, count: int) -> None:
    done = launch(
        HOLDS, "--nproc-per-node=2", f"--max-restarts={count}", kills=count, limit_s=1100 if count > 8 else 100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(set(pids(tmp_path, 0))) == count + 1, "each run of rank 0 has a process of its own"
    rows = [json.loads(line) for line in (tmp_path / "holds").read_text().splitlines()]
    assert len(rows) == count + 1
    for who in range(2):
        memory, descriptors, threads = zip(*(row[who] for row in rows), strict=True)
        assert max(descriptors[WARM_UP:]) <= max(descriptors[:WARM_UP]) + 2, descriptors
        assert max(threads[WARM_UP:]) <= max(threads[:WARM_UP]) + 1, threads
        assert memory[-1] - memory[WARM_UP - 1] < MAY_GROW_BYTES, [value >> 20 for value in memory]


# A library, installed elsewhere than the script: it is set up once per process.
LIBRARY = """
is_set_up = False
def set_up():
    global is_set_up
    if is_set_up:
        raise ValueError("it was set up before")
    is_set_up = True
"""


HOOK = """
if rank == 0:
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: None)
"""


def test_what_one_rank_cannot_no_rank_does_from_then_on(tmp_path: Path, launch: Launch) -> None:
    """Rank 0 alone has a hook: it is replaced at the first failure, rank 1 from the second on."""
    done = launch(HOOK, "--nproc-per-node=3", "--max-restarts=2", kills=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(rank 0: " in done.stderr
    assert "global hooks of torch: global_optimizer_post_hooks" in done.stderr
    assert [len(set(pids(tmp_path, rank))) for rank in range(3)] == [3, 2, 3]


def test_ranks_that_cannot_run_twice_are_one_failure_with_the_one_that_died(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "once.py").write_text(LIBRARY)
    first = f"sys.path.insert(0, {str(tmp_path / 'site-packages')!r}); import once; once.set_up()"
    done = launch(first, "--nproc-per-node=4", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("cannot run again in its process") == 1
    assert "it was set up before" in done.stderr


def test_deaths_within_moments_of_an_order_are_one_failure(tmp_path: Path, launch: Launch) -> None:
    """All ranks that live are killed as soon as they run again, as by a fault of their machine."""
    dies = "if run == 1 and 0 < rank < world - 1:\n    os.kill(os.getpid(), signal.SIGKILL)"
    done = launch(dies, "--nproc-per-node=4", "--max-restarts=1")
    assert done.returncode == 0, done.stderr[-3000:]
