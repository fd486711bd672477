"""Every order of a host, its device, a peer that dies and who leaves the run, with the real rules, and with each taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.core.versions import late_copy_rules
from model_check import device
from model_check.device import check

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("offloaded", [False, True])
def test_no_order_of_events_believes_what_a_device_had_not_finished(offloaded: bool) -> None:
    result = check(offloaded=offloaded)
    assert result.invariant == "", "\n".join(result.story)
    assert result.num_states > 150
    assert result.num_kept > 10, "what was finished in time is refused as well"


def nothing_is_void(patch: Patch) -> None:
    """As it was: a copy behind an aborted collective is told as complete."""
    patch.setattr(late_copy_rules, "counts", lambda **_: True)


def cut_first(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "LEAVING", ("cut", "void", "abort"))


def abort_first(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "LEAVING", ("abort", "void", "cut"))


def a_good_end_is_a_result(patch: Patch) -> None:
    patch.setattr(late_copy_rules, "is_result", lambda **_: True)


def what_is_passed_later_counts(patch: Patch) -> None:
    """Void looks at nothing: the device is asked when the copy, or the note, is used."""
    left = device._left
    patch.setattr(device, "_left", lambda world: replace(left(world), voided=None))


def a_collective_ends_when_its_peer_has_gone(patch: Patch) -> None:
    """A library of which nothing here may be believed."""
    patch.setattr(device, "ends_by_itself", lambda: True)


PLANTED: list[tuple[Callable[[Patch], None], bool]] = [
    (nothing_is_void, False),
    (nothing_is_void, True),
    (cut_first, False),
    (cut_first, True),
    (abort_first, False),
    (a_good_end_is_a_result, False),
    (a_good_end_is_a_result, True),
    (what_is_passed_later_counts, False),
    (a_collective_ends_when_its_peer_has_gone, False),
]


@pytest.mark.parametrize(("plant", "offloaded"), PLANTED, ids=lambda item: getattr(item, "__name__", str(item)))
def test_a_rule_that_is_missing_is_missed(plant: Callable[[Patch], None], offloaded: bool, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    result = check(offloaded=offloaded)
    assert result.invariant == "S20", f"nothing found in {result.num_states} states"
    assert len(result.story) <= 34
