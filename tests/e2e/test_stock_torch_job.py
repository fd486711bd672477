"""A checkpoint of a real sharded job is read by stock PyTorch: every tensor entry, in a Python without holdfast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
from kit.stock_reader import READER

# Three processes without holdfast that place every tensor on a mesh of their own, cut along its first or last dimension
# or not at all; then one that merges the files with PyTorch's own tool.
MESH_READER = """
import json, os, sys, warnings
sys.modules["holdfast"] = None
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from torch import distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from safetensors import safe_open

directory, expected, scratch = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
WORLD = 3

def tensor(dtype, shape, raw):
    flat = torch.frombuffer(bytearray.fromhex(raw), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)

wanted = {name: tensor(**fields) for name, fields in expected["tensors"].items()}

def run(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    state, cut = {}, 0
    for number, (name, full) in enumerate(sorted(wanted.items())):
        dim = [0, full.dim() - 1, None][number % 3] if full.dim() else None
        cut += dim is not None
        place = Replicate() if dim is None else Shard(dim)
        state[name] = zeros(full.shape, dtype=full.dtype, device_mesh=mesh, placements=[place])
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    wrong = [name for name, full in wanted.items() if not torch.equal(state[name].full_tensor(), full)]
    (scratch / f"{rank}.json").write_text(json.dumps({"wrong": wrong, "cut": cut}))
    dist.barrier()
    dist.destroy_process_group()

children = []
for rank in range(WORLD):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(rank)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * WORLD, codes
told = [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(WORLD)]
(scratch / "merged").mkdir()
parts = {name: full for name, full in wanted.items() if full.dim()}  # torch 2.13 merges nothing without dimensions
consolidate_safetensors_files(str(directory), str(scratch / "merged"), {name: 1 for name in parts})
(merged,) = (scratch / "merged").glob("*.safetensors")
with safe_open(merged, framework="pt") as file:
    wrong = [name for name, full in parts.items() if not torch.equal(file.get_tensor(name), full)]
print(json.dumps({"wrong": sum((row["wrong"] for row in told), wrong), "cut": told[0]["cut"], "count": len(wanted)}))
"""

WORKER = Path(__file__).with_name("stock_worker.py")


def test_stock_pytorch_reads_what_two_sharded_ranks_saved(tmp_path: Path, runtime_dir: Path) -> None:
    root, expected = tmp_path / "job", tmp_path / "expected.json"
    launcher = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = forked.run(
        [*launcher, str(WORKER), str(root), str(expected)],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr

    versions = list(root.glob("i0*"))
    assert len(versions) == 1, f"{versions}\n{job.stderr}"
    (version,) = versions
    reader = [sys.executable, "-I", "-c", READER, str(version), str(expected)]
    stock = subprocess.run(reader, capture_output=True, text=True, check=False, timeout=120)
    assert stock.returncode == 0, stock.stderr
    facts = json.loads(stock.stdout)
    assert facts["wrong"] == []
    assert facts["count"] == 6 * 4  # six parameters with two moments and a step count each

    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-I", "-c", MESH_READER, str(version), str(expected), str(tmp_path / "scratch")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    meshed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=clean)
    assert meshed.returncode == 0, meshed.stderr
    facts = json.loads(meshed.stdout.splitlines()[-1])  # gloo of torch 2.10 prints before it
    assert facts["wrong"] == []
    assert facts["cut"] >= 12, "saved by two ranks, loaded by three, cut along other dimensions"
