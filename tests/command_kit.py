"""A command as a user starts it, and what it cost: seconds of processor, for those of the clock are the neighbours' too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a command that only looks may take, from the first instruction of its process to the last.
HALF_A_SECOND = 0.5
_TRIES = 3
_CODE = """
import json, sys, time
from holdfast.tools.cli import app
code = 0
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print("COST", json.dumps({"code": code, "seconds": time.process_time(), "heavy": heavy}), file=sys.stderr)
"""


@dataclass(frozen=True)
class Answer:
    """Of the cheapest of three runs. `heavy`: which of torch and numpy it loaded."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    heavy: list[str]


def ask(words: Sequence[object], env: Mapping[str, str] | None = None) -> Answer:
    """`holdfast <words>`; a busy machine has caches to share, so it may try three times."""
    answers: list[Answer] = []
    while not answers or (answers[-1].seconds >= HALF_A_SECOND and len(answers) < _TRIES):
        command = [sys.executable, "-c", _CODE, *map(str, words)]
        found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        errors, _, cost = found.stderr.rpartition("COST ")
        facts = json.loads(cost)
        answers.append(Answer(facts["code"] or 0, found.stdout, errors, facts["seconds"], facts["heavy"]))
    return min(answers, key=lambda answer: answer.seconds)
