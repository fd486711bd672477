"""The time limit that a script gives its groups is the script's: the watchdog knows it, and a group made again has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forked
from launch_kit import LAUNCH

TOLD = """
from datetime import timedelta
import torch.distributed as dist
from holdfast.checkpoint.liveness import heartbeat as beats, heartbeat_page as page
fd = page.make_page()
beats.attach(fd)
def told(**given):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **given)
    print(page.read(fd).beat.group_s)
told()
dist.destroy_process_group()
told(timeout=timedelta(minutes=30))
dist.new_group()
dist.new_group(timeout=timedelta(hours=3))
dist.new_group(timeout=timedelta(minutes=1))
print(page.read(fd).beat.group_s)
beats.attach(fd)
print(page.read(fd).beat.group_s)
"""


def test_the_page_tells_the_longest_limit_that_the_script_gave() -> None:
    done = forked.run([sys.executable, "-c", TOLD], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0.0", "1800.0", "10800.0", "0.0"], done.stderr[-2000:]


RESUMED = """
import os, pathlib, signal
from datetime import timedelta
import torch.distributed as dist
import holdfast
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
dist.init_process_group("gloo", timeout=timedelta(seconds=77))
def train():
    again = os.environ["TORCHELASTIC_RESTART_COUNT"]
    limit = dist.group.WORLD._get_backend(dist.group.WORLD._device_types[0]).options._timeout
    (here / f"limit{rank}.{again}").write_text(str(limit.total_seconds()))
    dist.barrier()
    if rank == "1" and again == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
holdfast.resumable(train)()
"""


def test_a_default_group_that_is_made_again_has_the_limit_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RESUMED)
    environment = {**os.environ, "HERE": str(tmp_path), "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [*LAUNCH, "--standalone", "--nproc-per-node=2"]
    done = forked.run(
        [*command, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    limits = {path.name: float(path.read_text()) for path in tmp_path.glob("limit*")}
    assert limits == {"limit0.0": 77.0, "limit1.0": 77.0, "limit0.1": 77.0, "limit1.1": 77.0}
