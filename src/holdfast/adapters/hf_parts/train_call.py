"""One call of a trainer's method `train`: what it was given, and how it is told where to go on.

A subclass may have a `train` of its own, with other arguments. It is called as the script calls it, unless there is a place to go on
from that the script did not name.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from typing import Any

PLACE, TRIAL = "resume_from_checkpoint", "trial"


class TrainCall:
    """Holds a call that is about to be made.

    Args:
        train: the method of the trainer's own class.
        args, options: what the script gave.

    Attributes:
        place: where the script said to go on; None if it did not.
        trial: of a search; None for a training of its own.
        takes_place: whether the method can be told where to go on.
    """

    def __init__(self, train: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._train, self._args, self._options = train, args, dict(options)
        parameters = inspect.signature(train).parameters
        kinds = {each.kind for each in parameters.values()}
        names = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        if inspect.Parameter.VAR_POSITIONAL in kinds and PLACE not in parameters:
            names += [PLACE, TRIAL]  # it hands them on, to a method that has these first
        given = {**dict(zip(names, args, strict=False)), **options}
        self.place, self.trial = given.get(PLACE), given.get(TRIAL)
        rest = next((each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD), "")
        self.takes_place = PLACE in parameters or (bool(rest) and _reads(train, rest))
        self._number = names.index(PLACE) if PLACE in names[: len(args)] else None

    def __call__(self, place: Any = None) -> Any:
        """Make the call; with a place, if there is one, instead of the script's."""
        if place is None or place is self.place:
            return self._train(*self._args, **self._options)
        if self._number is None:
            return self._train(*self._args, **{**self._options, PLACE: place})
        before, behind = self._args[: self._number], self._args[self._number + 1 :]
        return self._train(*before, place, *behind, **self._options)


def _reads(method: Callable[..., Any], name: str) -> bool:
    """Tell whether a method reads a name of its own: what it was given by `**options` goes nowhere if it does not."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or name not in (*code.co_varnames, *code.co_cellvars):
        return True  # nobody can tell
    loads = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return any(name == found or (isinstance(found, tuple) and name in found) for found in loads)
