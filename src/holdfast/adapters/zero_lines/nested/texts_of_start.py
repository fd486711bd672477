"""Judges texts that hold the time of a start, or a name that was drawn for it: `run = f"runs/{time.time()}"`.

A script that was started again has another text there. It is no sign that the script has gone on from a file of its own, and it is
set to what it was: what later steps write lies beside what the earlier ones wrote.
"""

from __future__ import annotations

import calendar
import os
import re

_WORDS = (*calendar.day_name, *calendar.month_name, *calendar.day_abbr, *calendar.month_abbr, "AM", "PM")
_VARIES = re.compile(
    "|".join((r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", *filter(None, _WORDS), r"[0-9a-f]{8,}", r"\d+"))
)


def are_alike(saved: str, now: str) -> bool:
    """Tell whether two texts differ in nothing but numbers, names of days and months, and drawn names."""
    return _VARIES.sub("#", saved) == _VARIES.sub("#", now)


def is_gone(saved: str, now: str) -> bool:
    """Tell whether a path, or the directory that it is in, is there and that of the run that saved is not: on another machine, say."""
    pairs = ((saved, now), (os.path.dirname(saved), os.path.dirname(now)))
    return any(os.path.exists(new) and not os.path.exists(old) for old, new in pairs)
