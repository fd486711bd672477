"""Pages of slots: made in runs by several threads, in turns; a slot is none before its last page."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.base.errors import KeeperError, MemoryRefused
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.memory import slots as memory
from holdfast.tiers.memory.page_populate import Populator
from holdfast.tiers.memory.slots import Slot

TIMEOUT_S = 30.0
RUN = 1 << 20


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RUN_BYTES", RUN)


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [Slot.promise(3 * RUN, slot_id=number) for number in range(4)]
    yield made
    for slot in made:
        slot.close()


def resident_bytes(slot: Slot) -> int:
    return os.fstat(slot.fd).st_blocks * 512


def test_a_promised_slot_has_no_page_and_nobody_adopts_it(slots: list[Slot]) -> None:
    slot = slots[0]
    assert resident_bytes(slot) == 0
    with pytest.raises(KeeperError, match="not a slot"):
        Slot.adopt(os.dup(slot.fd))

    for start, length in slot.runs():
        slot.allocate(start, length)
    with pytest.raises(KeeperError, match="not a slot"):  # a keeper that dies here leaves nothing to believe in
        Slot.adopt(os.dup(slot.fd))
    slot.complete()

    assert resident_bytes(slot) >= slot.total_bytes
    Slot.adopt(os.dup(slot.fd)).close()


def test_several_threads_share_the_runs_of_one_slot(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    allocate = Slot.allocate

    def together(self: Slot, start: int, length: int) -> None:
        if start < 2 * RUN:
            both.wait(TIMEOUT_S)  # broken, and the slot refused, if one thread does all
        allocate(self, start, length)

    monkeypatch.setattr(Slot, "allocate", together)
    populator = Populator(2)

    populator.fill(slots[0])

    assert resident_bytes(slots[0]) >= slots[0].total_bytes
    populator.stop()


def test_the_first_slot_of_every_rank_comes_before_any_second(
    slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, order = threading.Event(), []
    allocate = Slot.allocate

    def noted(self: Slot, start: int, length: int) -> None:
        asked.wait(TIMEOUT_S)
        order.append(self.slot_id)
        allocate(self, start, length)

    monkeypatch.setattr(Slot, "allocate", noted)
    populator, left = Populator(1), threading.Semaphore(0)
    for rank in range(2):  # each asks for two
        for turn in range(2):
            populator.start(slots[2 * rank + turn], lambda _: left.release(), turn=turn)
    asked.set()

    for _ in slots:
        assert left.acquire(timeout=TIMEOUT_S)
    runs = len(slots[0].runs())
    assert order[: 2 * runs] == [0] * runs + [2] * runs
    populator.stop()


def test_a_kernel_without_memory_refuses_the_slot_and_no_further_run_is_tried(
    slots: list[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(_: object, __: int, start: int, ___: int) -> None:
        tried.append(start)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory_pages, "allocate", full)
    populator = Populator(1)

    with pytest.raises(MemoryRefused, match="no room for 3145728 bytes"):
        populator.fill(slots[0])

    assert tried == [0]
    with pytest.raises(KeeperError, match="not a slot"):
        Slot.adopt(os.dup(slots[0].fd))
    populator.stop()


def test_a_slot_that_is_given_back_meanwhile_harms_nobody(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = threading.Event(), threading.Event()
    allocate = Slot.allocate

    def late(self: Slot, start: int, length: int) -> None:
        if self is slots[0]:
            begun.set()
            closed.wait(TIMEOUT_S)
        allocate(self, start, length)

    monkeypatch.setattr(Slot, "allocate", late)
    populator, told = Populator(1), threading.Semaphore(0)
    faults: list[MemoryRefused | None] = []

    def done(fault: MemoryRefused | None) -> None:
        faults.append(fault)
        told.release()

    populator.start(slots[0], done)
    assert begun.wait(TIMEOUT_S)
    slots[0].close()
    closed.set()

    assert told.acquire(timeout=TIMEOUT_S)
    assert isinstance(faults[0], MemoryRefused)
    populator.fill(slots[1])
    populator.stop()


def test_a_populator_that_stops_leaves_no_thread_and_answers_all(slots: list[Slot]) -> None:
    populator, told = Populator(2), []
    for slot in slots:
        populator.start(slot, told.append)

    populator.stop()

    assert len(told) == len(slots)
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast pages"]
    with pytest.raises(MemoryRefused, match="ends"):
        populator.start(slots[0], told.append)


def test_the_time_allowed_grows_with_the_bytes() -> None:
    """300 s was what a rank with more than 30 GB of state never had enough of: eight ranks, two slots each, 0.62 s per GiB."""
    for gigabytes in (30, 100, 500):
        num_bytes = 2 * gigabytes * 10**9
        assert memory.patience_s(num_bytes) > 5 * 0.62 * num_bytes / (1 << 30)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always within_size [advise] never deny force\n", "advise"),
        ("", ""),
    ],
)
def test_the_policy_of_shared_memory_is_read_from_the_kernel(tmp_path: Path, text: str, policy: str) -> None:
    (tmp_path / "shmem_enabled").write_text(text)
    assert memory_pages.shared_memory_policy(tmp_path / "shmem_enabled") == policy


def test_a_kernel_that_says_nothing_has_no_policy(tmp_path: Path) -> None:
    assert memory_pages.shared_memory_policy(tmp_path / "nothing") == ""


def test_huge_pages_are_used_where_the_machine_allows_them() -> None:
    if memory_pages.shared_memory_policy() not in memory_pages.HUGE_POLICIES:
        pytest.skip(
            f"shared memory gets no huge pages here: {memory_pages.SHMEM_ENABLED} is {memory_pages.shared_memory_policy()!r}"
        )
    slot = Slot.create(64 << 20)
    rows = Path("/proc/self/smaps").read_text().splitlines()
    slot.close()
    assert sum(int(row.split()[1]) for row in rows if row.startswith("ShmemPmdMapped:")) >= 32 << 10


def test_a_later_turn_waits_for_who_reads_into_the_first_and_goes_on_then(slots: list[Slot]) -> None:
    populator, first, second = Populator(2), threading.Event(), threading.Event()
    with populator.first_turn_alone():
        populator.start(slots[1], lambda _: second.set(), turn=1)
        populator.start(slots[0], lambda _: first.set(), turn=0)
        assert first.wait(TIMEOUT_S)
        assert resident_bytes(slots[1]) == 0
    assert second.wait(TIMEOUT_S)
    assert resident_bytes(slots[1]) >= slots[1].total_bytes
    populator.stop()


def test_a_keeper_that_ends_refuses_what_waits_for_its_turn(slots: list[Slot]) -> None:
    populator, told = Populator(2), list[MemoryRefused | None]()
    with populator.first_turn_alone():
        populator.start(slots[1], told.append, turn=1)
        populator.stop()
        assert [type(fault) for fault in told] == [MemoryRefused]
