"""Eight real ranks of every strategy: what they hold and with whom is what `core.layout.job_layout` says of the meshes.

The ranks run once, in strategy_worker.py; the tests look at what they wrote down.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from adapters.mindspore_kit import SAMPLES, golden
from checkpoint.strategies import STRATEGIES, WORLD
from holdfast.adapters.mindspore import get_parameter_redundancy, restore_ranks
from holdfast.core.layout.cost_plan import JobPlan
from holdfast.core.layout.mesh_inference import infer
from holdfast.core.layout.redundancy_groups import Census
from holdfast.core.model import Extent, Shard, Topology

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
Rank = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    results = tmp_path_factory.mktemp("strategies")
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{EXAMPLES}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "strategy_worker.py"), str(results)]
    worker = forked.run(command, env=environment, timeout=110, capture_output=True, text=True)
    errors = [path.read_text() for path in sorted(results.glob("*.error"))]
    assert worker.returncode == 0, "\n".join([*errors[:2], worker.stderr[-2000:]])
    found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(WORLD)]
    found[0]["log"] = {"text": {"0": (results / "0.log").read_text(), "1": (results / "1.log").read_text()}}
    for rank in (0, 4):
        found[rank]["status"] = {"keeper": json.loads((results / f"status-{rank}.json").read_text())}
    for command in ("groups", "plan"):
        answer = json.loads((results / f"{command}.json").read_text())
        assert answer["code"] == 0, answer["stderr"]
        found[0][command] = {"live": json.loads(answer.pop("stdout")), "cost": answer}
    found[0]["planned"] = {"all": json.loads((results / "planned.json").read_text())}
    return found


def shards(rank: Rank, name: str, what: str = "live") -> set[Shard]:
    return {
        Shard(entry, dtype, tuple(shape), Extent(tuple(offsets), tuple(lengths)), tuple(group))
        for entry, (dtype, shape, offsets, lengths, group) in rank[name][what].items()
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_live_groups_and_extents_are_those_of_the_layout(ranks: list[Rank], name: str) -> None:
    layout = STRATEGIES[name].layout
    for rank in range(WORLD):
        live, described = shards(ranks[rank], name), set(layout.shards(rank))
        assert live == described, f"rank {rank}: {sorted(map(str, live ^ described))[:4]}"


@pytest.mark.parametrize("name", STRATEGIES)
def test_state_is_known_before_the_first_step(ranks: list[Rank], name: str) -> None:
    assert all(found[name]["predicted"] == found[name]["live"] for found in ranks)


def lists(ranks: list[Rank], name: str) -> list[list[int]]:
    """Per rank the ranks that hold all that it holds: the intersection of its groups."""
    return [sorted(set[int].intersection(*(set(s.ranks) for s in shards(found, name)))) for found in ranks]


def test_lists_of_interchangeable_ranks(ranks: list[Rank]) -> None:
    assert lists(ranks, "guide")[0] == [0, 4]
    assert lists(ranks, "ddp") == [list(range(8))] * 8
    assert lists(ranks, "fsdp") == [[rank] for rank in range(8)]
    assert lists(ranks, "pp") == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert lists(ranks, "ep")[5] == [1, 5]
    for name in STRATEGIES:
        assert lists(ranks, name) == [list(own) for own in Census(STRATEGIES[name].layout).twins()], name


def test_zero_one_replicates_weights_and_keeps_each_state_on_one_rank(ranks: list[Rank]) -> None:
    found = [shard for rank in ranks for shard in shards(rank, "zero1")]
    weights = [shard for shard in found if shard.name.startswith("model.")]
    states = [shard for shard in found if shard.name.startswith("optimizer.")]
    assert {shard.ranks for shard in weights} == {tuple(range(8))}
    assert len(states) == len({shard.name for shard in states}) > 0
    assert {len(shard.ranks) for shard in states} == {1}


def test_mindspores_lists_for_the_same_strategies(ranks: list[Rank]) -> None:
    """The guide's case, and data parallelism 4 x model parallelism 2 with and without optimizer sharding."""
    assert lists(ranks, "guide") == [[rank % 4, rank % 4 + 4] for rank in range(8)]
    theirs = golden("golden.json")["seed"]
    assert lists(ranks, "guide") == [theirs[str(rank)]["_get_cur_rank_dp"] for rank in range(8)]
    strategy = get_parameter_redundancy(SAMPLES / "dp4mp2" / "rank_0" / "strategy.ckpt")
    assert restore_ranks(strategy, 0) == (0, 2, 4, 6)
    # Of each list every second rank, as optimizer sharding by two deals it: dp4mp2opt2.
    halves = [
        [other for i, other in enumerate(restore_ranks(strategy, rank)) if i % 2 == rank // 2 % 2] for rank in range(8)
    ]
    assert lists(ranks, "hsdp_tp") == halves
    assert halves[0] == [0, 4]


def test_a_job_whose_twins_share_a_host_is_warned_by_name_at_its_start(ranks: list[Rank]) -> None:
    """Stages of data parallel ranks, each on a host of its own: a lost host takes a stage along."""
    for found in ranks:
        first, second = found["pp"]["warned"]
        assert (first["node"], second["node"]) == ("a", "b")
        stage = sum(s.num_bytes for s in shards(ranks[0], "pp") if "layer0" in s.name)
        assert first["size_bytes"] == second["size_bytes"] == stage
        assert "model.layer0." in first["names"]
        assert found["guide"]["warned"] == found["hsdp_tp"]["warned"] == found["ddp"]["warned"] == []
        assert found["ep"]["warned"] == []
    log = ranks[0]["log"]["text"]
    assert "model.layer0.up.weight" in log["0"]
    assert "live on node a only; if it dies they come back from a replica on another node" in log["0"]
    assert log["1"] == "", "one rank says it for all"


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plan_before_anything_is_allocated_is_that_of_the_real_job(ranks: list[Rank], name: str) -> None:
    everything = planned(ranks, name)
    trained = {shard for shard in everything if "/rng." not in shard.name}
    assert trained == {shard for found in ranks for shard in shards(found, name)}
    assert len(everything) > len(trained), "random numbers are part of the state too"


def planned(ranks: list[Rank], name: str) -> set[Shard]:
    return {
        Shard(entry, dtype, tuple(shape), Extent(tuple(offsets), tuple(lengths)), tuple(group))
        for entry, dtype, shape, offsets, lengths, group in ranks[0]["planned"]["all"][name]
    }


def test_groups_of_a_running_job_are_asked_of_its_keepers(ranks: list[Rank]) -> None:
    live = ranks[0]["groups"]["live"]
    found = {
        Shard(
            e["name"],
            e["dtype"],
            tuple(e["shape"]),
            Extent(tuple(e["offsets"]), tuple(e["lengths"])),
            tuple(g["ranks"]),
        )
        for g in live["groups"]
        for e in g["entries"]
    }
    assert found == planned(ranks, "large")
    assert [(node["node"], node["replica_on"]) for node in live["nodes"]] == [(0, 1), (1, 0)]
    assert all("/rng." in name for node in live["nodes"] for name in node["alone"])


@pytest.mark.parametrize("command", ["groups", "plan"])
def test_a_running_job_answers_without_torch(ranks: list[Rank], command: str) -> None:
    assert ranks[0][command]["cost"]["heavy"] == []


def test_numbers_of_the_plan_are_those_of_the_run(ranks: list[Rank]) -> None:
    """Planned before anything was allocated, told by the running job, and what keepers and storage counted."""
    plan = JobPlan(infer(WORLD, planned(ranks, "large")), Topology(("a", "b"), (0, 0, 0, 0, 1, 1, 1, 1)))
    live = ranks[0]["plan"]["live"]
    assert live["unique_bytes"] == plan.unique_bytes
    assert live["files"] == plan.num_bundles
    by_node = {node: row for row in live["nodes"] for node in row["nodes"]}
    for node, rank in enumerate((0, 4)):
        keeper = ranks[rank]["status"]["keeper"]
        told = by_node[node]
        assert (told["copied_bytes"], told["written_bytes"]) == (plan.nodes.copied[node], plan.nodes.written[node])
        own = [slot for found in keeper["ranks"].values() for slot in found["slots"]]
        sealed = [slot for slot in own if slot["state"] == "sealed"]
        same(plan.nodes.copied[node], sum(s["sealed_bytes"] for s in sealed), sum(s["bundles"] for s in sealed))
        same(plan.nodes.written[node], keeper["counters"]["storage_written_bytes"], plan.num_bundles)
        kept = keeper["replicas"]
        same(plan.nodes.kept[node], sum(s["sealed_bytes"] for s in kept), sum(s["bundles"] for s in kept))
        same(
            told["host_bytes"],
            sum(s["bytes"] for s in own) + 2 * sum(s["bytes"] for s in kept),
            len(own) + 2 * len(kept),
        )


def same(planned_bytes: int, measured: int, num_files: int) -> None:
    """A file adds its header and its values to the bytes of its tensors: some KiB."""
    assert planned_bytes <= measured <= planned_bytes * 1.01 + num_files * 12_288


# --- MindSpore's guide to recovery from redundant information: examples/rank_files.py


def scenario(ranks: list[Rank]) -> list[dict[str, Any]]:
    return [found["scenario"] for found in ranks]


def test_own_slices_are_saved_under_mindspores_names_with_group_information(ranks: list[Rank]) -> None:
    for rank, found in enumerate(scenario(ranks)):
        assert found["before"] is None
        assert found["group_info"] == [[rank % 4, rank % 4 + 4], 0o600]
        names = [f"checkpoint-{epoch}_{step}" for epoch, step in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2))]
        assert found["saved"][:-1] == [f"rank_{rank}/{name}.safetensors" for name in names]
        assert found["saved"][-1] == f"rank_{rank}/checkpoint_1-3_1.safetensors", "an earlier run's names are not taken"


def test_own_slices_are_saved_without_a_collective_and_without_a_byte_more(ranks: list[Rank]) -> None:
    for found in scenario(ranks):
        assert found["collectives"] == 0
        momentum = {
            name.replace("model.", "optimizer.state.") + ".momentum_buffer": size
            for name, size in found["slices"].items()
        }
        tensors = {name: size for name, size in found["in_file"].items() if not name.startswith("values/")}
        assert tensors == found["slices"] | momentum


def test_a_save_is_no_collective(ranks: list[Rank]) -> None:
    for found in ranks:
        assert found["collectives"]["before"] > 0, "they are counted"
        assert found["collectives"]["save"] == 0


def test_a_lost_ranks_files_are_replaced_by_its_twins_and_training_goes_on_bit_for_bit(ranks: list[Rank]) -> None:
    for found in scenario(ranks):
        assert found["recovered"] == [2, 2]
        assert found["again"] == found["expected"]
        assert found["bitwise"]


def test_with_the_twins_file_damaged_too_nothing_is_loaded_anywhere(ranks: list[Rank]) -> None:
    for found in scenario(ranks):
        assert found["refused"].startswith("CorruptError: ")
        assert "rank_4/checkpoint" in found["refused"]
        assert "ranks [0, 4] find no good file" in found["refused"]
        assert found["untouched"]
