"""What a signal's handler of a script raises while an adapter is at work leaves the script's own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.adapters.zero_lines.changes import Changes
from holdfast.adapters.zero_lines.objects import why_no_state
from holdfast.adapters.zero_lines.reach.attributes import is_iterator
from kit.strikes import Strike, called


class Asked:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _look() -> Any:
    return None


def _now() -> object:
    changes = object.__new__(Changes)
    changes._look = _look
    return changes.now()


@pytest.mark.parametrize(
    ("call", "moment"),
    [
        (lambda: why_no_state("asked", Asked()), Asked.state_dict),
        (lambda: is_iterator(Asked()), Asked.__getattr__),
        (_now, _look),
    ],
    ids=["state", "attributes", "changes"],
)
@pytest.mark.parametrize("error", [TimeoutError, ValueError])
def test_an_error_of_a_handler_is_raised_as_it_is(
    call: Callable[[], object], moment: Any, error: type[Exception]
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(error), Strike(fails, called(moment)):
        call()
