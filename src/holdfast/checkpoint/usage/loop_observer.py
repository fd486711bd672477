"""Looks at the names of the user's loop at some of its first steps, and tells once what changes there and is in no version.

What is told: tensors, numbers and containers of these that live from one step to the next, in names, in attributes and in place; iterators, and loaders that a loop goes
over; generators of random numbers, optimizers, schedulers, scalers and modules that were not given. Each with its place and the lines
that keep it. Only what has changed between two steps is told, so one that is told is certain to begin anew after a restart; what
changes seldom, on a device or out of reach of these names need not be found. Nothing is raised, nothing kept alive, nothing written.

Asked by `checkpoint.checkpointer.checkpointer` at every step; after the first ones it looks at powers of two.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from types import CodeType, FrameType
from typing import Any

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.state.loop_values import CarriedPart
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.given_objects import Given
from holdfast.checkpoint.usage.loop_analysis import Around, around, from_outside
from holdfast.checkpoint.usage.loop_snapshot import Early, Finding, look
from holdfast.core.versions import step_numbers

logger = logging.getLogger(__name__)

# The first steps that are looked at, all of them; behind them only powers of two.
FIRST_LOOKS = 6
# Frames that are looked at for a loop, where the function that calls `step` has none.
MAX_CALLERS = 8
# Places of the script that call `step`, of which more is not looked at.
MAX_PLACES = 4


# What a warning says; the lines behind it have the names.
NO_VERSION = "changes what is in no version"


@dataclass(slots=True)
class Loops:
    """The loops of one function around a call of `step()`.

    Attributes:
        around: what their text says.
        before: name -> token, of what the look before has found.
        lives: names that were told to be carried.
    """

    around: Around
    code: CodeType
    before: Mapping[str, object]
    lives: list[str] = field(default_factory=list)


class Observer:
    """Looks at one run.

    Args:
        objects: what was given to the Checkpointer, by name.
        carried: the values that steps are given besides.
        start: what `restore()` returned.
        count: steps that optimizers have made.
        early: what there was as `restore()` was called.
        says: whether this rank speaks for the job.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        carried: CarriedPart,
        *,
        start: int,
        count: Callable[[], int],
        early: Early,
        says: bool,
    ) -> None:
        self._given, self._carried, self._says = Given(objects), carried, says
        self._start, self._count = start, count
        self._early: Sequence[object] = early.iterators
        self._tokens, self._code = early.tokens, early.code
        self._calls, self._off = 0, False
        self._places: dict[tuple[str, int], list[Loops]] = {}
        self._told: set[str] = set()
        self._numbers: list[tuple[int, int]] = []
        self._steps = count()

    def at(self, step: int, frame: FrameType) -> bool:
        """Looks, if it is time to; `step` is told by `frame`, or by a method of ours that it called.

        Returns:
            Whether the text of the script says that this number is one more than that of the step that was made.
        """
        self._calls += 1
        self._number(step)
        if self._off or (self._calls > FIRST_LOOKS and self._calls & (self._calls - 1)):
            return False
        try:
            return self._at(user_frames.users(frame))
        except Exception as error:  # noqa: BLE001 - it is other people's code and objects, and training must go on
            pass_on(error)
            logger.info("the script's loop is not looked at: %s: %s", type(error).__name__, error)
            self._off = True
            return False

    def _at(self, frame: FrameType | None) -> bool:
        if frame is None:
            self._off = True
            return False
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in self._places and len(self._places) < MAX_PLACES:
            self._places[place] = list(self._loops(frame))
        found = self._places.get(place, [])
        if self._says and found:
            self._given.look()
            for loops in found:
                self._tell(loops, self._look(loops, frame))
            self._early = ()  # an iterator must not live longer for our sake
        return any(loops.around.one_more for loops in found)

    def _loops(self, frame: FrameType) -> Iterator[Loops]:
        """Yields what the loops around a call of `step()` have: those of its function, and of functions that called this one."""
        text = user_frames.text(frame)
        for number, each in enumerate((frame, *_callers(frame))):
            found = (
                from_outside(user_frames.text(each), each.f_lineno, text, frame.f_lineno)
                if number
                else around(text, frame.f_lineno)
            )
            if found is not None and each.f_code is self._code:
                yield Loops(found, each.f_code, self._tokens)
            elif found is not None:  # each turn of its loops may restore
                yield Loops(replace(found, begins={}), each.f_code, {})

    def _look(self, loops: Loops, frame: FrameType) -> list[Finding]:
        named = next((each for each in (frame, *_callers(frame)) if each.f_code is loops.code), None)
        names = user_frames.names(named) if named is not None else {}
        findings = list(look(loops.around, names, self._given, self._early))
        before, loops.before = loops.before, {finding.name: finding.token for finding in findings}
        return [
            finding
            for finding in findings
            if finding.name not in self._told
            and (finding.token is True or before.get(finding.name, finding.token) != finding.token)
        ]

    def _tell(self, loops: Loops, findings: Sequence[Finding]) -> None:
        if self._calls == 1 and self._carried.forgotten:
            logger.warning("was kept by step() and is asked for by nobody: %s", ", ".join(self._carried.forgotten))
        if not findings:
            return
        found = loops.around
        self._told.update(finding.name for finding in findings)
        lines = [f"{finding.name}: {finding.what}" for finding in findings]
        if lives := [finding.name for finding in findings if finding.carried]:
            loops.lives += lives
            keys = _keys(loops.lives, {word.partition("=")[0] for word in found.told})
            taken = ", ".join(f'{found.caller}.carry("{key}", {name})' for name, key in keys.items())
            passed = ", ".join([*found.told, *(f"{key}={name}" for name, key in keys.items())])
            lines.append(
                f"what lives on is kept by two lines, behind restore() and in the loop:\n        {', '.join(keys)} = {taken}"
            )
            lines.append(f"    {found.caller}.step({passed})")
        logger.warning(
            "the loop of %s, line %d, %s; after a restart that is what it was before the loop:\n    %s",
            os.path.basename(loops.code.co_filename),
            found.line,
            NO_VERSION,
            "\n    ".join(lines),
        )

    def _number(self, step: int) -> None:
        """Says once, behind a restart, that the first number left a step out."""
        if len(self._numbers) < 2:
            count = self._count()
            self._numbers.append((step, count - self._steps))
            self._steps = count
            if len(self._numbers) == 2 and step_numbers.is_one_off(self._start, *self._numbers) and self._says:
                logger.warning(
                    "restore() returned %d and the first step that was reported is %d: a step was left out at this restart. "
                    "Report the number of the step that was made, not that of the next one",
                    self._start,
                    self._numbers[0][0],
                )


def _keys(paths: Sequence[str], passed: set[str]) -> dict[str, str]:
    """Returns what each path is carried as: an identifier of its own, and none that is passed already."""
    found: dict[str, str] = {}
    for path in paths:
        key = re.sub(r"\W+", "_", path, flags=re.ASCII).strip("_")
        key = key if key.isidentifier() else f"value_{key}"
        taken = {*found.values(), *passed, "step", "self"}
        found[path] = next(each for each in chain([key], (f"{key}_{n}" for n in count(2))) if each not in taken)
    return found


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yields the frames of the user's that called this one, innermost first."""
    caller = frame.f_back
    for _ in range(MAX_CALLERS):
        if caller is None:
            return
        if user_frames.is_users(caller):
            yield caller
        caller = caller.f_back
