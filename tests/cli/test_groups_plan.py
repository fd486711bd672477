"""`groups` and `plan`: on real checkpoints, on descriptions, on what is wrong; the numbers are those of the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from command_kit import ask
from holdfast.base.events import Events
from holdfast.cli import groups_command
from holdfast.cli.console import size_text
from holdfast.cli.planning import plan
from holdfast.cli.rank_ranges import names_text, ranks_text
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.layout.cost_plan import JobPlan, uniform
from holdfast.core.layout.job_layout import JobLayout, Mesh, Tensor
from holdfast.core.layout.placement import OWN, REPLICATE, shard
from holdfast.core.model import BundleRef, Extent, Shard, Topology, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.memory.slots import SPARE_BYTES, slot_bytes
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile, Manifest
from holdfast.tiers.storage.version_store import open_storage
from sample_kit import MORE, sampled

DESCRIPTION = """
ranks_per_node = 4
mesh = { dp = 2, tp = 4 }
[[tensors]]
name = "model.layers.{i}.weight"
repeat = 3
dtype = "F32"
shape = [16, 8]
place = { tp = "shard(0)" }
[[tensors]]
name = "model.norm"
dtype = "F32"
shape = [8]
[optimizer]
states = ["exp_avg"]
scalars = ["step"]
dtype = "F32"
"""

SAVED = JobLayout(
    8,
    [Mesh(("dp", "tp"), (2, 4))],
    [
        # Large enough to be cut into several bundles, whose pieces have to be put together again.
        Tensor("model.embedding", "F32", (1024, 512), (REPLICATE, REPLICATE)),
        Tensor("model.wq", "F32", (10, 4), (REPLICATE, shard(0))),
        Tensor("optimizer.state.wq.exp_avg", "F32", (10, 4), (shard(1), shard(0))),
        Tensor("rng", "U8", (16,), (OWN, OWN)),
    ],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of a job of eight ranks on two nodes, written as its keepers would."""
    root = tmp_path_factory.mktemp("saved") / "job"
    topology = uniform(8, 4)
    storage = open_storage(root, Events())
    job, version, stamp = storage.claim(), Version(1, 5), make_stamp(1)
    storage.incarnations.register()
    files: dict[str, BundleFile] = {}
    for rank in range(8):
        for bundle in plan_bundles(SAVED.shards(rank), values_of=(), topology=topology):
            if bundle.bundle_id not in files:
                image = image_format.plan_image(bundle)
                data = bytearray(image.length)
                data[: len(image.header)] = image.header
                identity = (bundle.bundle_id, bundle.ranks, bundle.index, bundle.count)
                ref = BundleRef(*identity, bundle.num_bytes, fingerprint(bundle))
                seal = image_format.seal(bundle.bundle_id, data)
                files[bundle.bundle_id] = storage.bundles.write(version, ref, seal, memoryview(data), stamp=stamp)
    name, length, digest = storage.write_part(version, 0, list(files.values()), stamp=stamp)
    storage.commit(Manifest(version, job, 8, "f" * 32, None, {name: (length, digest)}), stamp=stamp)
    return root


def described(tmp_path: Path, text: str = DESCRIPTION, name: str = "job.toml") -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


def document(answer: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert answer.returncode == code, answer.stdout + answer.stderr
    return json.loads(answer.stdout)


# --- groups


def test_groups_names_holders_and_interchangeable_ranks(holdfast: Run, saved: Path) -> None:
    found = document(holdfast("groups", saved, "--json"))
    groups = {tuple(group["ranks"]): group for group in found["groups"]}
    assert set(groups) == {tuple(range(8)), *((tp, tp + 4) for tp in range(4)), *((rank,) for rank in range(8))}
    (whole,) = groups[tuple(range(8))]["entries"]
    assert (whole["name"], whole["lengths"], whole["bytes"]) == ("model.embedding", [1024, 512], 1024 * 512 * 4)
    assert [entry["offsets"] for entry in groups[3, 7]["entries"]] == [[9, 0]]
    assert [one["ranks"] for one in found["interchangeable"]] == [[rank] for rank in range(8)]
    assert "nodes" not in found


def test_groups_tells_what_lived_in_one_node_only(holdfast: Run, saved: Path) -> None:
    found = document(holdfast("groups", saved, "i000001-s0000000005", "--ranks-per-node", 4, "--json"))
    assert [node["replica_on"] for node in found["nodes"]] == [1, 0]
    assert found["nodes"][0]["alone"] == [
        "optimizer.state.wq.exp_avg",
        "rank0/rng",
        "rank1/rng",
        "rank2/rng",
        "rank3/rng",
    ]
    assert found["nodes"][0]["alone_bytes"] == 10 * 2 * 4 + 4 * 16
    assert found["unprotected"] == []
    single = document(holdfast("groups", saved, "--ranks-per-node", 8, "--json"), code=1)
    assert {"model.embedding", "model.wq"} < set(single["unprotected"])


def test_groups_shows_tables_and_a_picture(holdfast: Run, saved: Path) -> None:
    text = holdfast("groups", saved, "--ranks-per-node", 4).stdout
    assert "0-7" in text
    assert "0,4" in text
    assert "node0  0a  1b  2c  3d" in text
    assert "a replica on node1 saves it" in text
    assert "UNPROTECTED" in holdfast("groups", saved, "--ranks-per-node", 8).stdout


def test_groups_of_a_twin_checkpoint(holdfast: Run, checkpoint: Path) -> None:
    found = document(holdfast("groups", checkpoint, "--ranks-per-node", 1, "--json"))
    assert found["interchangeable"] == [{"for": [0, 1], "ranks": [0, 1]}]
    assert [node["alone"] for node in found["nodes"]] == [[], []]


def test_groups_of_what_is_not_there(holdfast: Run, tmp_path: Path, saved: Path) -> None:
    assert holdfast("groups", tmp_path / "nothing").returncode == 1
    assert holdfast("groups", saved, "yesterday").returncode == 2


# --- plan


def test_plan_says_what_the_layout_says(holdfast: Run, tmp_path: Path) -> None:
    found = document(holdfast("plan", described(tmp_path), "--json"))
    assert found["world_size"] == 8
    assert found["meshes"] == [{"dp": 2, "tp": 4}]
    assert len(found["entries"]) == 3 * 3 + 3
    assert found["unique_bytes"] == 6 * 16 * 8 * 4 + 2 * 8 * 4 + 4 * 4
    assert [one["ranks"] for one in found["interchangeable"]] == [[tp, tp + 4] for tp in range(4)]
    assert sum(node["written_bytes"] * len(node["nodes"]) for node in found["nodes"]) == found["unique_bytes"]
    assert [node["if_it_dies"]["alone"] for node in found["nodes"]] == [[]] * len(found["nodes"])
    assert found["unprotected"] == []


def test_plan_numbers_are_those_of_the_core(holdfast: Run, saved: Path) -> None:
    found = document(holdfast("plan", "--from", saved, "--ranks-per-node", 4, "--json"))
    costs = JobPlan(SAVED, uniform(8, 4))
    assert (found["unique_bytes"], found["files"]) == (costs.unique_bytes, costs.num_bundles)
    for row in found["ranks"]:
        for rank in row["ranks"]:
            assert row["held_bytes"] == costs.ranks.held[rank]
            assert row["copied_bytes"] == costs.ranks.copied[rank]
    for row in found["nodes"]:
        for node in row["nodes"]:
            assert row["written_bytes"] == costs.nodes.written[node]
            assert row["kept_replica_bytes"] == costs.nodes.kept[node]
            for name, num_slots in (("host_bytes", 2), ("host_bytes_with_third_slots", 3)):
                assert row[name] == sum(map(slot_bytes, costs.slots(node, num_slots, spare_bytes=SPARE_BYTES)))
            assert row["if_it_dies"]["from_replica_bytes"] == costs.nodes.alone[node]
    storage = open_storage(saved, Events())
    files = storage.manifest(storage.versions()[-1]).bundles
    assert found["files"] == len(files)
    assert found["unique_bytes"] == sum(file.ref.num_bytes for file in files)


def test_plan_of_a_checkpoint_on_another_mesh(holdfast: Run, saved: Path) -> None:
    found = document(holdfast("plan", "--from", saved, "--mesh", "1x2", "--ranks-per-node", 1, "--json"))
    assert found["world_size"] == 2
    wq = next(entry for entry in found["entries"] if entry["name"] == "model.wq")
    assert (wq["first_group"], wq["first_bytes"]) == ([0], 5 * 4 * 4)
    wrong = holdfast("plan", "--from", saved, "--mesh", "8", "--ranks-per-node", 1)
    assert wrong.returncode == 2
    assert "2 axes" in wrong.stderr


@MORE
def test_plan_changes_named_axes(holdfast: Run, tmp_path: Path) -> None:
    file = described(tmp_path)
    found = document(holdfast("plan", file, "--mesh", "dp=512", "--ranks-per-node", 8, "--json"))
    assert found["world_size"] == 2048
    assert found["interchangeable"][1]["ranks"][:2] == [1, 5]
    assert holdfast("plan", file, "--mesh", "ep=4").returncode == 2
    assert holdfast("plan", file, "--mesh", "many").returncode == 2


def test_plan_names_what_is_unprotected_and_fails(holdfast: Run, tmp_path: Path) -> None:
    file = described(tmp_path, DESCRIPTION.replace("dp = 2, tp = 4", "tp = 4, dp = 2"))
    protected = document(holdfast("plan", file, "--json"))
    assert protected["nodes"][0]["if_it_dies"]["from_replica_bytes"] > 0
    twins_only = document(holdfast("plan", file, "--without-replicas", "--json"), code=1)
    assert "model.layers.0.weight" in twins_only["unprotected"]
    assert "model.norm" not in twins_only["unprotected"]
    text = holdfast("plan", file, "--ranks-per-node", 8)
    assert text.returncode == 1
    assert "LOST" in text.stdout
    assert "8 ranks on 1 node," in text.stdout
    assert "model.layers.0.weight" in text.stdout


SHARDED = """
ranks_per_node = 1
mesh = { dp = 8 }
[[tensors]]
name = "w"
dtype = "F32"
shape = [67108864, 8]
place = { dp = "shard(0)" }
"""


def test_plan_counts_the_memory_of_every_redundancy(holdfast: Run, tmp_path: Path) -> None:
    path, found = described(tmp_path, SHARDED), {}
    for way in ("replica", "parity:8", "none"):
        (node,) = document(holdfast("plan", path, "--redundancy", way, "--json"), int(way == "none"))["nodes"]
        found[way] = node["host_bytes"] / node["copied_bytes"]
        assert node["if_it_dies"]["lost_bytes"] == (node["copied_bytes"] if way == "none" else 0)
    assert {way: round(value, 1) for way, value in found.items()} == {"replica": 4.0, "parity:8": 2.3, "none": 2.0}
    text = holdfast("plan", path, "--redundancy", "parity:8").stdout
    assert "keeps parity" in text
    assert "from parity on the other nodes of its group" in text
    assert "Parity is kept in 1 group of 8 nodes." in text


@MORE
def test_plan_says_what_two_nodes_of_a_parity_group_take_along(holdfast: Run, tmp_path: Path) -> None:
    path = described(tmp_path, SHARDED)
    words = ("plan", path, "--redundancy", "parity:4", "--json", "--lost-nodes")
    assert document(holdfast(*words, "0,1"))["lost"]["tensors"] == [], "they are of two groups"
    assert len(document(holdfast(*words, "0,2"), 1)["lost"]["tensors"]) == 1
    for way, kept in (("parity:4", "twins and parity"), ("replica", "twins and replicas")):
        text = holdfast("plan", path, "--redundancy", way, "--lost-nodes", "0").stdout
        assert f"{kept} on other nodes hold all of it" in text


@pytest.mark.parametrize(
    ("redundancy", "keepers", "said"),
    [
        ("parity:3", {0: [1, 2], 1: [0, 2], 2: [0, 1]}, "parity on node1, node2 saves it"),
        ("none", {}, "UNPROTECTED, but for what is in storage: redundancy is none"),
        ("replica", {0: [1], 1: [2], 2: [0]}, "a replica on node1 saves it"),
    ],
)
def test_groups_names_who_saves_what_one_node_holds(
    redundancy: str, keepers: dict[int, list[int]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {node: [Shard("w", "F32", (12,), Extent((4 * node,), (4,)), (node,))] for node in range(3)}
    topology = uniform(3, 1, redundancy)
    assert groups_command._keepers(alone, topology) == keepers
    groups_command._print_alone(alone, topology)
    assert said in capsys.readouterr().out


def test_plan_refuses_what_is_no_redundancy(holdfast: Run, tmp_path: Path) -> None:
    answer = holdfast("plan", described(tmp_path), "--redundancy", "parity:2")
    assert answer.returncode == 2
    assert "a group of parity has at least 3 nodes" in answer.stderr


def test_plan_says_what_any_set_of_nodes_or_ranks_takes_along(holdfast: Run, tmp_path: Path, saved: Path) -> None:
    """Rows of four tensor parallel ranks, twins in pairs: who loses both of a pair loses their slice and no other."""
    file = described(tmp_path)
    slices = [f"model.layers.{i}.weight" for i in range(3)]
    both = document(holdfast("plan", file, "--lost-ranks", "4,0", "--json"), code=1)["lost"]
    assert both["ranks"] == [0, 4]
    assert {row["name"] for row in both["tensors"]} == {*slices, *(f"optimizer.state.{s[6:]}.exp_avg" for s in slices)}
    assert {(row["parts"], row["bytes"]) for row in both["tensors"]} == {(1, 4 * 8 * 4)}
    assert document(holdfast("plan", file, "--lost-ranks", "0,5-7", "--json"))["lost"]["tensors"] == []
    nodes = document(holdfast("plan", file, "--lost-nodes", "0,node1", "--json"), code=1)["lost"]
    assert (nodes["nodes"], len(nodes["tensors"])) == ([0, 1], 3 * 3 + 3)
    one = ["plan", "--from", saved, "--ranks-per-node", 4, "--lost-nodes", 0]
    assert document(holdfast(*one, "--json"))["lost"]["tensors"] == []
    alone = holdfast(*one, "--without-replicas")
    assert alone.returncode == 1
    assert re.search(r"^optimizer.state.wq.exp_avg +4 +80 B", alone.stdout, re.MULTILINE)
    assert "If node0 is lost: " in alone.stdout
    assert "If all that rank 3 holds is lost: nothing is" in holdfast("plan", file, "--lost-ranks", 3).stdout
    for words, why in (
        (["--lost-nodes", "2"], "nodes are 0 to 1, node0, node1"),
        (["--lost-ranks", "x"], "there is no rank 'x'"),
        (["--lost-ranks", "0", "--lost-nodes", "0"], "one at a time"),
    ):
        wrong = holdfast("plan", file, *words)
        assert (wrong.returncode, why in wrong.stderr) == (2, True), wrong.stderr


def test_plan_shows_tables_and_a_picture(holdfast: Run, tmp_path: Path) -> None:
    text = holdfast("plan", described(tmp_path)).stdout
    assert "8 ranks on 2 nodes, mesh dp=2 tp=4" in text
    assert "node1  4a  5b  6c  7d" in text
    assert "Any one node may die" in text


def test_plan_says_what_a_node_has_to_allow_and_how_its_memory_is_made_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pages, "shared_memory_policy", lambda: "never")
    costs = JobPlan(SAVED, uniform(8, 4))
    plan._print_memory(costs)
    said = capsys.readouterr().out
    needed, most = (
        max(sum(map(slot_bytes, costs.slots(node, num_slots, spare_bytes=SPARE_BYTES))) for node in range(2))
        for num_slots in (2, 3)
    )
    assert f"A third slot for each rank makes it {size_text(most)}." in said
    assert f"host memory of {size_text(needed)} fits from {size_text(4 * needed)} on" in said
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in said

    monkeypatch.setattr(memory_pages, "shared_memory_policy", lambda: "advise")
    plan._print_memory(costs)
    assert "echo" not in capsys.readouterr().out


def test_plan_reads_json_stages_and_more_meshes(holdfast: Run, tmp_path: Path) -> None:
    job = {
        "mesh": {"pp": 2, "dp": 4},
        "meshes": {"sparse": {"edp": 2, "ep": 4}},
        "ranks_per_node": 4,
        "tensors": [
            {"name": "layer.{i}", "repeat": 4, "stage": "pp", "dtype": "BF16", "shape": [8]},
            {"name": "expert", "mesh": "sparse", "dtype": "BF16", "shape": [8], "place": {"ep": "own"}},
        ],
    }
    found = document(holdfast("plan", described(tmp_path, json.dumps(job), "job.json"), "--json"))
    first = {entry["name"]: entry["first_group"] for entry in found["entries"]}
    assert first == {
        "layer.0": [0, 1, 2, 3], "layer.1": [0, 1, 2, 3], "layer.2": [4, 5, 6, 7], "layer.3": [4, 5, 6, 7],
        "expert": [0, 4],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('tp = "shard(0)"', 'ep = "shard(0)"', "no axis 'ep'"),
        ("shard(0)", "shard(5)", "no dimension"),
        pytest.param("shard(0)", "shredded", "no placement", marks=MORE),
        pytest.param("repeat = 3", "repeat = 3\ncolour = 1", "colour", marks=MORE),
        pytest.param("layers.{i}", "layers", "needs {i}", marks=MORE),
        ("repeat = 3", "repeat = 1000000000", "repeat"),
        ("[[tensors]]", "[[tensors", "describes no job"),
        pytest.param('dtype = "F32"\nshape = [8]', 'dtype = "F31"\nshape = [8]', "no dtype", marks=MORE),
        ('scalars = ["step"]', 'place = { ep = "own" }', "no mesh has an axis 'ep'"),
    ],
)
def test_a_wrong_description_is_named(holdfast: Run, tmp_path: Path, old: str, new: str, where: str) -> None:
    assert old in DESCRIPTION
    answer = holdfast("plan", described(tmp_path, DESCRIPTION.replace(old, new, 1)))
    assert answer.returncode == 2
    assert where in answer.stderr
    assert "Traceback" not in answer.stderr


def test_plan_asks_for_what_is_missing(holdfast: Run, tmp_path: Path, saved: Path) -> None:
    assert holdfast("plan").returncode == 2
    assert holdfast("plan", described(tmp_path), "--from", saved).returncode == 2
    assert holdfast("plan", tmp_path / "none.toml").returncode == 2
    answer = holdfast("plan", "--from", saved)
    assert (answer.returncode, "--ranks-per-node" in answer.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    sampled(
        [["groups", "SAVED"], ["plan", "--from", "SAVED", "--ranks-per-node", 4], ["plan", "FILE"]], ["plan", "FILE"]
    ),
)
def test_they_answer_without_torch(words: list[object], tmp_path: Path, saved: Path) -> None:
    given = {"SAVED": saved, "FILE": described(tmp_path)}
    answer = ask([given.get(str(word), word) for word in words])
    assert answer.code == 0, answer.stderr
    assert answer.heavy == []


def test_ranks_and_names_read_well() -> None:
    assert [ranks_text(r) for r in ((3,), (0, 1), (0, 4), tuple(range(8)), (0, 4, 8, 12))] == [
        "3", "0-1", "0,4", "0-7", "0-12 step 4",
    ]  # fmt: skip
    assert ranks_text((0, 1, 5, 6, 10, 11, 20, 21, 40, 41)) == "0-1,5-6,10-11,20-21,... (10)"
    assert names_text(["a", "b", "c", "d", "e"]) == "a, b, c, d and 1 more"


def test_the_topology_of_equal_nodes() -> None:
    assert uniform(5, 2) == Topology(("node0", "node1", "node2"), (0, 0, 1, 1, 2))


def test_plan_says_how_often_to_save(holdfast: Run, tmp_path: Path) -> None:
    words = ["plan", described(tmp_path), "--mtbf", "10h", "--step-time", "2s", "--save-time", "1s"]
    advice = document(holdfast(*words, "--json"))["cadence"]
    assert advice["failures_per_s"] == 2 / 36_000, "two nodes"
    assert advice["best"]["interval_s"] == pytest.approx((2 * 18_000) ** 0.5, rel=0.02)
    assert min(row["overhead"] for row in advice["candidates"]) == advice["best"]["overhead"]
    assert len(advice["candidates"]) == 5
    assert [row["effective"] for row in advice["candidates"]] == [
        1 / (1 + row["overhead"]) for row in advice["candidates"]
    ]
    text = holdfast(*words).stdout
    assert "if a node fails every 10h, a step takes 2s, a save stops training for 1 s" in text
    training = f"{advice['best']['effective']:.3%}"
    assert re.search(rf"^\* 9\d steps +3\.1\d min .* {re.escape(training)}$", text, re.MULTILINE)
    assert holdfast("plan", described(tmp_path), "--mtbf", "0s").returncode == 2


def test_plan_says_how_often_after_what_a_run_was_like(holdfast: Run, tmp_path: Path) -> None:
    """1,000 steps in 2,000 s, and two failures of this node that cost 6 s and 10 s."""
    journal = tmp_path / "journal.jsonl"
    rows = [
        {"event": "run", "t": 0.0},
        {"event": "progress", "t": 10.0, "step": 1, "spent": {"START": 10.0}},
        {"event": "progress", "t": 2010.0, "step": 1000, "spent": {"START": 10.0, "STEP": 2000.0}},
        {
            "event": "incident",
            "t": 2020.0,
            "number": 1,
            "ranks": [0],
            "found_s": 1.0,
            "seconds": {"T1": 3.0, "T3": 2.0},
        },
        {"event": "incident", "t": 2040.0, "number": 2, "ranks": [0], "found_s": 4.0, "seconds": {"T1": 6.0}},
    ]
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    words = ["plan", described(tmp_path), "--mtbf", "10h", "--save-time", "1s", "--like", journal, "--json"]
    advice = document(holdfast(*words))["cadence"]
    assert advice["failures_per_s"] == 2 / 36_000, "nothing failed: what is assumed stays"
    assert advice["recovery_s"] == 30.0

    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    advice = document(holdfast(*words))["cadence"]
    assert advice["failures_per_s"] == pytest.approx(2 * 2 / 2040), "of each of two nodes"
    assert advice["recovery_s"] == pytest.approx((6 + 10) / 2)
    assert advice["save_s"] == 1.0
    assert "a step takes 2.00" in holdfast(*words[:-1]).stdout
    assert holdfast(*words[:-2], tmp_path / "none").returncode == 2


SCRIPT = """
import argparse
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
options = parser.parse_args()
dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(options.width, options.width, bias=False) for _ in range(4)))
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
optimizer = torch.optim.AdamW(model.parameters())
print("printed by the script")
holdfast.Checkpointer("/nowhere", model=model, optimizer=optimizer).restore()
raise AssertionError("nothing is trained")
"""


@MORE
def test_a_script_is_planned_without_memory_for_its_weights(tmp_path: Path) -> None:
    """Four matrices of 64 GiB and twice that of optimizer state: only their shapes ever exist."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    width = 1 << 17
    words = ["plan", str(script), "--nnodes", "2", "--ranks-per-node", "2", "--json", "--", "--width", str(width)]
    watched = (
        "import resource, subprocess, sys\n"
        "answer = subprocess.run([sys.executable, '-m', 'holdfast.cli.cli', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "sys.stdout.buffer.write(answer.stdout)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)\n"
        "sys.exit(answer.returncode)\n"
    )
    result = subprocess.run([sys.executable, "-c", watched, *words], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    weights = 4 * width * width * 4
    assert 3 * weights < document["unique_bytes"] < 3 * weights + 100_000
    rows = {row["name"]: row for row in document["entries"]}
    assert rows["model.2.weight"]["placements"] == {"dim0": "replicate", "dim1": "shard(0)"}
    assert rows["optimizer.state.2.weight.exp_avg"]["first_bytes"] == width * width * 4 // 2
    assert document["interchangeable"][0]["ranks"] == [0]
    assert document["nodes"][0]["kept_replica_bytes"] > 0
    assert int(result.stderr.split()[-1]) < 1 << 20, "less than 1 GiB for a state of 768 GiB"
    assert "printed by the script" in result.stderr


def test_a_script_that_converts_its_model_is_planned(tmp_path: Path, holdfast: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import holdfast, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))\n"
        "model[1].weight = model[0].weight\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model.to(torch.device('cpu')).to(torch.bfloat16)\n"
        "assert model[1].weight is model[0].weight is optimizer.param_groups[0]['params'][0]\n"
        "holdfast.Checkpointer('/nowhere', model=model, optimizer=optimizer).restore()\n"
    )
    result = holdfast("plan", script, "--ranks-per-node", 1, "--json")
    assert result.returncode == 1, result.stderr  # one node protects nothing
    document = json.loads(result.stdout)
    rows = {row["name"]: row for row in document["entries"]}
    assert rows["model.0.weight"]["dtype"] == "BF16"
    assert 3 * 2 * 256 * 256 < document["unique_bytes"] < 3 * 2 * 256 * 258 + 100_000


def test_a_script_that_cannot_be_rehearsed_says_why(tmp_path: Path, holdfast: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nif torch.ones(1).item() > 0: pass\n")
    result = holdfast("plan", script, "--ranks-per-node", 1)
    assert result.returncode == 2
    assert "rank 0 of the rehearsal" in result.stderr
    assert "numbers of a tensor" in result.stderr
    script.write_text("print('no checkpointer')\n")
    result = holdfast("plan", script, "--ranks-per-node", 1)
    assert "ended without calling Checkpointer.restore()" in result.stderr
    assert "--ranks-per-node" in holdfast("plan", script).stderr
