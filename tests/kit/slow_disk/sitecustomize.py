"""Part of every process with this folder on its path: no file is on the disk while the file `HELD` names is there."""

import os
import time

fsync = os.fsync


def held(fd: int) -> None:
    """Comes back when nobody holds the disk up."""
    while os.path.exists(os.environ["HELD"]):
        time.sleep(0.01)
    fsync(fd)


os.fsync = held  # type: ignore[assignment]
