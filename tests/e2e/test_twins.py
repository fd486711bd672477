"""Ranks that should hold the same and do not, in real jobs: who and what is named within that save."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from holdfast.base.events import Events
from holdfast.tiers.storage.version_store import open_storage
from sample_kit import sampled

WORKER = Path(__file__).with_name("twins_worker.py")


def run(
    home: Path, world: int, *arguments: object, worker: Path = WORKER, node: str = "n{rank}"
) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "HOLDFAST_NODE_LABEL": node.format(rank=rank),
        }  # fmt: skip
        command = [sys.executable, str(worker), str(home / "job"), str(home), *map(str, arguments)]
        with (home / f"{rank}.log").open("wb") as log:
            ranks.append(forked.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait(timeout=120) for rank in ranks]
    assert codes == [0] * world, "\n".join((home / f"{rank}.log").read_text()[-3000:] for rank in range(world))
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "said"),
    sampled(
        [(2, "ranks 0 and 1 differ in "), (3, "rank 1 differs from ranks 0 and 2 in ")], (2, "ranks 0 and 1 differ in ")
    ),
)
@pytest.mark.usefixtures("runtime_dir")
def test_one_flipped_bit_names_rank_and_entry_and_the_verified_version_is_used(
    tmp_path: Path, world: int, said: str
) -> None:
    seen = run(tmp_path, world, 1)

    for facts in seen:
        assert len(facts["reasons"]) == 2, "the flip stays, so every version from then on is suspect"
        assert all("suspect" in reason for reason in facts["reasons"])
        assert facts["back"].endswith("s0000000000")
    named = seen[0]["suspects"]["i000001-s0000000001"]
    assert named.startswith(said)
    assert "0.weight" in named
    assert "bias" not in named
    assert any(named in alarm for alarm in seen[1]["alarms"])
    assert len({tuple(facts["weight"]) for facts in seen}) == 1


@pytest.mark.parametrize("budget", sampled(["1GiB", "1MiB"], "1GiB"), ids=["memory", "storage alone"])
@pytest.mark.usefixtures("runtime_dir")
def test_no_version_is_made_of_rows_of_two_ranks_of_a_node(tmp_path: Path, budget: str) -> None:
    """They divide the copy of what they share: between two averagings there is nothing that both hold."""
    seen = run(tmp_path, 2, budget, worker=WORKER.with_name("shared_worker.py"), node="n0")

    for facts in seen:
        assert [bool(reason) for reason in facts["given_up"]] == [True, False] * 4
        assert all("hold different values of" in reason for reason in facts["given_up"][::2])
        assert facts["back"].endswith("s0000000007")
        assert facts["equal"]
    if budget == "1GiB":
        assert "model.0.bias, model.0.weight" in seen[0]["given_up"][6], "late by then, and named all the same"


@pytest.mark.parametrize("what", sampled(["dict", "unowned"], "dict"))
@pytest.mark.usefixtures("runtime_dir")
def test_what_no_optimizer_owns_is_compared_too(tmp_path: Path, what: str) -> None:
    seen = run(tmp_path, 2, "1GiB", what, worker=WORKER.with_name("shared_worker.py"), node="n0")

    for facts in seen:
        assert [bool(reason) for reason in facts["given_up"]] == [True, False] * 2
        assert facts["holds"] == [3.0]


@pytest.mark.usefixtures("runtime_dir")
def test_what_all_had_before_they_differed_is_durable_at_the_end(tmp_path: Path) -> None:
    seen = run(tmp_path, 2, "1GiB", "the end", worker=WORKER.with_name("shared_worker.py"), node="n0")

    for facts in seen:
        assert "hold different values of tensors" in facts["said"]
        assert "what is durable is i000001-s0000000000" in facts["said"]
    assert [version.step for version in open_storage(tmp_path / "job", Events()).versions()] == [0]
