"""A command as a user starts it, and what it loaded: what only looks must not wait for PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CODE = """
import json, sys
from holdfast.cli.cli import app
code = 0
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print("COST", json.dumps({"code": code, "heavy": heavy}), file=sys.stderr)
"""


@dataclass(frozen=True)
class Answer:
    """`heavy`: which of torch and numpy it loaded."""

    code: int
    stdout: str
    stderr: str
    heavy: list[str]


def ask(words: Sequence[object], env: Mapping[str, str] | None = None) -> Answer:
    """`holdfast <words>`."""
    command = [sys.executable, "-c", _CODE, *map(str, words)]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    errors, _, cost = found.stderr.rpartition("COST ")
    facts = json.loads(cost)
    return Answer(facts["code"] or 0, found.stdout, errors, facts["heavy"])
