"""A version goes into another layout: other mesh, placements, stages, number of ranks; every tensor bit for bit.

Real ranks over gloo, each job with keepers of its own nodes; between jobs the keepers end, so what is restored comes
from storage, or they stay, and it comes from their memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import forked
from e2e import layout_worker
from kit.layout_jobs import TIMEOUT_S, Facts, Jobs, hop, stored_bytes, whole
from sample_kit import MORE

BIG = 300_000  # columns of 8 elements: 9.6 MB, three of them with the moments; more than one checksum chunk each


def read_bytes(facts: Facts, nodes: int = 1) -> int:
    """What the keepers read of images from storage; one rank of each node tells."""
    heads = [facts[node * len(facts) // nodes] for node in range(nodes)]
    return sum(row["counters"].get("storage_read_bytes", 0) for row in heads)


def loads_merged(jobs: Jobs, rows: Facts) -> None:
    """One file made of the newest version loads in this process, which knows no layout, and has what all ranks had."""
    whole_file = jobs.home / "whole.pt"
    export = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.cli", "export", str(jobs.root), str(whole_file), "--to", "torch"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert export.returncode == 0, export.stderr
    tree = torch.load(whole_file, weights_only=True)
    content = {name: layout_worker.digest(tensor) for name, tensor in tree["model"].items()}
    for name, state in tree["optimizer"]["state"].items():
        content |= {f"{name}.{key}": layout_worker.digest(tensor) for key, tensor in state.items()}
    assert content == whole(rows), "a merged file has what all ranks together have"
    model = layout_worker.model_of("one", 0, 0)
    model.load_state_dict(tree["model"], strict=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_to_four_to_one(jobs: Jobs) -> None:
    first = jobs.run("fsdp", 8, nodes=2, big=BIG)
    second = hop(jobs, first, "fsdp_tp", 4, nodes=2, big=BIG)
    assert read_bytes(second, 2) <= stored_bytes(jobs, first[0]["version"]), "every stored byte at most once per job"
    assert min(row["counters"]["storage_read_bytes"] for row in (second[0], second[2])) > 0, "both nodes read"
    third = hop(jobs, second, "one", 1, big=BIG)
    assert read_bytes(third) <= stored_bytes(jobs, second[0]["version"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensor_parallel_four_to_two_by_two_and_back(jobs: Jobs) -> None:
    first = jobs.run("tp", 4)
    second = hop(jobs, first, "fsdp_tp", 4)
    loads_merged(jobs, second)
    third = hop(jobs, second, "tp", 4)
    fourth = hop(jobs, third, "hsdp", 4)
    hop(jobs, fourth, "ddp", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_to_five_uneven(jobs: Jobs) -> None:
    first = jobs.run("fsdp", 3, nodes=3)
    hop(jobs, first, "fsdp", 5, nodes=2)


@pytest.mark.timeout(240)
def test_two_stages_to_one_and_what_belongs_to_single_ranks(jobs: Jobs) -> None:
    """Parameters, moments, step counts and group options follow by name; random numbers and positions by a rule."""
    first = jobs.run("pp", 2)
    second = hop(jobs, first, "one", 1)
    (alone,) = second
    assert alone["random"] == first[0]["random_after"], "rank 0 goes on with its own random numbers"
    assert alone["position"] == first[0]["at"]
    assert any("loader: as rank 0 of 2 ranks left it" in line for line in alone["by_rank"])
    assert any("rng: what rank 1 had is not used" in line for line in alone["by_rank"])
    assert not alone["not_used"]

    third = hop(jobs, second, "fsdp", 2, all_ranks=True)
    assert [row["position"] for row in third] == [alone["at"] * 10, alone["at"] * 10 + 1], "an object that takes all"
    assert third[0]["random"] == alone["random_after"]
    assert third[1]["random"] != alone["random_after"], "no two ranks draw the same numbers"
    assert any("rng: kept as it is here" in line for line in third[1]["by_rank"])

    loads_merged(jobs, third)


@pytest.mark.timeout(240)
def test_what_does_not_fit_is_told_by_name_on_every_rank_and_nothing_is_recorded(jobs: Jobs) -> None:
    first = jobs.run("fsdp", 2)
    refused = jobs.run("one", 1, big=40)
    (row,) = refused
    assert row["error"].startswith("MismatchError"), row
    assert "model.3.weight" in row["error"]
    assert "model.3.bias" in row["error"], "unexpected in the checkpoint"
    (loose,) = jobs.run("one", 1, big=40, strict=False, steps=0)
    assert any("model.3.weight" in line for line in loose["misfit"])
    assert "model.3.bias" in loose["not_used"]
    assert {n: d for n, d in loose["restored"].items() if n[0] != "3"} == {
        n: d for n, d in whole(first).items() if n[0] != "3"
    }


@MORE
@pytest.mark.timeout(240)
def test_killed_in_the_middle_of_it_leaves_nothing_half_done(jobs: Jobs) -> None:
    first = jobs.run("fsdp", 2, big=BIG)
    for rank in jobs_killed_while_restoring(jobs):
        rank.kill()
    for rank in jobs.ranks:
        rank.wait(30)
    jobs.ranks.clear()
    files = sorted(path.name for path in (jobs.root / "incarnations").iterdir())
    assert "000002.resumed.json" not in files, "a restore that did not end resumed from nothing"
    assert sorted(path.name for path in jobs.root.glob("i*-s*")) == [first[0]["version"]]
    hop(jobs, first, "fsdp", 3, big=BIG)


def jobs_killed_while_restoring(jobs: Jobs) -> list[forked.Popen]:
    """Three ranks that have begun to restore, stopped as soon as the keeper has read a first chunk for them."""
    name = jobs.start("fsdp", 3, big=BIG)
    deadline = time.monotonic() + TIMEOUT_S
    while not (jobs.root / "incarnations" / "000002.json").exists():
        assert time.monotonic() < deadline, jobs.logs(name)
        assert all(rank.poll() is None for rank in jobs.ranks), jobs.logs(name)
    for rank in jobs.ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    return jobs.ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_to_three_stages_to_shards(jobs: Jobs) -> None:
    """The head is the embedding: one tensor in the whole model, one each in the first and the last stage."""
    first = jobs.run("one", 1, tied=True)
    assert "embed.weight" in whole(first)
    second = hop(jobs, first, "pp", 3, tied=True)
    third = hop(jobs, second, "fsdp", 2, tied=True)
    hop(jobs, third, "pp", 2, tied=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_to_two_to_six(jobs: Jobs) -> None:
    first = jobs.run("fsdp_tp", 4)
    second = hop(jobs, first, "fsdp_tp", 2)
    hop(jobs, second, "fsdp_tp", 6, nodes=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_fsdp_with_other_numbers_of_ranks(jobs: Jobs) -> None:
    """Rows of numbers, cut elsewhere; one rank, where FSDP cuts nothing, is told what does not fit."""
    first = jobs.run("first_fsdp", 4, nodes=2)
    second = hop(jobs, first, "first_fsdp", 3)
    (alone,) = jobs.run("first_fsdp", 1)
    assert alone["error"].startswith("MismatchError"), alone
    assert "model.0.weight (saved with shape (432,), here (36, 12))" in alone["error"]
    hop(jobs, second, "first_fsdp", 2)


@MORE
@pytest.mark.timeout(240)
def test_from_memory_alone(jobs: Jobs) -> None:
    """The trainers die, nothing is in storage; the keepers of the same nodes have it, and more or fewer ranks take it."""
    first = jobs.run("fsdp", 4, nodes=2, level="replicated", dies=True)
    second = hop(jobs, first, "fsdp_tp", 2, nodes=2, level="replicated", dies=True)
    assert all("storage" not in row["bytes"] for row in second)
    assert not list(jobs.root.glob("i*-s*"))
    third = hop(jobs, second, "fsdp", 3, nodes=2)
    assert all("storage" not in row["bytes"] for row in third)
