"""A trainer under `holdfast run` that makes every step durable, and is struck once. Not a test itself.

python unmount_worker.py DIRECTORY STRIKE [STEPS]: each run of the script appends what it went on with to DIRECTORY/starts.
STRIKE is `unmount` (an empty directory takes the place of DIRECTORY/ck in the middle of the run, and the process dies),
`die`, or `none`. With `zero` there is no Checkpointer in the script; see tests/adapters/zero_script.py for that.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import holdfast

STRUCK_STEP = 5


def main() -> None:
    directory, strike, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    root, mark = directory / "ck", directory / "struck"
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checkpointer = holdfast.Checkpointer(root, model=model, optimizer=optimizer, every="0", durable_every="0")
    start = checkpointer.restore()
    with (directory / "starts").open("a") as starts:
        starts.write(f"{start}\n")
    for step in range(start, steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        checkpointer.save(step, "durable").wait("durable")
        if step == STRUCK_STEP and strike != "none" and not mark.exists():
            mark.touch()
            if strike == "unmount":
                root.rename(directory / "away")
                root.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()


if __name__ == "__main__":
    main()
