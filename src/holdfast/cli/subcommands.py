"""`run`, `demo`, `drill`, `prove`: commands that need torch and therefore are programs of their own.

They are started in place of this process (exec), so signals, exit codes and process ids are theirs, and `holdfast`
itself stays free of torch. What only answers a question (`rehearsal` and `orders`, for `plan`) is asked as a child.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from holdfast.base import program
from holdfast.base.errors import UsageError
from holdfast.base.standard_streams import open_standard_files

PROGRAMS = {
    "run": "holdfast.adapters.zero_lines.launcher",
    "demo": "holdfast.testing.demo.demo",
    "drill": "holdfast.testing",
    "prove": "holdfast.testing.prove.prove",
}

# What a program needs beyond the library (the extra `testing`).
NEEDS = {"demo": ("rich",), "drill": ("psutil", "rich"), "prove": ("psutil",)}

QUESTIONS = {
    "exported": "holdfast.adapters.exported",
    "rehearsal": "holdfast.checkpoint.dry_run",
    "orders": "holdfast.checkpoint.pipeline.schedule_actions",
}


def become(name: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the program, arguments passed through.

    Raises:
        UsageError: packages that it needs are not installed.
    """
    missing = [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"`holdfast {name}` needs {' and '.join(missing)}", remedy="pip install 'holdfast[testing]' brings them"
        )
    open_standard_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, program.command(PROGRAMS[name], *arguments))


def ask(name: str, arguments: Sequence[str]) -> bytes:
    """Return what the program answers on standard output; empty if it fails. Its errors go where ours do."""
    sys.stderr.flush()
    command = program.command(QUESTIONS[name], *arguments)
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    return answer.stdout if answer.returncode == 0 else b""
