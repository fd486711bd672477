"""Healthy oddities are left alone for as long as they last, and the sick are found: as facts, with the true limits."""

from __future__ import annotations

import statistics

import pytest

from holdfast.core.elastic.watch_mode import CAREFUL, MODES, QUICK
from oddities import HEALTHY, SICK
from oddities_kit import Case, found_s, kills

SAMPLE = 20  # of each zoo, in the default suite


def sampled(cases: list[Case]) -> list[object]:
    """All of them; those outside the sample are slow."""
    every = len(cases) // SAMPLE
    return [
        pytest.param(case, id=case.name.replace(" ", "-"), marks=[] if index % every == 0 else [pytest.mark.slow])
        for index, case in enumerate(cases)
    ]


def test_the_zoo_is_as_large_as_promised() -> None:
    assert len(HEALTHY) >= 120
    assert len(SICK) >= 60
    assert len({case.name for case in HEALTHY + SICK}) == len(HEALTHY + SICK)


@pytest.mark.parametrize("case", sampled(HEALTHY))
def test_a_healthy_oddity_is_left_alone(case: Case) -> None:
    assert kills(case, CAREFUL) == []


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("case", sampled(SICK))
def test_a_sick_one_is_found(case: Case, mode: str) -> None:
    assert found_s(case, MODES[mode]) is not None


@pytest.mark.slow
def test_how_long_the_sick_are_not_found(record_property: pytest.RecordProperty) -> None:
    """Prints the median and the worst of each mode (`-rP`)."""
    times = {mode.name: sorted(found_s(case, mode) or 0.0 for case in SICK) for mode in (CAREFUL, QUICK)}
    for name, found in times.items():
        print(f"{name}: median {statistics.median(found):.1f} s, worst {found[-1]:.1f} s of {len(found)}")
        record_property(name, found)
    assert statistics.median(times["quick"]) < 4 < statistics.median(times["careful"])
