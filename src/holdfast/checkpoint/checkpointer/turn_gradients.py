"""Asks the text of the script's loop which gradients its next turn clears before it reads them, and which it reads.

Called at each step that is reported.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FrameType
from typing import Any

from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.usage import user_frames
from holdfast.checkpoint.usage.cleared_gradients import Turn, judged, turn_at
from holdfast.checkpoint.usage.loop_snapshot import meant

logger = logging.getLogger(__name__)

# Places of the script that report steps, of which more is not looked at.
MAX_PLACES = 4
Judgement = tuple[frozenset[int], frozenset[int]]
_NOTHING: Judgement = frozenset(), frozenset()


class TurnGradients:
    """Looks at the loops that report steps."""

    def __init__(self) -> None:
        self._turns: dict[tuple[CodeType, int], Turn | None] = {}
        # By place: of which parameters and of what the names meant, and what was said of them.
        self._known: dict[tuple[CodeType, int], tuple[frozenset[int], list[int], Judgement]] = {}

    def at(self, frame: FrameType, parameters: Set[int]) -> Judgement:
        """Returns the numbers of the parameters whose gradients the next turn seems to clear before it reads them, and of those it may read.

        Of neither kind is what the text does not tell. `frame` reports a step, or called a method of ours that does; of
        each parameter there is its `id`.
        """
        users = user_frames.users(frame)
        if users is None:
            return _NOTHING
        place = users.f_code, users.f_lineno
        try:
            if place not in self._turns and len(self._turns) < MAX_PLACES:
                self._turns[place] = turn_at(user_frames.text(users), users.f_lineno) if _is_text_of(users) else None
            if (turn := self._turns.get(place)) is None or not (names := user_frames.names(users)):
                return _NOTHING
            things = {path: meant_in(turn, path, names) for path in turn.paths}
            ids = [*map(id, things.values())]
            known = self._known.get(place)
            if known is None or known[0] != parameters or known[1] != ids:
                every = frozenset(parameters)
                known = self._known[place] = every, ids, judged(turn, things.get, every)
            return known[2]
        except Exception as error:  # noqa: BLE001 - it is other people's code and objects, and training must go on
            pass_on(error)
            logger.info(
                "what the script's loop does to gradients is not looked at: %s: %s", type(error).__name__, error
            )
            self._turns[place] = None
            return _NOTHING


def _is_text_of(frame: FrameType) -> bool:
    """Tell whether the code of a frame is what the text of its file says now: somebody may have edited it since."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = compile(user_frames.text(frame), frame.f_code.co_filename, "exec", dont_inherit=True)
    return any(code == frame.f_code for code in _codes(whole))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def meant_in(turn: Turn, path: str, names: Mapping[str, Any]) -> Any:
    """Returns what a path means; None if nobody knows, or if a turn sets it."""
    name, *attributes = path.split(".")
    is_set = name in turn.sets or any(f".{attribute}" in turn.sets for attribute in attributes)
    return None if is_set else meant(path, names)
