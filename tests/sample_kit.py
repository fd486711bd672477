"""Which of many cases the default suite has: some that tell the most, or are drawn. All of them run with `--slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MORE = pytest.mark.slow(why="shows again what other tests show")


def sampled(cases: Iterable[Any], *default: Any) -> list[Any]:
    """Return parameters of a test, of which those that equal one of `default` run always. A tuple is one case of several."""
    every = list(cases)
    assert all(case in every for case in default), "not every case of the default suite is there"
    values = [(case if isinstance(case, tuple) else (case,), () if case in default else MORE) for case in every]
    return [pytest.param(*value, marks=marks) for value, marks in values]
