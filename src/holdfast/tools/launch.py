"""`run`, `demo`, `drill`: commands that need torch and therefore are programs of their own.

They are started in place of this process (exec), so signals, exit codes and process ids are theirs, and `holdfast`
itself stays free of torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

PROGRAMS = {
    "run": "holdfast.train.elastic",
    "demo": "holdfast.testing.demo",
    "drill": "holdfast.testing.drill",
}


def become(program: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by `python -m` of the program, arguments passed through."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", PROGRAMS[program], *arguments])
