"""Whole clusters in virtual time on the real decision code: no promise breaks, every missing rule is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

import forked
from holdfast.core.layout.parity_groups import STANDS
from holdfast.core.model import Version
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.testing.simulator.__main__ import simulate
from holdfast.testing.simulator.clock import Clock, Violation
from holdfast.testing.simulator.network import Storage
from holdfast.testing.simulator.observer import Observer
from holdfast.testing.simulator.run import MIN_FAULTS, run
from planted.simulator import BUGS, hunt
from sample_kit import sampled

FAULTS = {
    "crash", "hang", "keeper death", "coordinator death", "node loss", "partition", "one-way partition", "delay",
    "duplication", "reorder", "slow storage", "storage outage", "unreadable storage", "flipped bit", "twins differ", "broken groups", "cursed step", "second fault in recovery",
}  # fmt: skip


def held(seeds: range) -> set[str]:
    """Runs them; returns the kinds of faults that struck."""
    results = simulate(seeds, processes=2)
    assert [f"seed {r.seed}: {r.violation}" for r in results if r.violation] == []
    for result in results:
        struck = sum(count for name, count in result.faults.items() if name != "second fault in recovery")
        assert struck >= MIN_FAULTS - 3  # a strike that is impossible at its moment, six times over, is left out
    assert sum(sum(r.faults.values()) for r in results) >= MIN_FAULTS * len(results)
    assert any(result.fills for result in results)  # recoveries from the survivors' live state
    return {name for result in results for name, count in result.faults.items() if count}


def test_clusters_break_no_promise() -> None:
    assert len(held(range(1000, 1012))) >= 12


def test_clusters_that_keep_parity_break_no_promise() -> None:
    results = [run(seed, parity=True) for seed in range(6)]
    assert [f"seed {r.seed}: {r.violation}" for r in results if r.violation] == []
    assert sum(r.faults["node loss"] for r in results)


def one_piece_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Board, "_stands", lambda _, entry, group: bool(group) and STANDS in entry.replicas)


def slots_go_when_something_newer_is_captured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeLedger, "awaits_copies", lambda *_: False)


@pytest.mark.parametrize(
    ("plant", "breaks"),
    sampled(
        [(one_piece_is_enough, {"S13"}), (slots_go_when_something_newer_is_captured, {"S1", "S13"})],
        (one_piece_is_enough, {"S13"}),
    ),
)
def test_a_rule_of_parity_that_is_taken_out_is_missed(
    plant: Callable[[pytest.MonkeyPatch], None], breaks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    violations = (run(seed, parity=True).violation for seed in range(60))
    found = next(violation for violation in violations if violation is not None)
    assert found.invariant in breaks


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_clusters_that_keep_parity_break_no_promise() -> None:
    results = [run(seed, parity=True) for seed in range(300)]
    assert [f"seed {r.seed}: {r.violation}" for r in results if r.violation] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_clusters_break_no_promise() -> None:
    assert held(range(2000)) == FAULTS


def test_the_same_seed_gives_the_same_run() -> None:
    one, two, other = run(7, verbose=True), run(7), run(8)
    assert one.digest == two.digest != other.digest
    assert (one.num_events, one.faults) == (two.num_events, two.faults)
    assert any("fault:" in line for line in one.story)


QUICK = (
    "overwrite-the-oldest", "abandoned-stays", "pins-ignored", "slot-by-counting", "all-but-one-is-enough",
    "replicated-at-once", "parts-not-awaited", "retention-keeps-one", "waiters-condemned", "heartbeats-believed",
    "never-quiet", "notes-not-awaited", "window-not-seen", "device-believed",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_rule_that_is_taken_out_is_missed(name: str) -> None:
    found = hunt(name, 0)
    assert found is not None
    assert found.violation is not None
    assert found.violation.invariant in BUGS[name].breaks


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(set(BUGS) - set(QUICK)))
def test_a_subtle_rule_that_is_taken_out_is_missed(name: str) -> None:
    assert hunt(name, 0, 400) is not None


def test_twins_that_differ_are_judged_when_called_captured_when_committed_and_when_chosen() -> None:
    """Each by itself: in a run the next of them would tell what the one before had let through."""
    version = Version(1, 4)
    observer = Observer((), 1, sealed={version: {0}}, living={version})
    storage = Storage(Clock(0))
    judges = (
        partial(observer.check_news, Announcement(Kind.CAPTURED, version, ""), storage),
        partial(observer.check_manifest, version, {}),
        partial(observer.check_choice, version, storage, []),
    )
    for judge in judges:
        judge()
    observer.spoiled.add(version)
    for judge in judges:
        with pytest.raises(Violation) as found:
            judge()
        assert found.value.invariant == "S16"


def test_a_failure_is_told_again_from_its_seed() -> None:
    """Through the command, from seed to story; the transcript is the same one."""
    command = [sys.executable, "-m", "holdfast.testing.simulator"]
    told = subprocess.run([*command, "--only", "7"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].endswith(run(7).digest)
    drill = [sys.executable, "-m", "holdfast.testing", "sim", "--seeds", "2", "--processes", "1", "--json"]
    summed = forked.run(drill, capture_output=True, text=True, timeout=60)
    assert json.loads(summed.stdout)["violations"] == []
