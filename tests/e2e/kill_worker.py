"""A trainer of one rank that kills itself right after `save` returned, or comes back. Not a test itself.

python kill_worker.py save|resume ROOT: prints one JSON line of facts before it dies or ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch

import holdfast

SAVED_STEP, LAST_STEP = 2, 5


class Job:
    """A model with dropout and momentum; every number depends on the random state."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.1), torch.nn.Linear(512, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self) -> str:
        """One step; a digest of all parameters and moments."""
        self.model(torch.randn(8, 64)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = hashlib.blake2b(digest_size=8)
        for parameter in self.model.parameters():
            moments = [self.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
            for tensor in (parameter, *moments):
                state.update(tensor.detach().numpy().tobytes())
        return state.hexdigest()


def main() -> None:
    part, root = sys.argv[1:]
    job = Job()
    checkpointer = holdfast.Checkpointer(
        root, model=job.model, optimizer=job.optimizer, every="0", durable_every="0", overlap=part == "resume"
    )
    facts: dict[str, Any] = {"start": checkpointer.restore(), "trained": []}
    if part == "save":
        for _ in range(SAVED_STEP + 1):
            facts["trained"].append(job.train())
        print(json.dumps(facts), flush=True)
        checkpointer.save(SAVED_STEP)
        os.kill(os.getpid(), signal.SIGKILL)
    assert checkpointer.last_restore is not None
    facts["bytes"] = dict(checkpointer.last_restore.bytes)
    facts["counters"] = checkpointer.events.counters()
    facts["keeper_counters"] = checkpointer.keeper_status()["counters"]
    for step in range(facts["start"], LAST_STEP + 1):
        facts["trained"].append(job.train())
        checkpointer.step(step)
    checkpointer.close()
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
