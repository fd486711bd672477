"""Everyday calls around a save, against every kind of state: a captured version is the state at its call, or there is none.

Saver, copying thread, keeper, storage and restore are the real ones, and late copies are trusted before the call comes. The
copy is left alone, held until the call is over, or held after its first batches, so that half of it lies before the call.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.base.errors import HoldfastError
from holdfast.base.events import Events
from holdfast.checkpoint.capture import copy_plan
from holdfast.checkpoint.capture.mutation_check import NUM_PROOFS
from holdfast.tiers.storage.version_store import open_storage
from zoo_calls import CALLS, WAIT_S, Run
from zoo_states import STATES

MOMENTS = ("free", "held", "torn")
# A call that waits for the copy waits so long: the copy goes on when it is over, or then.
HOLD_S = 0.05
SEED = 20261125


class Held:
    """Holds the copying thread: before its first batch, or after some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy, self._go, self._left = copy_plan.copy, threading.Event(), 0
        self._go.set()
        monkeypatch.setattr(copy_plan, "copy", self._held)
        self._patch = monkeypatch

    def cut(self, num_bytes: int) -> None:
        """Copies come in some twenty batches."""
        self._patch.setattr(copy_plan, "BATCH_BYTES", max(256, num_bytes // 20))

    @contextmanager
    def until_done(self, moment: str) -> Iterator[None]:
        if moment == "free":
            yield
            return
        self._left = 0 if moment == "held" else 3
        self._go.clear()
        timer = threading.Timer(HOLD_S, self._go.set)
        timer.start()
        try:
            yield
        finally:
            self._go.set()
            timer.cancel()
            timer.join()

    def _held(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread().name == "holdfast-capture":
            self._left -= 1
            if self._left < 0:
                assert self._go.wait(WAIT_S)
        self._copy(targets, sources)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def seeded(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator behind numpy.random.*


def cases() -> list[tuple[str, str, str]]:
    """Every call with every kind of state, at a moment that is drawn."""
    drawn = random.Random(SEED)
    return [(name, state, drawn.choice(MOMENTS)) for name in CALLS for state in STATES]


def sample() -> list[tuple[str, str, str]]:
    """Four of the calls, each with one kind of state."""
    drawn = random.Random(SEED)
    names, kinds = sorted(drawn.sample(sorted(CALLS), 4)), drawn.sample(sorted(STATES), 4)
    return [(name, kinds[number], MOMENTS[number % 3]) for number, name in enumerate(names)]


def judge(name: str, state: str, moment: str, held: Held, root: Path, runtime_dir: Path) -> int:
    """Fails unless all that was captured is what it was at its call; returns how many versions were compared."""
    call = CALLS[name]
    open_ones: list[holdfast.Checkpointer] = []

    def another(path: str, objects: dict[str, Any] | None = None) -> holdfast.Checkpointer:
        config = holdfast.Config(
            runtime_dir=str(runtime_dir), every="0", durable_every="0", keep_last=50, num_slots=3, linger_s=1.0,
            fence_timeout_s=WAIT_S, begin_timeout_s=WAIT_S, close_timeout_s=WAIT_S,
        )  # fmt: skip
        given: dict[str, Any] = {**(objects or run_objects), "verify_capture": call.verified}
        made = holdfast.Checkpointer(path, config=config, **given)
        open_ones.append(made)
        return made

    seeded(7)
    world = STATES[state]()
    run_objects = world.objects
    held.cut(sum(p.nbytes for p in world.model.parameters()))
    run = Run(world, another, str(root / "job"))
    compared = 0
    try:
        run.checkpointer.restore()
        for _ in range(NUM_PROOFS + 1):
            run.train()
            run.save("captured").wait("captured", WAIT_S)
        assert run.checkpointer.events.counters()["late_copied_bytes"] > 0
        run.train()
        with held.until_done(moment):
            run.save()
            call.does(run)
        run.train()
        with held.until_done(moment):
            run.save()
            run.train()
        last = run.saves[-1]
        last.handle.wait("captured", WAIT_S)
        for saved in run.saves[NUM_PROOFS + 1 :]:
            if call.harmless:
                assert saved.handle.given_up == ""
            if not saved.handle.given_up and saved.handle.version.incarnation == last.handle.version.incarnation:
                saved.handle.wait("durable", WAIT_S)
        while open_ones:
            open_ones.pop().abandon()
        for path in sorted({saved.path for saved in run.saves}):
            there = set(open_storage(path, Events()).versions())
            for rebuilt in (False, True):
                chosen = [s for s in run.saves if s.path == path and s.rebuilt == rebuilt and s.handle.version in there]
                compared += compare(chosen, state, call.rebuild if rebuilt else None, path, another)
                while open_ones:
                    open_ones.pop().abandon()
    finally:
        while open_ones:
            open_ones.pop().abandon()
    return compared


def compare(chosen: list[Any], state: str, rebuild: Any, path: str, another: Any) -> int:
    for saved in chosen[::-1]:
        seeded(8)
        fresh = STATES[state]()
        if rebuild is not None:
            rebuild(fresh)
        checkpointer = another(path, fresh.objects)
        assert checkpointer.restore(saved.handle.version) == saved.handle.version.step + 1
        found = fresh.fingerprint()
        checkpointer.abandon()
        different = [key for key in {**saved.expected, **found} if saved.expected.get(key) != found.get(key)]
        assert not different, f"{saved.handle.version} is not the state at its call: {different[:8]}"
    return len(chosen)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of schedulers that are stepped in another order
@pytest.mark.parametrize(("name", "state", "moment"), sample())
def test_a_captured_version_is_the_state_at_its_call(
    name: str, state: str, moment: str, held: Held, tmp_path: Path, runtime_dir: Path
) -> None:
    assert judge(name, state, moment, held, tmp_path, runtime_dir) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_leaves_every_kind_of_state_whole(name: str, held: Held, tmp_path: Path, runtime_dir: Path) -> None:
    failed: list[str] = []
    for call, state, moment in cases():
        if call != name:
            continue
        try:
            assert judge(name, state, moment, held, tmp_path / state, runtime_dir) > 0
        except (AssertionError, HoldfastError) as error:
            failed.append(f"{name} x {state} x {moment}: {error}")
        shutil.rmtree(tmp_path / state, ignore_errors=True)
    assert not failed, "\n".join(failed)
