"""A program that reads a version with stock PyTorch alone."""

from __future__ import annotations

# What runs without holdfast. Reads the expected tensors from a file of raw bytes, so that nothing is unpickled.
READER = """
import json, sys, warnings
sys.modules["holdfast"] = None
try:
    import holdfast
    sys.exit("holdfast can be imported; this proves nothing")
except ImportError:
    pass
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from safetensors import safe_open

directory, expected = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())

def tensor(dtype, shape, raw):
    data = bytearray.fromhex(raw)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)

def same(a, b):
    bits = lambda t: t.reshape(-1).view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))

wanted = {name: tensor(**fields) for name, fields in expected["tensors"].items()}
state = {name: torch.zeros_like(value) for name, value in wanted.items()}
dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
wrong = [name for name in wanted if not same(state[name], wanted[name])]
pieces = {}
for file in sorted(directory.glob("*.safetensors")):
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():
            pieces.setdefault(name, []).append(opened.get_tensor(name))
whole = {name: torch.cat(found) if len(found) > 1 else found[0] for name, found in pieces.items()}
wrong += ["safe_open:" + name for name in wanted if not same(whole[name], wanted[name])]
values = {name: bytes(value.tolist()).decode().rstrip() for name, value in whole.items() if name.startswith("values/")}
print(json.dumps({"wrong": wrong, "count": len(wanted), "values": values}))
"""
