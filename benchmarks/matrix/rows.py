"""Names the rows of the matrix: which Python, which packages, which tests. Pure, but for the two files it reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The last release of each minor version that the package asks for.
TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHON = ("3.10", "3.12", "3.13")
# Frameworks are run on this torch, and on this Python where their newest release needs it.
TORCH_OF_DOORS = "2.13.0"
PYTHON_OF = {"megatron": "3.12"}
_EXTRAS_OF_TOOLS = {"cloud", "dev", "docs", "testing", "web"}


@dataclass(frozen=True, slots=True)
class Row:
    """One environment and what is run in it.

    Attributes:
        name: of the row.
        packages: requirements that are installed beside holdfast.
        python: the version of Python; empty: that which runs this.
        extra: the extra of holdfast that is installed; empty: none.
        tests: paths of tests; empty: the whole suite.
        shown: distributions whose versions are told beside that of torch.
    """

    name: str
    packages: tuple[str, ...]
    python: str = ""
    extra: str = ""
    tests: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()


def rows(root: Path) -> dict[str, Row]:
    """Returns every row by its name.

    Args:
        root: of the project; its `pyproject.toml` and `Makefile` are read.
    """
    every = [Row(f"torch-{version.rpartition('.')[0]}", (f"torch=={version}",)) for version in TORCH]
    every += [Row(f"python-{version}", (f"torch=={TORCH_OF_DOORS}",), python=version) for version in PYTHON]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    tests = dict(re.findall(r"^TESTS_([\w-]+) := (.+)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for door in sorted(extras.keys() - _EXTRAS_OF_TOOLS):
        every += _of_door(door, extras[door], tests.get(door, f"tests/adapters/test_{door}.py").split())
    return {row.name: row for row in every}


def _of_door(door: str, requirements: list[str], tests: list[str]) -> Iterator[Row]:
    shown = tuple(re.split(r"[\[<>=! ]", each)[0] for each in requirements)
    torch = f"torch=={TORCH_OF_DOORS}"
    oldest = tuple(each.replace(">=", "==") for each in requirements)
    yield Row(f"{door}-oldest", (torch, *oldest), extra=door, tests=tuple(tests), shown=shown)
    newest = (torch, "torchdata", *requirements)
    yield Row(f"{door}-newest", newest, PYTHON_OF.get(door, ""), door, tuple(tests), shown)
