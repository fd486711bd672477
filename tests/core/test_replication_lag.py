"""How long saves wait for replicas."""

from __future__ import annotations

from holdfast.core.versions.replication_lag import (
    FACTOR,
    FIRST_PATIENCE_S,
    LEAST_PATIENCE_S,
    MOST_PATIENCE_S,
    SIGN_S,
    STILL_PATIENCE_S,
    ReplicationLag,
)


def test_there_is_patience_while_nothing_is_outstanding() -> None:
    assert ReplicationLag().lasts(1e9)


def test_it_counts_from_the_first_version_that_waits() -> None:
    patience = ReplicationLag()
    patience.captured(100.0)
    patience.captured(105.0)
    assert patience.lasts(100.0 + FIRST_PATIENCE_S)
    assert not patience.lasts(100.1 + FIRST_PATIENCE_S)


def test_it_learns_how_long_replication_takes() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.replicated(8.0, newest=True)
    patience.captured(20.0)
    assert patience.lasts(20.0 + 8.0 * FACTOR)
    assert not patience.lasts(20.1 + 8.0 * FACTOR)


def test_it_never_falls_below_the_least() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.replicated(0.01, newest=True)
    patience.captured(1.0)
    assert patience.lasts(1.0 + LEAST_PATIENCE_S)


def test_success_with_a_newer_version_outstanding_starts_anew() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.replicated(9.0, newest=False)
    assert patience.lasts(9.0 + LEAST_PATIENCE_S)
    assert not patience.lasts(9.1 + 9.0 * FACTOR)


def test_what_moves_is_waited_for_longer_but_not_for_ever() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.moved(FIRST_PATIENCE_S)
    assert patience.lasts(FIRST_PATIENCE_S + SIGN_S)
    assert not patience.lasts(FIRST_PATIENCE_S + SIGN_S + 0.1), "nothing moves any more"
    patience.moved(MOST_PATIENCE_S)
    assert patience.lasts(MOST_PATIENCE_S)
    assert not patience.lasts(MOST_PATIENCE_S + 0.1)


def test_a_replication_that_took_long_does_not_make_a_dead_line_hold_slots_for_long() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.replicated(200.0, newest=False)
    assert not patience.keeps_up
    assert not patience.lasts(200.0 + STILL_PATIENCE_S + 0.1)


def test_what_storage_overtakes_is_waited_for_no_longer_than_what_does_not_move() -> None:
    patience = ReplicationLag()
    patience.captured(0.0)
    patience.moved(25.0)
    assert patience.lasts(25.0)
    patience.stored()
    assert not patience.lasts(25.0)
    patience.replicated(26.0, newest=False)
    patience.moved(26.0 + MOST_PATIENCE_S)
    assert patience.lasts(26.0 + MOST_PATIENCE_S), "the next one has the same chance"
