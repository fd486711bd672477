"""Sets what this process is called where an operator looks: `ps -o pid,comm`, `top`, `pgrep`.

Launcher, spares and ranks are forks of one program with one command line; the name tells them apart.
"""

from __future__ import annotations

import logging
from pathlib import Path

from holdfast.base.handler_errors import pass_on

logger = logging.getLogger(__name__)

# The kernel keeps so many bytes of a process's name (TASK_COMM_LEN less the zero).
MOST_BYTES = 15


def label_process(name: str) -> None:
    """Names this process, by its main thread; children forked later begin with the same name.

    No name has a space: Slurm (22.05, `proctrack/linuxproc`) passes over such processes when it signals or kills a job.

    Args:
        name: spaces become hyphens; cut to 15 bytes.
    """
    try:
        Path("/proc/self/comm").write_bytes(name.replace(" ", "-").encode()[:MOST_BYTES])
    except OSError as error:  # no /proc, or not writable: nothing depends on it
        pass_on(error)
        logger.debug("the process keeps its name: %s", error)
