"""Questions that torchrun's own code asks about devices, answered by a child of the launcher that ends at once.

`config_from_args` asks whether there are CUDA devices, and how many. The driver is begun by that in the process that asks, and
whatever is forked from it can never use a device ("Cannot re-initialize CUDA in forked subprocess"). The launcher forks its
workers, so a child asks in its place. torch.cuda's notes on multiprocessing; `poison_fork` in torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

_QUESTIONS = ("is_available", "device_count")


@contextlib.contextmanager
def asked_in_a_child() -> Iterator[None]:
    """Inside, `is_available()` and `device_count()` of every kind of device begin nothing in this process. One thread only."""
    own = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    kept = []
    for module in (torch.cuda, torch.xpu, torch.accelerator, own):
        for name in _QUESTIONS:
            question = getattr(module, name, None)
            if callable(question):
                kept.append((module, name, question))
                setattr(module, name, _in_a_child(question))
    try:
        yield
    finally:
        for module, name, question in kept:
            setattr(module, name, question)


def _in_a_child(question: Callable[[], Any]) -> Callable[[], Any]:
    def answer() -> Any:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, json.dumps(question()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as file:
            said = file.read()
        os.waitpid(pid, 0)
        return json.loads(said) if said else 0  # a driver that fails has no devices

    return answer
