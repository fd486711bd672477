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

# Packages of the extra `testing`; torch a machine that only looks at checkpoints may be without.
NEEDS = {"demo": ("torch", "rich"), "drill": ("torch", "psutil", "rich"), "prove": ("torch", "psutil")}

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
    _require(f"`holdfast {name}`", NEEDS.get(name, ("torch",)))
    open_standard_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, program.command(PROGRAMS[name], *arguments))


def _require(what: str, packages: Sequence[str]) -> None:
    """Refuse if packages are missing. Each is named itself: `holdfast` is another project's name on PyPI."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise UsageError(f"{what} needs {' and '.join(missing)}", remedy=f"pip install {' '.join(missing)}")


def ask(name: str, arguments: Sequence[str]) -> bytes:
    """Return what the program answers on standard output; empty if it fails. Its errors go where ours do.

    Raises:
        UsageError: torch is not installed.
    """
    _require("this", ("torch",))
    sys.stderr.flush()
    command = program.command(QUESTIONS[name], *arguments)
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    return answer.stdout if answer.returncode == 0 else b""
