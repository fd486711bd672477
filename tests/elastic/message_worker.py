"""What test_urging launches: rank 1 dies once while a part of its message is on the way; later all-reduces until told to stop.

message_worker.py DIRECTORY
"""

from __future__ import annotations

import array
import fcntl
import os
import signal
import sys
import termios
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.elastic.worker.group_teardown import own_sockets

directory = Path(sys.argv[1])
MESSAGE_MIB = 256


def end_in_the_middle() -> None:
    """As soon as a socket holds what its peer has not taken yet."""
    while True:
        for fd, _ in own_sockets():
            unsent = array.array("i", [0])
            try:
                fcntl.ioctl(fd, termios.TIOCOUTQ, unsent)
            except OSError:
                continue  # it listens
            if unsent[0] > 1 << 16:
                (directory / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if not (directory / "killed").exists():
        message = torch.ones(MESSAGE_MIB << 18)
        dist.barrier()
        if rank == 1:
            threading.Thread(target=end_in_the_middle, daemon=True).start()
            dist.send(message, 0)
        else:
            dist.recv(message, 1)
    step, total = 0, torch.zeros(1)
    while total.item() == 0:
        step += 1
        unfinished = directory / f".rank{rank}"
        unfinished.write_text(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {step}")
        unfinished.rename(directory / f"rank{rank}")
        time.sleep(0.02)
        total.fill_((directory / "stop").exists())
        dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
