"""How ranks of a job are struck, once: for workers of doors. Not a test itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
from torch import distributed

LAUNCHER = "holdfast.adapters.zero_lines.launcher"
# Until SIGTERM has come by way of the launcher.
LIMIT_S = 300.0


def kill_once(marker: Path) -> None:
    """Ends this process with SIGKILL; the marker outlives it, and the second time nothing is done."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def strike(marker: Path, whom: str) -> None:
    """Kills rank 1, or sends SIGTERM, once; every rank calls it at the same place.

    Args:
        marker: outlives the job.
        whom: "" kills rank 1; SIGTERM is sent to rank 1 ("one"), to every rank ("all"), or to the launcher ("job").
            Rank 0 returns only when the launcher's has come, unless it is ended by it.
    """
    rank = distributed.get_rank()
    if whom == "":
        if rank == 1:
            kill_once(marker)
    elif not marker.exists():
        if whom == "all":
            distributed.barrier()  # nobody looks for the marker behind it
        if whom == "job":
            if rank == 0:
                marker.touch()
                _told_by_launcher()
        elif whom == "all" or rank == 1:
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)


def _told_by_launcher() -> None:
    """The launcher gets SIGTERM; returns when this process has got its own, and whoever handles it has run."""
    before, came = signal.getsignal(signal.SIGTERM), []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        before(number, frame)  # type: ignore[operator, misc, arg-type]

    if callable(before):
        signal.signal(signal.SIGTERM, handle)
    above = [parent for parent in psutil.Process().parents() if LAUNCHER in parent.cmdline()]
    os.kill(above[-1].pid, signal.SIGTERM)
    deadline = time.monotonic() + LIMIT_S
    while not came and time.monotonic() < deadline:
        time.sleep(0.01)
    assert came, "the launcher handed SIGTERM to nobody"
    signal.signal(signal.SIGTERM, before)
