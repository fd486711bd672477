"""Who is let in under a node's name: nobody beside a living holder, anybody after a proven or a long silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.elastic.node_lease import Claim, admit, stands

OLD, NEW = Claim("old", pid=7), Claim("new", pid=8)


@pytest.mark.parametrize(
    ("known", "gone", "still_s", "let_in"),
    [
        (None, False, 0.0, True),
        (NEW, False, 0.0, True),
        (Claim("old", left=True), False, 0.0, True),
        (OLD, True, 0.0, True),
        (OLD, False, 0.0, False),
        (OLD, False, 29.9, False),
        (OLD, False, 30.0, True),
        (OLD, False, -1.0, None),
    ],
)
def test_who_is_let_in(known: Claim | None, gone: bool, still_s: float, let_in: bool | None) -> None:
    decision = admit(known, NEW, gone=gone, still_s=still_s, guard_s=30.0)
    assert decision.value is let_in
    assert decision.reason


def test_who_was_replaced_holds_nothing() -> None:
    assert stands(None, OLD)
    assert stands(Claim("old", beat=9), OLD)
    assert not stands(NEW, OLD)
    assert not stands(NEW, replace(OLD, beat=9)), "however long it was there"
