"""`holdfast.resumable`: re-enters one function after an interruption; what its caller built stays.

    @holdfast.resumable
    def train() -> None:
        ddp = DistributedDataParallel(model)        # whatever holds a group is built inside
        start = checkpointer.restore()
        for step in range(start, steps): ...

    train()

Without it a script is run again from its first line, in the same process. With it the interruption ends the function
only: gradients are dropped, broken groups are destroyed, the default group is made again as it was, and the function is
called again with the same arguments. Objects that hold a group (DDP wrappers, meshes, FSDP modules) must be built
inside. Outside of `holdfast run` it calls the function and nothing else.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import distributed as dist

from holdfast.checkpoint.liveness import group_timeouts, open_checkpointers
from holdfast.elastic.worker import group_teardown
from holdfast.elastic.worker.worker_main import Runner

P = ParamSpec("P")
T = TypeVar("T")


def resumable(function: Callable[P, T]) -> Callable[P, T]:
    """A function like `function` that is called again when the job was interrupted and this process is healthy."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        runner = Runner.current
        if runner is None:
            return function(*args, **kwargs)
        group, again = group_timeouts.default_group(), False
        while True:
            order = runner.running
            try:
                if again and group is not None:
                    dist.init_process_group(**group)
                return function(*args, **kwargs)
            except BaseException as error:  # the caller gets it, unless the agent says that it is not ours
                if order is None or not runner.is_over(order, error):
                    raise
                _forget(error)
            runner.rejoin(order)
            again = True

    return called


def _forget(error: BaseException) -> None:
    """Everything that belongs to the interrupted step is dropped; in-flight gradients are garbage."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    open_checkpointers.abandon_all(kept=True)
    group_teardown.destroy_groups()
    for thing in gc.get_objects():
        if isinstance(thing, torch.nn.Module):
            thing.zero_grad(set_to_none=True)
    gc.collect()
