"""What a checkpointer does on a device that hangs or failed: `device_waits.py KIND HOW [WORD...]`, called by test_device_waits.py.

Tries every call at every moment (or those that a word names: `close`, or `leave@at_rest`), each with a job of its own, and prints a line of JSON for each: how many seconds the call
took, and what it raised. A call that does not end ends the process, with the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.base import program
from holdfast.base.errors import HoldfastError
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.survivors import step_snapshot
from holdfast.testing import device as simulated

LIMIT_S = 1.0  # of close()
MOST_S = 60.0  # a call that takes longer is one that does not end
SETTINGS: dict[str, dict[str, Any]] = {
    "registered": {},
    "pinned": {},  # by SIMULATED_DEVICE_HOST_MEMORY, as is the next
    "none": {},
    "verified": {"verify_capture": True},
    "in-the-call": {"overlap": False},
    "offloaded": {},
    "storage-alone": {},
}


class Job:
    """One rank that trains on the device."""

    def __init__(self, directory: Path, kind: str) -> None:
        torch.manual_seed(0)
        place = torch.device(simulated.name(), 0)
        self.model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).to(place)
        self.data = torch.ones(16, 256, device=place)
        saved = self.model
        if kind == "offloaded":  # what is saved lies in host memory, and what is computed comes from the device
            saved = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
        self.saved = saved
        self.optimizer = torch.optim.AdamW(saved.parameters(), lr=1e-3, foreach=True)
        config = holdfast.Config(every="1", linger_s=1.0, close_timeout_s=LIMIT_S, **SETTINGS[kind])
        self.checkpointer = holdfast.Checkpointer(directory, model=saved, optimizer=self.optimizer, config=config)
        self.checkpointer.restore()
        for number in range(5):
            self.update()
            self.checkpointer.step(number)

    def forward(self) -> torch.Tensor:
        return self.model(self.data).square().mean()

    def update(self) -> None:
        self.forward().backward()
        for mine, theirs in zip(self.saved.parameters(), self.model.parameters(), strict=True):
            mine.grad = theirs.grad.to(mine.device)  # type: ignore[union-attr]
        self.optimizer.step()
        self.model.zero_grad()


# When the device hangs; each leaves the job at a moment of its step.


def at_rest(job: Job, hurt: Callable[[], None]) -> None:
    job.checkpointer.settle()
    torch.accelerator.synchronize()
    hurt()


def before_a_copy(job: Job, hurt: Callable[[], None]) -> None:
    hurt()
    with suppress(HoldfastError):
        job.checkpointer.save(5)


def behind_a_copy(job: Job, hurt: Callable[[], None]) -> None:
    job.checkpointer.save(5)
    hurt()


def in_a_forward(job: Job, hurt: Callable[[], None]) -> None:
    job.update()
    hurt()
    with suppress(RuntimeError):
        job.forward()


def with_a_copy_behind_it(job: Job, hurt: Callable[[], None]) -> None:
    job.update()
    hurt()
    with suppress(HoldfastError):
        job.checkpointer.step(5)


def in_an_update(job: Job, hurt: Callable[[], None]) -> None:
    for parameter in job.saved.parameters():
        parameter.grad = torch.ones_like(parameter)
    hurt()
    with suppress(RuntimeError):
        job.optimizer.step()


def in_an_evaluation(job: Job, hurt: Callable[[], None]) -> None:
    job.checkpointer.settle()
    with torch.no_grad():
        hurt()
        with suppress(RuntimeError):
            job.forward()


MOMENTS = {
    function.__name__: function
    for function in (
        at_rest,
        before_a_copy,
        behind_a_copy,
        in_a_forward,
        with_a_copy_behind_it,
        in_an_update,
        in_an_evaluation,
    )
}
CALLS: dict[str, Callable[[holdfast.Checkpointer], object]] = {
    "step": lambda checkpointer: checkpointer.step(6),
    "save": lambda checkpointer: checkpointer.save(6),
    "wait": lambda checkpointer: checkpointer.save(6).wait("captured", timeout_s=0.5),
    "settle": lambda checkpointer: checkpointer.settle(),
    "flush": lambda checkpointer: checkpointer.flush(),
    "close": lambda checkpointer: checkpointer.close(),
    "abandon": lambda checkpointer: checkpointer.abandon(),
    "interrupted": lambda checkpointer: checkpointer.interrupted(),
    "leave": lambda checkpointer: checkpointer.__exit__(RuntimeError, RuntimeError("of a collective"), None),
}


def tried(directory: Path, kind: str, moment: str, call: str, hurt: Callable[[], None]) -> dict[str, Any]:
    """How one call went."""
    open_checkpointers.begin()
    open_checkpointers.broken.stuck = ""
    job, raised = Job(directory, kind), ""
    MOMENTS[moment](job, hurt)
    faulthandler.dump_traceback_later(MOST_S, exit=True)
    began = time.monotonic()
    try:
        CALLS[call](job.checkpointer)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        raised = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    faulthandler.cancel_dump_traceback_later()
    return {"moment": moment, "call": call, "seconds": seconds, "raised": raised}


def main(kind: str, how: str, *words: str) -> None:
    simulated.load()
    if kind == "storage-alone":
        program.sys = SimpleNamespace(executable="/bin/false")  # type: ignore[assignment]
    step_snapshot.attach(step_snapshot.make_page())  # as a launcher gives one
    directory = Path(os.environ["CASE_DIRECTORY"])

    def hurt() -> None:
        if how == "hang":
            simulated.hang(0)
        else:
            simulated.fault(0, now=True)

    pairs = [(moment, call) for moment in MOMENTS for call in CALLS]
    for moment, call in pairs:
        if words and call not in words and f"{call}@{moment}" not in words:
            continue
        if how == "hang" or (child := os.fork()) == 0:
            # torch makes its pool of threads anew in a child, and two threads of its engine may not do so at once.
            torch.set_num_threads(torch.get_num_threads())
            print(json.dumps(tried(directory / moment / call, kind, moment, call, hurt)), flush=True)
            if how == "fault":
                os._exit(0)
            simulated.free(0)
            torch.accelerator.synchronize()
        else:
            os.waitpid(child, 0)  # a fault stays with its process; no device is in use here


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # no clean-up: it would wait for what hangs
