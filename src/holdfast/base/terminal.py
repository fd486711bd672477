"""Text as people read it: names in files of others may hold what a terminal obeys (ECMA-48), or hides; lists may be long."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

# Controls (C0, DEL, C1) but for the line feed, marks that turn the direction of text (UAX #9), lone surrogates.
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: object) -> str:
    r"""Returns a text with everything spelt out that is no plain character: `\x1b[2J` for what would clear the screen."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def some_of(names: Iterable[object], most: int = 20) -> str:
    """Return the first names, at most so many, and how many more there are."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def say(*lines: str) -> None:
    """Lines on standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
