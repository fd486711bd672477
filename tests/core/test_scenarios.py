"""The protocol as stories: tests/core/scenarios/*.txt, each run against the real core.

A story is prose (lines that begin with `#`) and blocks. A block is one or more commands, a line `----`, and what
comes of them, up to the next empty line:

    save step=10 ranks=0-3
    ----
    coordinator: 1.10 captured: all 4 ranks sealed it

`REWRITE_SCENARIOS=1 pytest tests/core/test_scenarios.py` writes what comes of them now into the files; read the
difference before you keep it. Commands are the methods `do_...` of tests/scenario_kit.py (verdicts: tests/faults_kit.py,
the escalation policy: tests/ladder_kit.py).
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from faults_kit import Watching
from ladder_kit import Climbing
from scenario_kit import KINDS, Archive, Stage

SCENARIOS = Path(__file__).parent / "scenarios"
RULE = "----"


def play(text: str) -> str:
    """The story with the transcript that the core gives today."""
    lines = text.splitlines()
    kind = next((line.split(":")[1].strip() for line in lines if line.startswith("# stage:")), "running")
    others = {"watching": Watching, "climbing": Climbing}
    stage = others[kind]() if kind in others else KINDS[kind]()
    told: list[str] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if not line or line.startswith("#"):
            told.append(line)
        elif line == RULE:
            commands = _block(told)
            answers = [answer for command in commands for answer in run(stage, command)]
            told += [RULE, *answers]
            while position < len(lines) and lines[position]:
                position += 1  # the transcript of another day
        else:
            told.append(line)
    return "\n".join(told) + "\n"


def _block(told: list[str]) -> list[str]:
    """The commands that stand right before a rule."""
    commands: list[str] = []
    for line in reversed(told):
        if not line or line.startswith("#"):
            break
        commands.append(line)
    return commands[::-1]


def run(stage: Stage | Archive | Watching | Climbing, command: str) -> list[str]:
    """What one command answers."""
    name, *rest = shlex.split(command)
    parts = [part.partition("=") for part in rest]
    return stage.run(name, {key: value for key, _, value in parts})


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    told = play(text)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(told, encoding="utf-8")
    assert told == text or os.environ.get("REWRITE_SCENARIOS")
    assert RULE in text


def test_there_is_a_story_for_every_part_of_the_protocol() -> None:
    topics = {path.stem.split("_")[0] for path in SCENARIOS.glob("*.txt")}
    assert topics >= {"commit", "guard", "recovery", "retention", "cadence", "faults", "takeover", "bubbles", "ladder"}


def test_a_story_that_does_not_come_true_is_noticed() -> None:
    text = "job nodes=a\n----\nnode a: ranks 7\n"
    assert play(text) == "job nodes=a\n----\nnode a: ranks 0\n"
