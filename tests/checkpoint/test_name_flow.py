"""Which names a turn of a loop reads before it has surely set them: these live on from turn to turn."""

from __future__ import annotations

import ast
import textwrap

import pytest

from holdfast.checkpoint.usage.name_flow import Functions, Reader

CASES = {
    "name that another case captures": (
        """
        match kind:
            case [best]:
                pass
            case _:
                print(best)
        """,
        {"best"},
        set(),
    ),
    "name that its own case captures": (
        """
        match kind:
            case [best] if best > 0:
                print(best)
        """,
        set(),
        {"best"},
    ),
    "name that another handler has": (
        """
        try:
            run()
        except ValueError as error:
            print(error)
        except KeyError:
            print(error)
        """,
        {"error"},
        set(),
    ),
    "name that its own handler has": (
        """
        try:
            run()
        except ValueError as error:
            print(error)
        """,
        set(),
        {"error"},
    ),
    "name that the body of a try reads and its handler has": (
        """
        try:
            print(error)
        except ValueError as error:
            pass
        """,
        {"error"},
        set(),
    ),
    "walrus in a lambda": ("call(lambda: (best := 1))\nprint(best)", {"best"}, set()),
    "walrus beside a lambda": ("(best := 1)\nprint(best)", set(), {"best"}),
    "global of a function that is not called": (
        "def note():\n    global best\n    best = 1\nprint(best)",
        {"best"},
        set(),
    ),
    "name of a function": ("def note():\n    pass\nnote()", set(), {"note"}),
    "both branches": ("if kind:\n    best = 1\nelse:\n    best = 2\nprint(best)", set(), {"best"}),
    "one branch": ("if kind:\n    best = 1\nprint(best)", {"best"}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_names_that_live_on_are_read_before_they_are_set(name: str) -> None:
    text, early, set_first = CASES[name]
    tree = ast.parse(textwrap.dedent(text))
    reader = Reader(set(), Functions(tree))
    reader.body(tree.body)
    assert early <= reader.early
    assert not set_first & reader.early
