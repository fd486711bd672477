"""A merged file of `holdfast export` in the formats of frameworks: torch.save, DCP, MindSpore.

    python -m holdfast.adapters.exported FORM MERGED OUT

A program of its own, because the command itself loads no torch. It maps the merged file, so the memory it needs of its
own does not grow with the state: pages that were written out are the kernel's to take back. Answers with one JSON
document on standard output: the error, or an empty `kind`.

The tree is that of PyTorch's own checkpoints: `{"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}},
"param_groups": [...]}, ...}`, parameters by name, everything else under the name that the Checkpointer knows it by.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from holdfast.adapters.mindspore.checkpoint import save_checkpoint
from holdfast.adapters.mindspore.formats.tensors import HostTensor
from holdfast.base.errors import HoldfastError, StorageError, UsageError
from holdfast.checkpoint.entries.pytree import references
from holdfast.checkpoint.entries.types import torch_dtype
from holdfast.tiers.format import values as value_codec
from holdfast.tiers.format.values import TensorRef

_ARRAY_KEY = "holdfast.ndarray"


class Merged:
    """A merged file, mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of memory for reading only
        size = int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8 : 8 + size])
        metadata = header.pop("__metadata__")
        self.values: dict[str, Any] = value_codec.decode(metadata["holdfast.values"].encode(), where=str(path))
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {
            name: (item["dtype"], tuple(item["shape"]), *(8 + size + at for at in item["data_offsets"]))
            for name, item in header.items()
        }

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor, in the mapping."""
        _, _, start, end = self.entries[name]
        return memoryview(self._map)[start:end]


def tree_of(merged: Merged, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Everything by object: tensors by name below it, optimizer state by parameter, values with their tensors."""
    tree: dict[str, Any] = {}
    used: set[str] = set()
    for value in merged.values.values():
        if not isinstance(value, TensorRef):  # that would be another name of a tensor, which keeps its first one
            used.update(references(value))
    for name, tensor in tensors.items():
        if name in used:
            continue
        head, _, rest = name.partition(".")
        if rest.startswith("state.") and f"{head}.param_groups" in merged.values:
            parameter, _, key = rest.removeprefix("state.").rpartition(".")
            tree.setdefault(head, {}).setdefault("state", {}).setdefault(parameter, {})[key] = tensor
        else:
            tree.setdefault(head, {})[rest] = tensor
    for name, value in merged.values.items():
        plain = _plain(value, tensors)
        head, _, rest = name.partition(".")
        if rest == "param_groups":
            tree.setdefault(head, {})[rest] = plain
        elif rest.startswith("state.") and f"{head}.param_groups" in merged.values and isinstance(plain, dict):
            tree.setdefault(head, {}).setdefault("state", {}).setdefault(rest.removeprefix("state."), {}).update(plain)
        elif rest:
            tree.setdefault(head, {})[rest] = plain
        elif isinstance(plain, dict) and isinstance(tree.get(head), dict):
            tree[head].update(plain)
        else:
            tree[head] = plain
    return tree


def _plain(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Plain Python values and tensors, nothing that a loader of weights alone would refuse."""
    if isinstance(value, TensorRef):
        return tensors[value.name]
    if type(value) is dict and len(value) == 1 and _ARRAY_KEY in value:
        return tensors[value[_ARRAY_KEY].name]
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _plain(item, tensors)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, tensors) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def _torch_tree(merged: Merged) -> dict[str, Any]:
    def tensor(name: str) -> torch.Tensor:
        kind, shape, _, _ = merged.entries[name]
        view = merged.bytes_of(name)
        if not len(view):
            return torch.empty(shape, dtype=torch_dtype(kind), device="cpu")
        # A storage of its own, so that nothing of the others is written with it.
        return torch.frombuffer(view, dtype=torch.uint8).view(torch_dtype(kind)).reshape(shape)

    return tree_of(merged, {name: tensor(name) for name in merged.entries})


def to_torch(merged: Merged, out: Path) -> None:
    """One file for `torch.load(weights_only=True)`."""
    torch.save(_torch_tree(merged), out)


def to_dcp(merged: Merged, out: Path) -> None:
    """A directory for `torch.distributed.checkpoint.load`."""
    save_distributed(_torch_tree(merged), storage_writer=FileSystemWriter(out), no_dist=True)


def to_mindspore(merged: Merged, out: Path) -> None:
    """A `.ckpt` or `.safetensors` that MindSpore loads: tensors by name; values, which it does not have, are left out."""
    tensors = {
        name: HostTensor(kind, shape, merged.bytes_of(name)) for name, (kind, shape, _, _) in merged.entries.items()
    }
    save_checkpoint(tensors, out)


FORMS = {"torch": to_torch, "dcp": to_dcp, "mindspore": to_mindspore}


def main() -> int:
    """Converts, and answers."""
    form, merged, out = sys.argv[1:]
    fault: HoldfastError | None = None
    try:
        FORMS[form](Merged(Path(merged)), Path(out))
    except HoldfastError as error:
        fault = error
    except OSError as error:
        fault = StorageError(f"the export cannot be written: {error.strerror}", where=out)
    except (RuntimeError, ValueError, TypeError) as error:
        fault = UsageError(f"it cannot be written as {form}: {type(error).__name__}: {error}")
    told = (type(fault).__name__, fault.what, fault.where, fault.remedy) if fault else ("", "", "", "")
    sys.stdout.write(json.dumps(dict(zip(("kind", "what", "where", "remedy"), told, strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
