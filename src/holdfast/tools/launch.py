"""`run`, `demo`, `drill`: commands that need torch and therefore are programs of their own.

They are started in place of this process (exec), so signals, exit codes and process ids are theirs, and `holdfast`
itself stays free of torch. What only answers a question (`rehearsal` and `orders`, for `plan`) is asked as a child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

PROGRAMS = {
    "run": "holdfast.adapters.run",
    "demo": "holdfast.testing.demo",
    "drill": "holdfast.testing.drill",
}

# `python -m` without the working directory in the search path, where a user's `secrets.py` may lie.
AS_MODULE = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); import runpy; "
    "runpy._run_module_as_main(sys.argv.pop(1))"
)

QUESTIONS = {
    "exported": "holdfast.adapters.exported",
    "rehearsal": "holdfast.train.rehearsal",
    "orders": "holdfast.train.orders",
}


def become(program: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the program, arguments passed through."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", AS_MODULE, PROGRAMS[program], *arguments])


def ask(program: str, arguments: Sequence[str]) -> bytes:
    """What the program answers on standard output; empty if it fails. Its errors go where ours do."""
    sys.stderr.flush()
    command = [sys.executable, "-c", AS_MODULE, QUESTIONS[program], *arguments]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    return answer.stdout if answer.returncode == 0 else b""
