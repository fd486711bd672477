"""The options of doors that build their `Checkpointer` late: what is wrong with them is said in the line that gives them.

Used by doors of frameworks whose objects exist only when training begins. Must never: build anything, or look at a path.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.save.save_schedule import parse_cadence

# Said of a training behind the one that a script is kept for: the class, the root, the line that keeps it.
AGAIN = (
    "this training is not kept: a %s of this script has trained before, and its versions are in %s. A restart makes this one "
    "again from its beginning; %s with a path of its own keeps it"
)


def checked(root: object, options: Mapping[str, Any]) -> None:
    """Check root and options as far as that can be done before there is anything to save.

    Raises:
        UsageError: the root is no path, or an option is neither one of `Checkpointer` nor an object with a state.
        ConfigError: a cadence cannot be read.
    """
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise UsageError(f"{root!r} is no directory or URL of checkpoints", remedy='give one, such as "ckpts/run1"')
    known = set(inspect.signature(Checkpointer.__init__).parameters) - {"self", "path", "objects"}
    for name, value in options.items():
        if name in known or not isinstance(value, str | bytes | int | float | None):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"there is no option {name!r}, and {value!r} has no state to save",
            remedy=f"write {near[0]!r}" if near else f"the options are {', '.join(sorted(known))}",
        )
    for name in ("every", "durable_every"):
        if options.get(name) is not None:
            parse_cadence(name, str(options[name]))
