"""What the launcher's tests launch: all-reduces until told to stop, and reports where it is.

    elastic_worker.py DIRECTORY [--save-on-sigterm] [--ignore-sigterm] [--with-child] [--alone] [--fail-slowly]
                      [--cross once|always] [--huge]

Every step rewrites DIRECTORY/rank<N> with process id, restart count and step. The job ends when DIRECTORY/stop exists,
seen by all ranks in the same step because the sight of it is reduced. Ranks that cross enter two groups in different
orders. One huge message, 2 GiB by a single processor, takes longer than ranks may wait for each other without a byte
that moves; DIRECTORY/huge<N> tells the seconds, and the job ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

directory = Path(sys.argv[1])
told = []


def note(name: str, text: str) -> None:
    unfinished = directory / f".{name}.{os.getpid()}"
    unfinished.write_text(text)
    unfinished.rename(directory / name)


def main() -> int:
    rank = int(os.environ["RANK"])
    if "--save-on-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    if "--ignore-sigterm" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(f"label{rank}", os.environ.get("HOLDFAST_NODE_LABEL", ""))
    if "--huge" in sys.argv:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # also of the threads that move the bytes
    child = None
    if "--with-child" in sys.argv:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reduced, leave = (alone, int) if "--alone" in sys.argv else together()
    step = 0
    while not reduced(bool(told) or (directory / "stop").exists()):
        step += 1
        note(f"rank{rank}", f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step}")
        time.sleep(0.02)
        if "--fail-slowly" in sys.argv and step == 10:
            atexit.register(time.sleep, 600)
            raise ZeroDivisionError("planted")
        if "--cross" in sys.argv and step == 20:
            cross(rank)
        if "--huge" in sys.argv and step == 20:
            note(f"huge{rank}", str(huge()))
            note("stop", "")
    leave()
    if child is not None:
        note(f"child{rank}", "alive" if child.poll() is None else f"ended with {child.returncode}")
    if told:
        note(f"saved{rank}", str(step))
    return 0


def alone(flag: bool) -> bool:
    return flag


def cross(rank):
    import torch
    import torch.distributed as dist

    groups = [dist.new_group() for _ in range(2)]
    if "always" in sys.argv or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for group in groups if rank else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)


def huge():
    import torch
    import torch.distributed as dist

    message = torch.ones(2**30, dtype=torch.float16)
    began = time.monotonic()
    dist.all_reduce(message)
    return time.monotonic() - began


def together():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def reduced(flag: bool) -> bool:
        total = torch.tensor([float(flag)])
        dist.all_reduce(total)
        return total.item() > 0

    # Without this a rank may abort at exit (SIGABRT in gloo's threads), which the launcher takes for a failure.
    return reduced, dist.destroy_process_group


if __name__ == "__main__":
    sys.exit(main())
