"""A trainer of one rank with a large state that reports what memory the job takes. Not a test itself.

python large_worker.py ROOT MIB: prints one JSON line. Proportional set sizes count memory that the trainer and the
keeper share once, so that their sum is what the job takes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import holdfast
from holdfast.base.config import load

MIB = 1 << 20


class Weights:
    """An object with a `state_dict` of eight tensors."""

    def __init__(self, num_bytes: int) -> None:
        self.tensors = {f"w{i}": torch.full((num_bytes // 32,), float(i)) for i in range(8)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].copy_(tensor)


def taken_bytes(*pids: int) -> int:
    """Proportional set size of these processes."""
    rows = [row for pid in pids for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


def main() -> None:
    root, mib = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    weights = Weights(mib * MIB)
    before = taken_bytes(os.getpid())
    config = load({"every": "0", "durable_every": "0", "memory_budget": f"{3 * mib}MiB"})
    checkpointer = holdfast.Checkpointer(root, weights=weights, config=config)
    start = checkpointer.restore()
    facts: dict[str, object] = {"start": start, "sums": [float(t.double().sum()) for t in weights.tensors.values()]}
    peak = 0
    for step in range(start, start + 3):
        for tensor in weights.tensors.values():
            tensor += 1
        checkpointer.save(step, level="durable").wait()
        peak = max(peak, taken_bytes(os.getpid(), int(checkpointer.keeper_status()["pid"])))
    facts["extra_bytes"] = peak - before
    facts["expected"] = [float(t.double().sum()) for t in weights.tensors.values()]
    checkpointer.close()
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
