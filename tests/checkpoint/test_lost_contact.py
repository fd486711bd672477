"""A keeper that cannot reach that of the first node is noticed when that lasts, and only by who sees nothing captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import KeeperLost
from holdfast.checkpoint.checkpointer.storage_fallback import StorageFallback
from holdfast.checkpoint.job import lost_contact
from holdfast.checkpoint.job.keeper_link import SILENT_S
from holdfast.checkpoint.job.lost_contact import ASK_EVERY_S, LostContact
from holdfast.checkpoint.save.storage_saver import DirectSaver
from holdfast.core.model import Level
from holdfast.core.scheduling import storage_only_steps
from holdfast.keeper.rpc.client import KeeperClient
from kit.checkpointers import Make, Trainee


class Link:
    """A tie to a keeper that says who coordinates."""

    def __init__(self) -> None:
        self.leader, self.asked, self.now_s, self.silent = 0, 0, 1000.0, False
        self.client = SimpleNamespace(status=self.status)

    def status(self, *, timeout_s: float) -> dict[str, Any]:
        assert timeout_s <= 1.0
        self.asked += 1
        if self.leader == -2:
            raise KeeperLost("it does not answer")
        return {"coordinator": self.leader, "index": 1, "nodes": ["east", "west"]}


def seen(link: Link, contact: LostContact, seconds: float, step_s: float = 0.1) -> str:
    why = ""
    until_s = link.now_s + seconds
    while link.now_s < until_s:
        link.now_s += step_s
        why = contact.why
    return why


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def contact(link: Link) -> LostContact:
    return LostContact(link, lambda: link.now_s)  # type: ignore[arg-type]


def test_who_follows_the_first_node_is_not_cut_off_and_is_asked_once_a_second(link: Link, contact: LostContact) -> None:
    assert not seen(link, contact, 60)
    assert link.asked <= 60 / ASK_EVERY_S + 1


def test_who_coordinates_itself_for_a_while_is_cut_off(link: Link, contact: LostContact) -> None:
    link.leader = 1
    assert not seen(link, contact, SILENT_S - 0.5), "a keeper that died is replaced"
    assert "the keeper of west has not reached that of east" in seen(link, contact, 2)
    assert contact.lasts()
    link.leader = 0
    assert not seen(link, contact, 2)
    assert not contact.lasts()


@pytest.mark.parametrize("between", [0, -1, -2])
def test_what_does_not_last_or_is_not_known_is_no_cut(link: Link, contact: LostContact, between: int) -> None:
    link.leader = between
    assert not seen(link, contact, 60)
    for _ in range(10):
        link.leader = 1
        assert not seen(link, contact, SILENT_S - 2)
        link.leader = 0
        assert not seen(link, contact, 2)


def test_of_long_steps_each_asks(link: Link, contact: LostContact) -> None:
    link.leader = 1
    assert not seen(link, contact, 60, 60)
    link.leader = 0
    assert not seen(link, contact, 60, 60)
    link.leader = 1
    assert not seen(link, contact, 60, 60)
    assert seen(link, contact, 60, 60)


def test_a_keeper_that_does_not_answer_holds_few_steps_up(link: Link, contact: LostContact) -> None:
    link.leader = -2
    assert not seen(link, contact, 60)
    assert link.asked <= 60 / SILENT_S + 1


def test_a_keeper_that_stops_to_answer_is_not_known_to_be_cut_off(link: Link, contact: LostContact) -> None:
    link.leader = 1
    assert not seen(link, contact, 2)
    link.leader = -2
    assert not seen(link, contact, 60)


def test_what_was_long_ago_does_not_count(link: Link, contact: LostContact) -> None:
    link.leader = 1
    assert not seen(link, contact, 2)
    contact.forget()  # versions became captured meanwhile
    link.now_s += SILENT_S
    assert not seen(link, contact, SILENT_S - 2)


def test_a_silent_keeper_is_not_asked(link: Link, contact: LostContact) -> None:
    link.leader, link.silent = 1, True
    assert not seen(link, contact, 60)
    assert not link.asked


def test_who_is_cut_off_saves_to_storage_and_comes_back_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"coordinator": 1, "index": 1, "nodes": ["east", "west"]}
    monkeypatch.setattr(KeeperClient, "status", lambda _, **__: told)
    monkeypatch.setattr(StorageFallback, "_is_unsure", lambda *_: True)
    monkeypatch.setattr(storage_only_steps, "MAX_GAP_S", 0.0)
    monkeypatch.setattr(lost_contact, "SILENT_S", 0.0)
    trainee, names = Trainee(), list[str]()
    checkpointer = make(trainee, every=1, durable_every=1)
    checkpointer.events.subscribe(lambda event: names.append(event.name))
    checkpointer.restore()
    run = checkpointer._run
    assert run is not None
    for step in range(6):
        trainee.train()
        handle = checkpointer.step(step)
    assert isinstance(run.saver, DirectSaver)
    assert "the keeper of west has not reached that of east" in run.saver._reason
    assert handle is not None
    assert handle.reached is Level.DURABLE
    assert "memory_level_back" not in names
    told["coordinator"] = 0
    for step in range(6, 10):
        trainee.train()
        handle = checkpointer.step(step)
    assert run.saver.memory is not None
    assert handle is not None
    assert handle.wait("captured", 60) >= Level.CAPTURED
