"""The red team: some of its cases, and that it finds what was planted and makes it plain."""

from __future__ import annotations

import dataclasses

import pytest

from redteam.case import Case, drawn, shrunk
from redteam.judge import wrongs
from redteam.planted import BUGS

SEED = 11


@pytest.mark.parametrize("number", range(1))
def test_drawn_combinations_show_nothing_wrong(number: int) -> None:
    assert wrongs(drawn(SEED, number)) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(1, 60))
def test_more_combinations_show_nothing_wrong(number: int) -> None:
    assert wrongs(drawn(SEED, number)) == []


def test_a_case_is_the_same_whenever_it_is_drawn() -> None:
    assert drawn(3, 4) == drawn(3, 4)
    assert len({drawn(3, number) for number in range(50)}) == 50


def test_what_fails_is_made_as_plain_as_it_fails() -> None:
    case = dataclasses.replace(drawn(1, 1), fault="kill", state="tied", encrypted=True)
    tried: list[Case] = []

    def fails(plainer: Case) -> bool:
        tried.append(plainer)
        return plainer.fault == "kill" and plainer.state == "tied"

    assert shrunk(case, fails) == Case(fault="kill", state="tied")
    assert str(shrunk(case, fails)) == "state=tied, fault=kill"
    assert tried


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "waits open the fence" else pytest.mark.slow) for name in BUGS]
)
def test_a_planted_bug_is_found(name: str) -> None:
    case = BUGS[name].case
    assert wrongs(case) == []
    found = wrongs(case, plant=name)
    assert any("is not the state at its call" in line or "refuses the saved state" in line for line in found), found
