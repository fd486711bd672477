"""A pipeline stage that came back learns its shapes without a trace: the run that it goes on with had learnt them already.

Before its first step a stage of `torch.distributed.pipelining` runs its module once, to know what it sends and gets. That
writes buffers (running means) and draws random numbers: in torch 2.10 from all generators, later from Python's and NumPy's
alone. In an undisturbed run it happens once, and every version has what it left. So in a process that restored one it is put
back, or the job would not go on bit for bit. A run that begins is left as torch makes it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from holdfast.checkpoint.entries.rng import ProcessRandomness

_SEAM = "_prepare_forward_infra"


def leave_no_trace(stage: Any) -> None:
    """Puts buffers and generators back behind the next inference of a stage; what comes after that one is the run's own."""
    inner = getattr(stage, _SEAM, None)
    if inner is None or getattr(stage, "args_recv_info", None):  # of another release, or it has learnt them
        return

    @functools.wraps(inner)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        vars(stage).pop(_SEAM, None)
        randomness = ProcessRandomness()
        drawn = randomness.state_dict()
        buffers = [(each, each._version, each.clone()) for each in stage.submod.buffers() if not each.is_inference()]
        try:
            return inner(*args, **kwargs)
        finally:
            randomness.load_state_dict(drawn)
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:  # else nobody has to know of a write
                        buffer.copy_(value)

    setattr(stage, _SEAM, prepare)
