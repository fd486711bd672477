"""Tells that two checkpointers of one script came back to different steps.

Each has versions of its own, and a fault between two saves leaves one a step ahead. What they train together then mixes two
steps, and nothing fails. Called behind each restore.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)


def tell(root: str, start: int, others: Iterable[tuple[str, int]]) -> None:
    """Warns for each of `others`, which were restored and have reported no step since, that goes on at another step.

    Args:
        root: path of the checkpoints that were just restored.
        start: the step to go on with.
        others: the same of other checkpointers of this process.
    """
    for path, step in others:
        if step != start:
            logger.warning(
                "%s goes on at step %d, and %s at step %d. If they train together, their states do not belong together now. "
                "Give all to one Checkpointer, as in model={'generator': .., 'critic': ..}: its versions hold all of one step",
                root,
                start,
                path,
                step,
            )
