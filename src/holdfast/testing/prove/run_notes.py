"""Holds what the program of a run is told besides the arguments of `holdfast run`: one variable of the environment."""

from __future__ import annotations

import msgspec

NOTES_VARIABLE = "HF_PROVE_RUN"
# When a rank is killed: in the first lines of a step of an optimizer, or behind its last.
BEFORE, BEHIND = "before", "behind"
NOBODY = -1


class RunNotes(msgspec.Struct, frozen=True):
    """The notes of one run.

    Attributes:
        log: directory for what the ranks write down.
        places: directories in which checkpoints may lie.
        rank: who is killed; `NOBODY` in an undisturbed run.
        step: at which of its optimizers' steps, counted from 1.
        moment: `BEFORE` or `BEHIND` it.
    """

    log: str
    places: list[str]
    rank: int = NOBODY
    step: int = 0
    moment: str = BEHIND

    @classmethod
    def parse(cls, text: str) -> RunNotes:
        return msgspec.json.decode(text, type=cls)

    def variable(self) -> dict[str, str]:
        return {NOTES_VARIABLE: msgspec.json.encode(self).decode()}
