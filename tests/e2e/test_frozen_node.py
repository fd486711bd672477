"""A node with everything on it freezes, is replaced, and wakes up: nothing of it joins, and nothing of it is saved."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.testing.contracts.adapter_processes import keepers_under
from holdfast.testing.soak import soak
from holdfast.tiers.storage.version_store import open_storage
from launch_kit import Job, Nodes, family, wait_for


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    started = Job(tmp_path, soak.WORKER)
    yield started
    started.end()
    for keeper in keepers_under(runtime_dir):  # they would wait for somebody to come back
        keeper.terminate()
        keeper.wait(20)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_wakes_up_after_it_was_replaced_neither_joins_nor_saves(job: Job, runtime_dir: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Nodes(job, f"127.0.0.1:{store.port}", hosted=False)
    watch = soak.Soak(job.directory, random.Random(0))
    storage = open_storage(str(job.directory / "checkpoints"), Events())

    def durable(incarnation: int) -> list[Version]:
        return [version for version in storage.versions() if version.incarnation == incarnation]

    def home(name: str) -> str:
        return f"--runtime-dir={runtime_dir}/{name}"  # another machine has another one

    first, second = nodes.start(0, home("n0")), nodes.start(1, home("n1"))
    wait_for(lambda: durable(1), "a durable version", job.logs)
    pids = {rank: pid for rank, (pid, _) in watch.newest().items()}
    frozen = [*family(second), *keepers_under(runtime_dir / "n1")]
    assert len(frozen) >= 4, "launcher, fork server, rank, keeper"
    for process in frozen:
        process.suspend()
    third = nodes.start(1, home("n1-again"))
    watch.wait(time.time(), [pids[1]])
    assert watch.newest()[0][0] == pids[0], "the node that lives lost its process"
    wait_for(lambda: durable(2), "a durable version of the replacement", job.logs)

    before = durable(1)
    for process in frozen:
        process.resume()
    assert second.wait(60) == 1
    wait_for(
        lambda: not [p for p in frozen[:-1] if p.is_running() and p.status() != "zombie"], "the zombies' end", job.logs
    )
    woken = time.time()
    watch.wait(woken)
    newest = max(durable(2))
    wait_for(lambda: max(durable(2)) > newest, "one more durable version", job.logs)
    assert set(durable(1)) <= set(before), "a version of the incarnation that is over was committed"
    assert {rank: pid for rank, (pid, _) in watch.newest().items()}[0] == pids[0]
    job.stop()
    assert [first.wait(60), third.wait(60)] == [0, 0], job.logs()
    steps, _ = watch.judge()
    assert steps > 100
