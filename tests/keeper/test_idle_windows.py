"""Replicas keep to the waits that a trainer shows: inside them, held back for a step at most, and at once without a page."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.model import Level
from holdfast.core.pipeline.wait_forecast import MAX_HOLD_S, Shown, may_begin
from holdfast.keeper.slots import cpu_affinity, idle_windows
from holdfast.keeper.slots.idle_windows import Turns, WindowPage, Windows
from keeper.rig import Rig, Trainer, eventually, reached
from keepers_kit import open_files, processors_of_threads
from sample_kit import MORE

MakeRig = Callable[..., Rig]
MIB = 1 << 20


@contextlib.contextmanager
def page() -> Iterator[WindowPage]:
    made = WindowPage()
    try:
        yield made
    finally:
        made.close()


# --- the decision


@given(st.floats(0, 10), st.floats(0, 3), st.floats(0, 1), st.floats(0, 5), st.floats(0, 5))
def test_a_block_leaves_in_a_wait_with_room_or_when_it_was_held_for_a_step(until, now, seconds, period, held) -> None:
    shut, opened = Shown(0, until, period), Shown(7, until, period)
    patient = held < period and held < MAX_HOLD_S
    assert may_begin(shut, now, seconds, held_s=held) is not patient
    assert may_begin(opened, now, seconds, held_s=held) is (not patient or now + seconds <= until or now >= until)
    assert may_begin(Shown(1, math.inf, period), now, seconds, held_s=held), "a wait that nobody knows may be used"
    assert may_begin(Shown(0, 0.0, math.nan), now, seconds, held_s=held) is (held >= MAX_HOLD_S), (
        "a page may hold anything"
    )


# --- the page


def test_a_page_shows_what_was_written_and_anything_else_shows_nothing() -> None:
    with page() as made:
        assert idle_windows.look(made.fds[0]) == Shown(0, 0.0, 0.0)
        made.step(0.25)
        made.open(17.5)
        assert idle_windows.look(made.fds[0]) == Shown(1, 17.5, 0.25)
        made.shut()
        made.open(None)
        assert idle_windows.look(made.fds[0]) == Shown(2, math.inf, 0.25)
        kept = os.dup(made.fds[0])
    assert idle_windows.look(kept) == Shown(0, 0.0, 0.0), "a page that its writer left holds nothing back"
    os.ftruncate(kept, 3)
    assert idle_windows.look(kept) is None
    os.pwrite(kept, b"\xff" * idle_windows.PAGE_BYTES, 0)
    assert idle_windows.look(kept) is None
    os.close(kept)
    assert idle_windows.look(kept) is None


def rings(bell: int) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_the_bell_rings_while_a_wait_is_under_way_and_when_the_page_is_closed() -> None:
    with page() as made:
        assert not rings(made.fds[1])
        made.shut()
        assert not rings(made.fds[1])
        made.open(None)
        made.open(1.0)
        assert rings(made.fds[1])
        made.shut()
        assert not rings(made.fds[1])
        kept = os.dup(made.fds[1])
    assert rings(kept), "whoever sleeps there is woken"
    os.close(kept)


def test_who_sleeps_at_the_bell_is_woken_by_the_next_wait() -> None:
    with page() as made:
        sleeper = threading.Thread(target=idle_windows.listen, args=(made.fds[1], 60.0))
        sleeper.start()
        made.open(None)
        sleeper.join(30.0)
        assert not sleeper.is_alive()


class Clock:
    """A clock that moves when somebody sleeps; at each look the waits of a step of one second are those of `waits`."""

    def __init__(self, *waits: tuple[float, float]) -> None:
        self.now_s, self.waits = 0.0, waits
        self.wanted = False
        self.stays: list[int | None] = []
        self.beside: list[int | None] = []  # of every block

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def shown(self, rank: int) -> Shown | None:
        for number, (begin, end) in enumerate(self.waits, 1):
            if begin <= self.now_s < end:
                return Shown(number, end, 1.0)
        return Shown(0, 0.0, 1.0)

    def listen(self, rank: int, timeout_s: float) -> None:
        begins = [begin for begin, _ in self.waits if self.now_s <= begin < self.now_s + timeout_s]
        self.now_s = min([*begins, self.now_s + timeout_s])

    def send(self, num_blocks: int, block_s: float) -> Windows:
        found = Windows(self.shown, self.listen, lambda _: self.wanted, self.stays.append)
        turns = Turns(found, clock=self, sleep=self.sleep)
        for _ in range(num_blocks):
            turns.wait(0, 1000)
            self.beside.append(self.stays[-1] if self.stays else None)
            self.now_s += block_s
        turns.done()
        return found


def test_what_fits_into_the_waits_of_a_step_is_sent_in_them() -> None:
    clock = Clock((0.3, 0.4), (0.7, 0.8))
    sent = clock.send(15, 0.01)
    assert sent.shown_bytes == 15_000
    assert sent.inside_bytes >= 14_000, "one block may end with its wait"
    assert 0.75 <= clock.now_s <= 0.8
    assert clock.beside == [0] * 15, "each on the processors of the rank that waits"
    assert clock.stays == [0, None], "moved there once, and away when no block follows"


def test_block_longer_than_the_wait_is_not_begun() -> None:
    """Three of 30 ms fit into a wait of 100 ms; the fourth would begin in it and end outside."""
    clock = Clock((0.3, 0.4), (0.7, 0.8))
    sent = clock.send(6, 0.03)
    assert sent.inside_bytes == sent.shown_bytes == 6_000
    assert clock.now_s == pytest.approx(0.79)


def test_what_does_not_fit_leaves_when_a_step_has_passed() -> None:
    clock = Clock((0.3, 0.4))
    sent = clock.send(50, 0.01)
    assert 8_000 <= sent.inside_bytes <= 10_000
    assert sent.shown_bytes == 50_000
    assert set(clock.beside[:8]) == {0}
    assert set(clock.beside[10:]) == {None}, "the rank computes"
    assert clock.now_s <= 1.0 + 51 * 0.01, "held back for a step in all, then as fast as it goes"


def test_nothing_is_held_back_while_a_save_waits_for_the_slot() -> None:
    clock = Clock()
    clock.wanted = True
    assert clock.send(10, 0.01).inside_bytes == 0
    assert not clock.stays, "the rank computes, and its processors are no better than others"
    assert clock.now_s <= 0.101


def test_who_shows_no_waits_any_more_is_served_on_any_processor() -> None:
    showing = [Shown(1, math.inf, 1.0)]
    stays: list[int | None] = []
    turns = Turns(Windows(lambda _: showing[0] if showing else None, lambda *_: None, lambda _: False, stays.append))
    turns.wait(0, 1000)
    assert stays == [0]
    showing.clear()
    turns.wait(0, 1000)
    assert stays == [0, None]


def test_a_thread_that_returns_to_all_processors_gets_those_of_who_attaches_meanwhile_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, mine = {0}, {0}

    def set_mine(_: int, wanted: set[int]) -> None:
        mine.clear()
        mine.update(wanted)
        main.add(1)  # a rank that is bound to it attaches just now

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(main))
    monkeypatch.setattr(os, "sched_setaffinity", set_mine)
    cpu_affinity.stay(None)
    assert mine == {0, 1}


# --- real keepers


def replicate(trainer: Trainer, step: int) -> float:
    """Seconds until what `trainer` saved is in two nodes."""
    began = time.monotonic()
    reached([trainer], trainer.save(step), Level.REPLICATED)
    return time.monotonic() - began


def sent(rig: Rig) -> tuple[int, int, int]:
    facts = rig.status(0)["replication"]
    return facts["sent_bytes"], facts["sent_shown_bytes"], facts["sent_inside_bytes"]


def two_nodes(make_rig: MakeRig) -> tuple[Rig, Trainer, Trainer]:
    rig = make_rig(num_nodes=2, own_bytes=16 * MIB)
    return rig, *rig.start()


def save_both(first: Trainer, second: Trainer, step: int) -> float:
    second.save(step)
    return replicate(first, step)


def test_replicas_leave_in_the_waits_of_the_trainer(make_rig: MakeRig) -> None:
    rig, first, second = two_nodes(make_rig)
    save_both(first, second, 0)
    assert sent(rig)[1:] == (0, 0), "without a page nothing is counted, and nothing held back"
    over = threading.Event()
    with page() as shown:
        shown.step(4.0)
        shown.shut()  # which tells it

        def steps() -> None:
            while not over.wait(0.36):  # it computes
                shown.open(time.monotonic() + 0.12)
                over.wait(0.12)
                shown.shut()

        first.client.show_waits(shown.fds)
        trainer = threading.Thread(target=steps)
        trainer.start()
        try:
            before = sent(rig)
            for step in range(1, 6):
                save_both(first, second, step)
            moved, watched, inside = (now - then for now, then in zip(sent(rig), before, strict=True))
        finally:
            over.set()
            trainer.join()
    assert watched == moved >= 5 * 16 * MIB
    assert inside >= 0.5 * watched, "a quarter, if nothing were held back; a busy machine opens windows late"


def hashed(rig: Rig) -> tuple[int, int]:
    facts = rig.status(0)["hashing"]
    return facts["shown_bytes"], facts["inside_bytes"]


def test_a_version_is_hashed_in_the_waits_of_its_trainer(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=1, own_bytes=64 * MIB)
    (trainer,) = rig.start()
    reached([trainer], trainer.save(0), Level.CAPTURED)
    assert hashed(rig) == (0, 0), "without a page nothing is counted, and nothing held back"
    with page() as shown:
        shown.step(60.0)
        shown.shut()
        trainer.client.show_waits(shown.fds)
        for step in range(1, 20):
            before, began = hashed(rig), time.monotonic()
            version = trainer.save(step)
            assert hashed(rig)[1] == before[1], "it computes"
            shown.open(None)
            in_time = time.monotonic() - began < MAX_HOLD_S
            reached([trainer], version, Level.CAPTURED)
            shown.shut()
            if in_time:  # else this machine was too slow, and it was not held back any longer
                break
        watched, inside = (now - then for now, then in zip(hashed(rig), before, strict=True))
        assert inside == watched >= 64 * MIB, "all of it waited for the wait"
        version = trainer.save(step + 1)
    reached([trainer], version, Level.CAPTURED)  # whoever closed its page waits for nothing


@MORE
def test_in_a_wait_it_is_hashed_on_the_processors_of_the_rank_that_waits(make_rig: MakeRig) -> None:
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        pytest.skip("needs two processors")
    rig = make_rig(num_nodes=1, own_bytes=256 * MIB)
    (trainer,) = rig.start()
    keeper, mine = rig.pid_of(rig.keeper(0)), frozenset({max(every)})
    with page() as shown, contextlib.ExitStack() as bound:
        shown.step(60.0)
        shown.open(None)
        trainer.client.show_waits(shown.fds)
        bound.callback(os.sched_setaffinity, 0, every)
        os.sched_setaffinity(0, mine)
        assert mine in while_hashed(trainer, 0, keeper, every - mine)
        eventually(lambda: processors_of_threads(keeper) == {frozenset(every)})
        shown.shut()
        assert mine not in while_hashed(trainer, 1, keeper, every - mine), (
            "it computes: it was held back long enough, and its processors are no better than others"
        )


def while_hashed(trainer: Trainer, step: int, keeper: int, from_: set[int]) -> set[object]:
    """Processors of the keeper's threads until a version is hashed, seen from others than those on which it is."""
    used: set[object] = set()
    looks, hashed = threading.Event(), threading.Event()

    def look() -> None:
        os.sched_setaffinity(0, from_)
        looks.set()
        while not hashed.is_set():
            used.update(processors_of_threads(keeper))

    looker = threading.Thread(target=look)
    looker.start()
    looks.wait()
    reached([trainer], trainer.save(step), Level.CAPTURED)
    hashed.set()
    looker.join()
    return used


def test_what_a_dead_trainer_left_is_hashed_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(num_nodes=1, own_bytes=16 * MIB)
    (trainer,) = rig.start()
    with page() as shown:
        shown.step(60.0)
        shown.shut()
        trainer.client.show_waits(shown.fds)
        trainer.save(0)
        trainer.client.close()
        eventually(lambda: rig.status(0)["newest"].get("captured") is not None)
    assert hashed(rig) == (0, 0)


def test_a_page_that_stays_shut_costs_a_step_and_one_that_is_no_page_nothing(make_rig: MakeRig) -> None:
    rig, first, second = two_nodes(make_rig)
    save_both(first, second, 0)
    with page() as shown:
        shown.step(0.4)
        shown.shut()
        first.client.show_waits(shown.fds)
        assert save_both(first, second, 1) >= 0.4, "the blocks were held back"
        assert sent(rig)[2] == 0
    assert save_both(first, second, 2) < 0.4, "whoever closed its page holds nothing back"
    fd = os.memfd_create("no page")
    first.client.show_waits((fd, fd))
    os.close(fd)
    watched = sent(rig)[1]
    save_both(first, second, 3)
    assert sent(rig)[1] == watched


@MORE
def test_a_save_that_waits_for_the_slot_ends_the_holding_back(make_rig: MakeRig) -> None:
    _, first, second = two_nodes(make_rig)
    save_both(first, second, 0)
    with page() as shown:
        save_both(first, second, 1)
        shown.step(60.0)
        shown.shut()
        first.client.show_waits(shown.fds)
        second.save(2)
        version = first.save(2)
        reached([first], version, Level.CAPTURED)
        began = time.monotonic()
        first.begin(3, timeout_s=5.0)  # both slots hold what is needed until this version is in two nodes
        assert time.monotonic() - began < MAX_HOLD_S / 2
        reached([first], version, Level.REPLICATED)


def test_the_page_of_a_trainer_that_went_is_let_go(make_rig: MakeRig) -> None:
    rig, first, _ = two_nodes(make_rig)
    keeper = rig.pid_of(rig.keeper(0))

    def pages() -> int:
        return sum("holdfast-windows" in file for file in open_files(keeper))

    with page() as shown:
        for _ in range(3):
            first.client.show_waits(shown.fds)
        assert pages() == 1, "the last one counts"
        first.client.close()
        eventually(lambda: pages() == 0)
