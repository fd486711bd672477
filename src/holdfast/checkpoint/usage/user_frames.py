"""The frames of the user's own code: which one a call of ours came from, and what its names mean there.

Code of the user's is what lies neither in an installed package nor in the standard library nor in holdfast.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast.base.installed import is_installed
from holdfast.checkpoint.usage import name_flow

# Our methods that look at who called them.
_METHODS = {"step", "restore"}
# References to a dict of names that its frame alone holds: the frame's, that of `own`, and the argument of the count.
_UNHELD = 3
# Whether all that ask for the names of a function are given the same dict.
IS_SHARED = sys.version_info < (3, 13)
# Words by which a function may come to the dict of its names.
_SCOPES = {"locals", "vars", "f_locals", "getargvalues"}
# Words by which one may come to the names of a function that called it.
_OF_FRAMES = ("f_locals", "getargvalues")
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep


def users(frame: FrameType | None) -> FrameType | None:
    """Returns the frame that called us, if it is the user's; None if a library, or an adapter of ours, stands between.

    Args:
        frame: the one that called a method of the Checkpointer.
    """
    while frame is not None and _leads_to_caller(frame):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame) else None


def is_users(frame: FrameType) -> bool:
    """Tell whether the user wrote the code of a frame, and its text is there."""
    return is_users_file(frame.f_code.co_filename)


def is_users_file(file: str) -> bool:
    """Tell whether the user wrote a file of code, and its text is there."""
    return not (file.startswith("<") or is_installed(file) or _is_our_file(file)) and bool(linecache.getlines(file))


def text(frame: FrameType) -> str:
    """Returns the text of the file of a frame."""
    return _text_of(frame.f_code.co_filename)


def _text_of(file: str) -> str:
    return "".join(linecache.getlines(file))


def names(frame: FrameType) -> Mapping[str, Any]:
    """Returns what names mean in a frame: its own, and those of its file. Nothing where a look may change what the script holds."""
    return {} if keeps_names(frame) else {**frame.f_globals, **own(frame)}


def own(frame: FrameType) -> Mapping[str, Any]:
    """Returns a frame's own names; it keeps nothing of that alive.

    Before Python 3.13 a function's frame keeps what it was asked for until it ends: a batch, a loss with all its graph. It is one dict,
    which `locals()` hands out too: one that somebody holds is left alone.
    """
    asked = frame.f_locals
    found = dict(asked)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(asked) is dict and sys.getrefcount(asked) <= _UNHELD:
        asked.clear()
    return found


def keeps_names(frame: FrameType) -> int:
    """Returns the line in which a function may keep what `locals()` returned, which a look at its names would add names to; 0 if it does not."""
    code = frame.f_code
    if not (IS_SHARED and code.co_flags & inspect.CO_OPTIMIZED):
        return 0
    return _keeps_names(code, code.co_filename)


@functools.lru_cache(maxsize=64)
def _keeps_names(code: CodeType, file: str) -> int:
    """Looks once at a function of a file; another file may have the same code."""
    source, own_words = _text_of(file), _SCOPES & {*code.co_names}
    if not own_words and not any(word in source for word in _OF_FRAMES):
        return 0
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return code.co_firstlineno
    functions = [node for node in ast.walk(tree) if isinstance(node, name_flow.Function)]
    found = [name_flow.keeps_names(node) for node in functions if own_words and node.name == code.co_name]
    lines = found or ([code.co_firstlineno] if own_words else [])  # a lambda
    return max([*lines, *map(name_flow.keeps_names_of_others, functions)], default=0)


def _leads_to_caller(frame: FrameType) -> bool:
    """Tell whether a frame is of a method that looks at its caller, or of what decorates it."""
    if frame.f_code.co_filename == contextlib.__file__:
        return True
    return frame.f_code.co_name in _METHODS and _is_our_file(frame.f_code.co_filename)


def _is_our_file(file: str) -> bool:
    return os.path.abspath(file).startswith(_OURS)
