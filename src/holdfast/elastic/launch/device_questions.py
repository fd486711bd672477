"""Questions that torchrun's own code asks about devices, answered by a child of the launcher that ends at once.

`config_from_args` asks whether there are CUDA devices, and how many. The driver is begun by that in the process that asks, and
whatever is forked from it can never use a device ("Cannot re-initialize CUDA in forked subprocess"). The launcher forks its
workers, so a child asks in its place. torch.cuda's notes on multiprocessing; `poison_fork` in torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.base.errors import DeviceError

logger = logging.getLogger(__name__)

_QUESTIONS: dict[str, type[int]] = {"is_available": bool, "device_count": int}
# A driver that nobody keeps loaded begins one device after the other, seconds each.
ANSWER_S = 120.0
REMEDY = "a driver hangs: see what its own tools say; where no device is wanted, hide them (CUDA_VISIBLE_DEVICES=)"


@contextlib.contextmanager
def asked_in_a_child() -> Iterator[None]:
    """Inside, `is_available()` and `device_count()` of every kind of device begin nothing in this process. One thread only.

    Raises:
        DeviceError: from a question, a driver hangs.
    """
    own = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    kept = []
    for module in (torch.cuda, torch.xpu, torch.accelerator, own):
        for name in _QUESTIONS:
            question = getattr(module, name, None)
            if callable(question):
                kept.append((module, name, question))
                setattr(module, name, _in_a_child(name, question))
    try:
        yield
    finally:
        for module, name, question in kept:
            setattr(module, name, question)


def _in_a_child(name: str, question: Callable[[], Any]) -> Callable[[], Any]:
    def answer() -> Any:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, str(int(question())).encode())
            except Exception:  # torch would raise it in the launcher; here it is told
                logger.exception("%s() failed", name)
            finally:
                os._exit(0)
        os.close(writing)
        said, ended = b"", False
        try:
            ended = bool(select.select([reading], [], [], ANSWER_S)[0])
            # One write; whoever the driver started may hold the other end for longer.
            said = os.read(reading, 32) if ended else b""
        finally:
            os.close(reading)
            with contextlib.suppress(ChildProcessError, ProcessLookupError):  # somebody's handler of SIGCHLD took it
                if not ended:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0 if ended else os.WNOHANG)  # a child that stands in its driver may outlast SIGKILL
        if not ended:
            raise DeviceError(f"{name}() gave no answer within {ANSWER_S:g} s", remedy=REMEDY)
        return _QUESTIONS[name](int(said or b"0"))  # a driver that fails has no devices

    return answer
