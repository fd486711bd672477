"""Jobs that restore what jobs of another layout saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.base.events import Events
from holdfast.core.model import Version
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import end_keepers

WORKER = Path(__file__).parent.parent / "e2e" / "layout_worker.py"

TIMEOUT_S = 100.0

Facts = list[dict[str, Any]]


class Jobs:
    """Jobs on one checkpoint directory, one after the other."""

    def __init__(self, home: Path, runtime: Path) -> None:
        self.home, self.runtime = home, runtime
        self.root = home / "job"
        self._number = 0
        self.ranks: list[forked.Popen] = []

    def start(self, layout: str, world: int, *, nodes: int = 1, **more: Any) -> str:
        self._number += 1
        name = f"job{self._number}"
        spec = {"layout": layout, "root": str(self.root), "out": str(self.home), "name": name, "steps": 2, "big": 0}
        spec |= {"rendezvous": str(self.home / f"{name}.rdzv"), "level": "durable", **more}
        for rank in range(world):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo", "HOLDFAST_NODE_LABEL": f"n{rank * nodes // world}",
            }  # fmt: skip
            with (self.home / f"{name}-{rank}.log").open("wb") as log:
                command = [sys.executable, str(WORKER), json.dumps(spec)]
                self.ranks.append(forked.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return name

    def run(self, layout: str, world: int, **more: Any) -> Facts:
        """A whole job; what its ranks wrote down."""
        name = self.start(layout, world, **more)
        for rank in self.ranks:
            rank.wait(TIMEOUT_S)
        codes = [rank.returncode for rank in self.ranks]
        assert codes == [0] * world, f"{name}: {codes}\n{self.logs(name)}"
        self.ranks.clear()
        return [json.loads((self.home / f"{name}-{rank}.json").read_text()) for rank in range(world)]

    def logs(self, name: str) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.home.glob(f"{name}*.log")))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        end_keepers(self.runtime)


@pytest.fixture
def jobs(tmp_path: Path, runtime_dir: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path, runtime_dir)
    yield jobs
    jobs.end()


def whole(facts: Facts, key: str = "state") -> dict[str, str]:
    """Full tensors by name, over all ranks; ranks that have the same must agree."""
    found: dict[str, str] = {}
    for row in facts:
        for name, text in row[key].items():
            assert found.setdefault(name, text) == text, f"{name} differs between ranks"
    return found


def hop(jobs: Jobs, before: Facts, layout: str, world: int, **more: Any) -> Facts:
    """Restores into another layout, compares every full tensor, trains on and saves."""
    after = jobs.run(layout, world, **more)
    assert all(row.get("error") is None for row in after), after[0].get("error")
    assert whole(after, "restored") == whole(before), f"into {layout} of {world}"
    assert {row["lr"] for row in after} == {before[0]["lr_after"]}, "the options of the groups came along"
    return after


def stored_bytes(jobs: Jobs, text: str) -> int:
    version = Version.parse(text)
    assert version is not None
    return open_storage(jobs.root, Events()).manifest(version).num_bytes
