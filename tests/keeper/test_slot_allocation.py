"""Memory for ranks: granted at once, made in the background, offered to nobody before it is there."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from holdfast.base.errors import KeeperLost, LevelNotReached, MemoryRefused
from holdfast.core.model import Level
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.tiers.memory import memory_pages
from holdfast.tiers.memory import slots as slot_memory
from holdfast.tiers.memory.slots import Slot
from keeper.rig import TIMEOUT_S, Rig, Trainer, eventually, reached, save_all
from keepers_kit import wait_ended
from sample_kit import sampled

MakeRig = Callable[..., Rig]


def joined(rig: Rig) -> list[Trainer]:
    """A job whose keeper makes no page before `rig.hurt(0, "")`, and whose ranks have no slot yet."""
    rig.hurtable(0)
    rig.hurt(0, "stall@pages")
    return rig.start(prepare=False)


def states(rig: Rig, rank: int) -> list[str]:
    return [slot["state"] for slot in rig.status(0)["ranks"][str(rank)]["slots"]]


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begins `call` in a thread; what is returned waits for what it gave."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(TIMEOUT_S)
        return found[0]

    return result


def test_every_rank_is_granted_its_slots_before_a_page_of_them_is_made(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = joined(rig)

    for trainer in (first, second):
        assert trainer.client.prepare(1 << 20, 2, num_ready=0, timeout_s=5) == ()

    assert states(rig, 0) == states(rig, 1) == ["unpopulated", "unpopulated"]
    assert rig.status(0)["memory"]["used_bytes"] > 4 << 20
    rig.hurt(0, "")
    for trainer in (first, second):
        assert len(trainer.client.prepare(1 << 20, 2)) == 2
    reached([first, second], save_all([first, second], 1), Level.CAPTURED)


def test_memory_that_is_put_off_is_made_when_somebody_waits_for_it(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2)
    first, second = rig.start(prepare=False)
    assert first.client.prepare(1 << 20, 2, num_ready=0, put_off=True) == ()
    assert first.client.prepare(1 << 20, 2, num_ready=0, put_off=True) == (), "asked again it is put off as before"

    assert len(second.client.prepare(1 << 20, 2)) == 2
    assert states(rig, 0) == ["unpopulated", "unpopulated"], "slots are made in the order in which they were begun"
    assert len(first.client.prepare(1 << 20, 2, num_ready=1)) >= 1
    assert len(first.client.prepare(1 << 20, 2)) == 2
    reached([first, second], save_all([first, second], 1), Level.CAPTURED)


def test_memory_that_was_put_off_and_is_too_small_leaves_the_budget(make_rig: MakeRig) -> None:
    rig = make_rig(memory_budget="8MiB")
    (trainer,) = rig.start(prepare=False)
    trainer.client.prepare(2 << 20, 2, num_ready=0, put_off=True)

    trainer.client.prepare(3 << 20, 2, num_ready=0, put_off=True)

    assert states(rig, 0) == ["unpopulated", "unpopulated"]
    assert len(trainer.client.prepare(3 << 20, 2)) == 2


def test_a_save_is_not_given_a_slot_that_is_not_complete(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = joined(rig)
    trainer.client.prepare(trainer.num_bytes, 2, num_ready=0)

    with pytest.raises(LevelNotReached, match="still being made"):
        trainer.begin(1, timeout_s=0.3)

    rig.hurt(0, "")
    assert trainer.begin(2, timeout_s=TIMEOUT_S).num_bytes >= trainer.num_bytes


def test_a_connection_is_not_held_up_by_a_request_that_waits_for_memory(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = joined(rig)
    slots = in_background(lambda: trainer.client.prepare(trainer.num_bytes, 2, num_ready=1))
    eventually(lambda: "unpopulated" in states(rig, 0))

    assert trainer.client.inventory(wide=False).copies == ()

    rig.hurt(0, "")
    assert slots()


def test_what_is_granted_counts_before_it_is_made(make_rig: MakeRig) -> None:
    rig = make_rig(per_node=2, memory_budget="16MiB")
    first, second = joined(rig)
    first.client.prepare(6 << 20, 2, num_ready=0)

    with pytest.raises(MemoryRefused, match=r"of 16777216 allowed, 1\d{7} are used here"):
        second.client.prepare(6 << 20, 2, num_ready=0)

    rig.hurt(0, "")


def test_memory_that_the_kernel_refuses_goes_back_and_may_be_asked_for_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    (trainer,) = joined(rig)
    rig.hurt(0, "ENOMEM@pages")

    with pytest.raises(MemoryRefused, match="no room for"):
        trainer.client.prepare(trainer.num_bytes, 2)

    eventually(lambda: rig.status(0)["memory"]["used_bytes"] == 0)
    assert any("not to be had" in alarm["text"] for alarm in rig.status(0)["alarms"])
    rig.hurt(0, "")
    assert len(trainer.client.prepare(trainer.num_bytes, 2)) == 2
    reached([trainer], trainer.save(1), Level.CAPTURED)


def test_a_keeper_that_dies_while_it_makes_memory_leaves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(memory_budget="8MiB")
    (trainer,) = joined(rig)
    trainer.client.prepare(3 << 20, 2, num_ready=0)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    trainer.client.close()
    rig.hurt_keepers[0].wait()
    rig.next_incarnation()

    trainer.connect()
    trainer.client.assemble(rig.assembly())

    assert len(trainer.client.prepare(3 << 20, 2)) == 2


@pytest.mark.parametrize("put_off", sampled([False, True], True))
def test_a_restore_takes_the_slot_that_is_being_made_and_no_memory_beside_it(make_rig: MakeRig, put_off: bool) -> None:
    rig = make_rig()
    (writer,) = rig.start()
    version = writer.save(3, durable=True)
    reached([writer], version, Level.DURABLE)
    rig.incarnation = rig.storage.incarnations.register()  # what it resumes from is not known yet
    killed = psutil.Process(writer.client.welcome.pid)
    killed.kill()
    writer.client.close()
    assert not wait_ended([killed])
    rig.hurtable(0)
    rig.hurt(0, "stall@pages")
    trainer = rig.trainer(0)
    trainer.client.assemble(rig.assembly())
    trainer.client.register(trainer.layout)
    trainer.client.prepare(trainer.num_bytes, 2, num_ready=0, put_off=put_off)
    seals = {file.ref.bundle_id: file.seal for file in rig.storage.manifest(version).bundles}
    fetches = [Fetch(ref, seals[ref.bundle_id], Source.STORAGE, None) for ref in trainer.layout.bundles]

    located = in_background(lambda: trainer.client.obtain(version, fetches, timeout_s=TIMEOUT_S))
    rig.hurt(0, "")

    assert [item.source for item in located()] == [Source.STORAGE] * len(fetches)
    assert len(rig.status(0)["ranks"]["0"]["slots"]) == 2


@pytest.mark.parametrize("there", [5.5, 4.5], ids=["room", "tight"])
def test_a_slot_that_is_spare_leaves_room_for_two_more(make_rig: MakeRig, there: float) -> None:
    """What a lost node's replicas need is worth more than saves that come faster than storage."""
    rig = make_rig(memory_budget=str(int(there * (1 << 20))))
    rig.next_incarnation()
    trainer = rig.trainer(0)
    slot_bytes = (1 << 20) - 4096
    assert len(trainer.client.prepare(slot_bytes, 2)) == 2
    if there > 5:
        assert len(trainer.client.prepare(slot_bytes, 3, spare=True)) == 3
        return
    with pytest.raises(MemoryRefused, match="reserving 1 slots"):
        trainer.client.prepare(slot_bytes, 3, spare=True)
    assert len(trainer.client.prepare(slot_bytes, 3)) == 3, "which is there for who asks for it"


@pytest.mark.parametrize("what", ["prepare", "begin"])
def test_slots_of_an_answer_that_came_too_late_are_sent_again(make_rig: MakeRig, what: str) -> None:
    rig = make_rig()
    [trainer] = rig.start(prepare=False)
    client, size = trainer.client, trainer.num_bytes
    asked = functools.partial(client.prepare, size, 3, timeout_s=0.2)
    if what == "begin":
        asked = functools.partial(client.begin, trainer.version(1), size, durable=False, timeout_s=0.1)
    assert client.prepare(size, 3, num_ready=0) == ()
    eventually(lambda: "unpopulated" not in states(rig, 0))
    keeper = rig.pid_of(rig.keeper(0))
    os.kill(keeper, signal.SIGSTOP)
    eventually(lambda: psutil.Process(keeper).status() == psutil.STATUS_STOPPED)
    try:
        with pytest.raises(KeeperLost, match="did not answer"):
            asked()
    finally:
        os.kill(keeper, signal.SIGCONT)

    for step in (2, 3):
        reached([trainer], trainer.save(step), Level.CAPTURED)
    assert len(client.prepare(size, 3)) == 3


def test_a_slot_that_two_answers_bring_is_mapped_once(make_rig: MakeRig) -> None:
    [trainer] = make_rig().start()
    [slot, *_] = trainer.client.prepare(trainer.num_bytes, 2)
    again = os.dup(slot.fd)
    trainer.client._map((slot.slot_id,), [again])
    assert trainer.client.prepare(trainer.num_bytes, 2)[0] is slot
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again)


def test_a_slot_that_comes_while_an_earlier_answer_is_mapped_stays(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to `prepare` names one larger slot. Both come to saves of other threads before it is mapped."""
    [trainer] = make_rig().start()
    client, large = trainer.client, trainer.num_bytes + (8 << 20)
    populate, mapping, goes_on = memory_pages.populate, list[int](), threading.Event()

    def slowly(pages: mmap.mmap) -> None:
        populate(pages)
        mapping.append(threading.get_ident())
        if mapping[0] == threading.get_ident():
            goes_on.wait(TIMEOUT_S)

    monkeypatch.setattr(memory_pages, "populate", slowly)
    prepared = in_background(lambda: client.prepare(large, 2, num_ready=1))
    eventually(lambda: mapping)
    eventually(lambda: "unpopulated" not in states(trainer.rig, 0))
    begin = functools.partial(client.begin, durable=False, timeout_s=TIMEOUT_S)
    first, second = (in_background(functools.partial(begin, trainer.version(step), large)) for step in (1, 2))
    eventually(lambda: len(mapping) == 2)
    goes_on.set()
    assert prepared()
    assert all(slot.view[:1] == b"\0" for slot in (first(), second()))


def test_a_slot_whose_mapping_a_handler_breaks_off_is_mapped_by_who_waits_for_it(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    [trainer] = make_rig().start(prepare=False)
    client, size = trainer.client, trainer.num_bytes
    client.prepare(size, 2, num_ready=0)
    eventually(lambda: "unpopulated" not in states(trainer.rig, 0))
    populate, asked, saves = memory_pages.populate, list[bool](), threading.get_ident()

    def interrupted(pages: mmap.mmap) -> None:
        if threading.get_ident() != saves:
            return populate(pages)
        prepared.append(in_background(lambda: client.prepare(size, 2)))
        eventually(lambda: asked)
        raise TimeoutError

    def waits(number: int, timeout_s: float) -> Slot:
        asked.append(True)
        return wait(number, timeout_s)

    prepared, wait = list[Callable[[], Any]](), client._slot
    monkeypatch.setattr(client, "_slot", waits)
    monkeypatch.setattr(memory_pages, "populate", interrupted)
    with pytest.raises(TimeoutError):
        trainer.begin(1)
    began = time.monotonic()
    assert len(prepared[0]()) == 2
    assert time.monotonic() - began < TIMEOUT_S / 2
    client.abandon(trainer.version(1), "its call was interrupted")
    reached([trainer], trainer.save(2), Level.CAPTURED)


def test_an_error_of_a_handler_while_a_slot_is_mapped_leaves_no_descriptor(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    [trainer] = make_rig().start(prepare=False)
    trainer.client.prepare(trainer.num_bytes, 2, num_ready=0)

    def interrupted(_: mmap.mmap) -> None:
        raise TimeoutError

    eventually(lambda: "unpopulated" not in states(trainer.rig, 0))
    before = psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(memory_pages, "populate", interrupted)
        with pytest.raises(TimeoutError):
            trainer.begin(1)
    assert psutil.Process().num_fds() == before
    trainer.client.abandon(trainer.version(1), "its call was interrupted")
    reached([trainer], trainer.save(2), Level.CAPTURED)


def test_slots_that_are_handed_over_twice_are_adopted_once(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next keeper freezes in between. Two numbers for one memory would be two versions in it."""
    rig = make_rig()
    [trainer] = rig.start()
    for step in (1, 2):
        reached([trainer], trainer.save(step), Level.CAPTURED)
    os.kill(trainer.client.welcome.pid, signal.SIGKILL)
    eventually(lambda: not trainer.client.alive)
    slots, assembly = trainer.client.detach(), rig.assembly()

    def meet() -> None:
        trainer.connect()
        trainer.client.assemble(assembly)
        trainer.client.register(trainer.layout)

    meet()
    keeper = trainer.client.welcome.pid
    os.kill(keeper, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(slot_memory, "patience_s", lambda _: 0.2)
            with pytest.raises(KeeperLost, match="did not answer"):
                trainer.client.adopt(slots)
    finally:
        os.kill(keeper, signal.SIGCONT)
    eventually(lambda: states(rig, 0) == ["sealed", "sealed"])
    trainer.client.close()
    meet()
    trainer.client.adopt(slots)
    trainer.client.resume(1, None)
    assert states(rig, 0) == ["sealed", "sealed"]
    assert [slot.slot_id for slot in slots] == [1, 2]
    assert trainer.client.prepare(trainer.num_bytes, 2) == slots
    reached([trainer], trainer.save(3), Level.CAPTURED)
