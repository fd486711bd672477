"""Opens standard files that whoever started the program has closed, as some daemons and `cron` do.

Python has None in their place then, and the next file or socket gets the number 0, 1 or 2: a worker would write its lines there.
"""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Open each closed one on /dev/null, for this program and those that it starts. The first act of a program."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))
