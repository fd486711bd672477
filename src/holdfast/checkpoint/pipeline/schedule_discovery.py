"""The pipeline schedule of a job that did not name it: the one living schedule whose stages are the model that is saved.

Looked for once, at restore, among the objects of this process, and only where PyTorch's schedules are imported; nothing
is patched to see them. Where there are several (one for training, one for evaluation), nobody can tell which one the
steps are made with: then `Checkpointer(schedule=...)` has to say it.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from holdfast.base.errors import UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.capture.optimizer_fence import Fence
from holdfast.checkpoint.job.keeper_link import KeeperLink
from holdfast.checkpoint.pipeline.bubbles import Bubbles
from holdfast.checkpoint.pipeline.idle_report import IdleReporter
from holdfast.checkpoint.pipeline.schedule_actions import stages_of
from holdfast.checkpoint.pipeline.shape_inference import leave_no_trace

logger = logging.getLogger(__name__)

_MODULE = "torch.distributed.pipelining.schedules"


def bubbles_of(modules: Iterable[nn.Module], events: Events) -> Bubbles | None:
    """The waits of the schedule that trains these modules; None if there is none, or more than one."""
    found = _schedules(modules)
    if len(found) > 1:
        logger.info("%d pipeline schedules train this model; copies keep to no waits without schedule=", len(found))
    if len(found) != 1:
        return None
    try:
        bubbles = Bubbles(found[0], events)
    except UsageError as error:
        logger.info("copies keep to no waits: %s", error)
        return None
    logger.info("copies keep to the waits of the job's %s", type(found[0]).__name__)
    return bubbles


def let_go(bubbles: Bubbles | None) -> Bubbles | None:
    """The job broke off, and its groups are gone. Only a schedule that was named is used again; another is looked for."""
    if bubbles is None:
        return None
    bubbles.detach()
    return bubbles if bubbles.named else None


def keep_to_waits(bubbles: Bubbles | None, fence: Fence, link: KeeperLink, *, came_back: bool) -> None:
    """Keep copies to the waits of the schedule from now on, if there is one, and what the keeper hashes and sends of
    them too. Where a version was loaded, its stages learn their shapes without a trace.
    """
    if bubbles is None:
        return
    for stage in bubbles.stages if came_back else ():
        leave_no_trace(stage)
    fence.pace, bubbles.on_wait, bubbles.on_placed = bubbles, fence.nudge, IdleReporter(bubbles, link.note_idle).placed
    bubbles.attach()
    link.show_waits(bubbles.page_fds)


def _schedules(modules: Iterable[nn.Module]) -> list[Any]:
    known = sys.modules.get(_MODULE)
    if known is None:
        return []
    mine = {id(parameter) for module in modules for parameter in module.parameters()}
    # Not isinstance: it asks proxies for their class, and they may wake up.
    living = [thing for thing in gc.get_objects() if issubclass(type(thing), known._PipelineSchedule)]
    return [schedule for schedule in living if mine & _parameters(schedule)]


def _parameters(schedule: Any) -> set[int]:
    return {id(parameter) for stage in stages_of(schedule) for parameter in stage.submod.parameters()}
