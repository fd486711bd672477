"""A trainer of one rank with a large state that reports what memory the job takes. Not a test itself.

python large_worker.py ROOT MIB: prints one JSON line. Proportional set sizes count memory that the trainer and the
keeper share once, so that their sum is what the job takes; looked at all the time, for what is taken only while a version
is written or read is taken too.

The state is a dict, which is filled in place as a model is; an object of the user's own is handed its tensors instead, and
memory for these is the object's, not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path

import torch

import holdfast
from holdfast.base.config import load

MIB = 1 << 20


def taken_bytes(*pids: int) -> int:
    """Proportional set size of these processes."""
    rows: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            rows += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))


class Peak(threading.Thread):
    """The most that this process and the keeper of `root` have taken together, as long as it runs."""

    def __init__(self, root: str) -> None:
        super().__init__(daemon=True)
        self.num_bytes = 0
        self._over = threading.Event()
        self._keeper = b"\0".join([b"--root", os.path.abspath(root).encode(), b""])

    def run(self) -> None:
        while not self._over.wait(0.02):
            keepers = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if self._is_keeper(path)]
            mine, theirs = taken_bytes(os.getpid()), taken_bytes(*keepers)
            if abs(taken_bytes(os.getpid()) - mine) < 16 * MIB:  # else what both share was mapped or left meanwhile
                self.num_bytes = max(self.num_bytes, mine + theirs)

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.num_bytes

    def _is_keeper(self, path: Path) -> bool:
        try:
            return self._keeper in path.read_bytes()
        except OSError:  # it has ended
            return False


def main() -> None:
    root, mib = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    weights = {f"w{i}": torch.full((mib * MIB // 32,), float(i)) for i in range(8)}

    def sums() -> list[float]:
        """One for each tensor, without memory of their size."""
        return [float(tensor.sum(dtype=torch.float64)) for tensor in weights.values()]

    before = taken_bytes(os.getpid())
    peak = Peak(root)
    peak.start()
    config = load({"every": "0", "durable_every": "0", "memory_budget": f"{3 * mib}MiB"})
    checkpointer = holdfast.Checkpointer(root, weights=weights, config=config)
    start = checkpointer.restore()
    facts: dict[str, object] = {"start": start, "sums": sums()}
    for step in range(start, start + 3):
        for tensor in weights.values():
            tensor += 1
        checkpointer.save(step, level="durable").wait()
    facts["expected"] = sums()
    checkpointer.close()
    facts["extra_bytes"] = peak.end() - before
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
