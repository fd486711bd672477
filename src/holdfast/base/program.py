"""Tells how a program of holdfast is started by another one: as `python -m`, but without the working directory in the
search path.

A user's `secrets.py` or `queue.py` may lie there; whoever starts a script expects the script to see it, and nobody else. In a
directory that others can write to it may be somebody else's, and would run with what the program inherits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_AS_MODULE = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); import runpy; "
    "runpy._run_module_as_main(sys.argv.pop(1))"
)


def command(module: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a module of holdfast with the interpreter of this process, and flags of that."""
    return [sys.executable, *flags, "-c", _AS_MODULE, module, *arguments]
