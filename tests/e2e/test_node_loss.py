"""Two simulated nodes, two ranks each: a whole node dies with its keeper, the job comes back from the other's memory.

Then one rank alone gets SIGTERM, and all four stop after the same step, with exit code 0 and that step in storage.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import forked
from e2e import hsdp_worker
from holdfast.base.events import Events
from holdfast.testing.contracts.adapter_processes import keepers_under
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import end_keepers

WORKER = Path(__file__).with_name("hsdp_worker.py")
NODES = ("a", "a", "b", "b")


class Cluster:
    """Four ranks on these node labels, with one log per rank."""

    def __init__(self, home: Path, runtime_dir: Path, nodes: tuple[str, ...] = NODES, settings: str = "") -> None:
        self.home, self.runtime_dir, self.nodes = home, runtime_dir, nodes
        self.environment: dict[str, str] = {}
        # The nodes meet as those of two machines do: over TCP, proved by the job's secret.
        secret, self.settings = home / "job.secret", home / "settings.toml"
        secret.touch(0o600)
        secret.write_text(os.urandom(32).hex())
        self.settings.write_text(f'listen = "127.0.0.1"\nsecret_file = "{secret}"\n{settings}')
        self.ranks: list[forked.Popen] = []

    def start(self, part: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ranks = [self._start(part, rank, port) for rank in range(len(NODES))]

    def _start(self, part: str, rank: int, port: int) -> forked.Popen:
        environment = {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(self.nodes[:rank].count(self.nodes[rank])),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1", "HOLDFAST_NODE_LABEL": self.nodes[rank],
            "GROUP_INFO_FILE": str(self.home / "made" / "rank_{rank}" / "group_info.pb"),
            "HOLDFAST_CONFIG": str(self.settings), **self.environment,
        }  # fmt: skip
        with (self.home / f"{part}-{rank}.log").open("wb") as log:
            return forked.Popen(
                [sys.executable, str(WORKER), part, str(self.home / "job"), str(self.home)],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def keeper(self, node: str) -> psutil.Process:
        """The keeper of a node."""
        (found,) = (process for process in keepers_under(self.runtime_dir) if node in process.cmdline())
        return found

    def facts(self, part: str) -> list[dict[str, Any]]:
        return [json.loads((self.home / f"{part}-{rank}.json").read_text()) for rank in range(len(NODES))]

    def until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert all(rank.poll() in (None, 0) for rank in self.ranks), self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.home.glob("*.log")))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def cluster(tmp_path: Path, runtime_dir: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, runtime_dir)
    yield cluster
    cluster.end()
    end_keepers(runtime_dir)


@pytest.mark.timeout(400)  # eight processes that import torch, on whatever else the machine does
def test_a_lost_node_comes_back_from_its_twins_and_replicas_and_a_stop_is_agreed(cluster: Cluster) -> None:
    cluster.start("first")
    cluster.until(lambda: all((cluster.home / f"first-{rank}.json").exists() for rank in range(4)))
    first = cluster.facts("first")
    assert all(facts["trained"] == dict(pairs(facts["reference"], facts["trained"])) for facts in first)
    # As MindSpore's ranks do, before the first step: whose slices replace whose, in a private file.
    assert [facts["group_info"] for facts in first] == [[[rank % 2, rank % 2 + 2], 0o600] for rank in range(4)]
    for rank in (2, 3):
        cluster.ranks[rank].kill()
    cluster.keeper("b").kill()
    for rank in (0, 1):  # they hang in a collective with the dead
        cluster.ranks[rank].kill()
    cluster.end()

    cluster.start("second")
    cluster.until(lambda: all((cluster.home / f"trains-{rank}").exists() for rank in range(4)))
    cluster.ranks[3].send_signal(signal.SIGTERM)
    cluster.until(lambda: all(rank.poll() is not None for rank in cluster.ranks))
    assert [rank.returncode for rank in cluster.ranks] == [0] * 4, cluster.logs()

    second = cluster.facts("second")
    assert {facts["start"] for facts in second} == {hsdp_worker.LAST_OF_FIRST + 1}
    assert {facts["version"] for facts in second} == {f"i000001-s{hsdp_worker.LAST_OF_FIRST:010d}"}
    # What one rank of node b had pulled the other found on its own node.
    assert all("peer" in facts["bytes"] and set(facts["bytes"]) <= {"peer", "node"} for facts in second[2:])
    assert all("storage" not in facts["bytes"] and "peer" not in facts["bytes"] for facts in second[:2])
    stops = {max(map(int, facts["trained"])) for facts in second}
    assert len(stops) == 1, f"all ranks stop after the same step, not {stops}"
    # Seconds are rank 0's clock; what it proposed, all ranks saved at one step (or gave up, if one was past it).
    assert len(set.intersection(*(set(facts["saved"]) for facts in second))) >= 2
    for before, after in zip(first, second, strict=True):
        assert after["trained"] == dict(pairs(before["reference"], after["trained"]))
    versions = open_storage(cluster.home / "job", Events()).versions()
    assert [(v.incarnation, v.step) for v in versions] == [(2, stops.pop())], "the last step is durable"


@pytest.fixture
def sharded(tmp_path: Path, runtime_dir: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, runtime_dir, ("a", "b", "c", "d"), 'redundancy = "parity:4"\n')
    cluster.environment = {"ALL_SHARDED": "1"}
    yield cluster
    cluster.end()
    end_keepers(runtime_dir)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_node_of_four_comes_back_bit_for_bit_from_parity(sharded: Cluster) -> None:
    """FSDP2 over four nodes: no twin holds what the lost one held."""
    sharded.start("first")
    sharded.until(lambda: all((sharded.home / f"first-{rank}.json").exists() for rank in range(4)))
    first = sharded.facts("first")
    sharded.ranks[2].kill()
    sharded.keeper("c").kill()
    sharded.end()

    sharded.start("second")
    sharded.until(lambda: all((sharded.home / f"trains-{rank}").exists() for rank in range(4)))
    sharded.ranks[0].send_signal(signal.SIGTERM)
    sharded.until(lambda: all(rank.poll() is not None for rank in sharded.ranks))
    assert [rank.returncode for rank in sharded.ranks] == [0] * 4, sharded.logs()

    second = sharded.facts("second")
    assert {facts["version"] for facts in second} == {f"i000001-s{hsdp_worker.LAST_OF_FIRST:010d}"}
    assert "parity" in second[2]["bytes"], "what the lost rank alone held"
    for rank in (0, 1, 3):
        assert set(second[rank]["bytes"]) == {"slot"}
    assert not any("storage" in facts["bytes"] for facts in second)
    for before, after in zip(first, second, strict=True):
        assert len(after["saved"]) >= 2
        assert after["trained"] == dict(pairs(before["reference"], after["trained"])), "as if nothing had happened"


def pairs(reference: list[str], trained: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What the uninterrupted run had after the same steps."""
    return ((step, reference[int(step)]) for step in trained)
