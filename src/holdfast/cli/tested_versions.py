"""Compares what is installed with the releases that holdfast was tested with, without importing any of it.

`tested.json` has for Python and for each distribution the oldest and the newest release of which no test failed. It is made
from the results of `make matrix`. Another release may well work; nobody has seen it.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = "python"
_FILE = Path(__file__).with_name("tested.json")


@dataclass(frozen=True, slots=True)
class Installed:
    """One distribution that is here.

    Attributes:
        name: of the distribution, or `python`.
        untested: what is said of a version outside of the range; empty inside of it.
    """

    name: str
    version: str
    untested: str = ""


def installed() -> Iterator[Installed]:
    """Everything that was tested and is installed."""
    for name, (oldest, newest) in json.loads(_FILE.read_text(encoding="utf-8")).items():
        version = platform.python_version() if name == PYTHON else _version(name)
        if version:
            yield Installed(name, version, outside(version, oldest, newest))


def outside(version: str, oldest: str, newest: str) -> str:
    """Return what is said of a version outside of the range; empty inside. The first two numbers count."""
    if _minor(oldest) <= _minor(version) <= _minor(newest):
        return ""
    kind = "older" if _minor(version) < _minor(oldest) else "newer"
    tested = _text(oldest) if _minor(oldest) == _minor(newest) else f"{_text(oldest)} to {_text(newest)}"
    return f"{kind} than what was tested, {tested}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _text(version: str) -> str:
    return ".".join(map(str, _minor(version)))
