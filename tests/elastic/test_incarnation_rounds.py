"""How the agents of a job go from one incarnation to the next: real stores, each agent with a client of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore

from holdfast.core.elastic.lost_node import Sign
from holdfast.elastic.launch.agent import Agent
from holdfast.elastic.launch.rendezvous import incarnation_rounds
from holdfast.elastic.launch.rendezvous.incarnation_rounds import BEAT_S, Round, RoundAbandoned, RoundOver
from holdfast.elastic.processes.worker_processes import WorkerStatus
from sample_kit import MORE

Make = Callable[[int], list[Round]]


@pytest.fixture
def agents() -> Make:
    """So many agents of one round."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(size: int) -> list[Round]:
        stores = [TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False) for _ in range(size)]
        return [
            Round(store, rank=rank, size=size, address="here", ranks=range(3 * rank, 3 * rank + 2))
            for rank, store in enumerate(stores)
        ]

    return make


def opened(agents: list[Round], *recoveries: int) -> None:
    """All have the first incarnation."""
    with ThreadPoolExecutor(len(agents)) as pool:
        found = list(pool.map(lambda agent, number: agent.open(number, str), agents, recoveries))
    assert len(set(found)) == 1, "every agent starts its workers with the same"
    assert found[0].recoveries == max(recoveries), "a new node knows of none"


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_anybody_asks_one_publishes_and_the_store_of_before_is_gone(agents: Make) -> None:
    leader, other = agents(2)
    opened([leader, other], 0, 4)
    first = leader.newest()
    assert first is not None
    assert answers(first.port)
    other.propose(2, "rank 3 died", older=True)
    leader.propose(2, "rank 0 was told that its group broke")
    assert leader.wanted(2)
    assert other.newest() == first, "nobody but the leader grants it"
    second = leader.newest()
    assert second is not None
    assert other.newest() == second == leader.newest(), "it is granted once"
    assert (second.number, second.recoveries, second.reason, second.older) == (2, 5, "rank 3 died", True)
    assert answers(second.port)
    assert not answers(first.port), "late writes of the incarnation before must not reach anybody"


@pytest.mark.parametrize("others", ["i000001-s0000000004", ""], ids=["at the start", "in the middle of the run"])
def test_a_named_version_is_for_the_start_of_all_and_not_for_who_joins_later(agents: Make, others: str) -> None:
    """A replaced node is started with the command of before, and may lead: the others went back to it long ago."""
    leader, other = agents(2)
    leader.version, other.version = "i000001-s0000000004", others
    opened([leader, other], 0, 3)
    first = leader.newest()
    assert first is not None
    assert first.version == others
    other.propose(2, "rank 3 died before it came back")
    second = leader.newest()
    assert second is not None
    assert second.version == others, "until somebody came back with it"
    leader.version = ""
    other.propose(3, "rank 3 died")
    third = leader.newest()
    assert third is not None
    assert third.version == ""


def test_who_has_finished_waits_for_all(agents: Make) -> None:
    one, two, three = agents(3)
    for agent in (one, one, two):
        agent.finish(1)
        assert not agent.all_finished(1)
    three.finish(2)
    assert not three.all_finished(1), "that was another incarnation"
    three.finish(1)
    assert [agent.all_finished(1) for agent in (one, two, three)] == [True] * 3


def test_the_first_word_ends_the_round_for_all(agents: Make) -> None:
    one, two = agents(2)
    assert one.over() is two.over() is None
    one.end(RoundOver("stop", "first"))
    two.end(RoundOver("restart", "second"))
    assert one.over() == two.over() == RoundOver("stop", "first")


@MORE
@pytest.mark.parametrize(("silent", "told"), [(0, [{0: 5.0}, {0: 5.0}]), (2, [{2: 5.0}, {}])])
def test_an_agent_that_gives_no_sign_of_life_is_missed(silent: int, told: list[dict[int, float]], agents: Make) -> None:
    """The leader looks at all, the others at the leader."""
    of_all = agents(3)
    living = [agent for rank, agent in enumerate(of_all) if rank != silent]

    def looks(second: float) -> list[dict[int, float]]:
        return [agent.heartbeats.beat(100.0 + second * BEAT_S) for agent in living]

    assert looks(0) == [{}, {}], "who never gave a sign is not missed"
    for second in range(1, 8):
        of_all[silent].heartbeats.beat(100.0 + second * BEAT_S)
        assert looks(second) == [{}, {}]
    assert [looks(8), looks(9)] == [[{}, {}]] * 2, "it is given its time"
    assert [looks(second) for second in (10, 11, 12)][-1] == told
    assert looks(12.5)[0] == {silent: 5.5}, "also between two beats"
    assert [agent.heartbeats.is_one_missed(112.5) for agent in living] == [True, True], "the leader tells the others"
    of_all[silent].heartbeats.beat(113.0)
    assert looks(13) == [{}, {}]
    looks(14)
    assert [agent.heartbeats.is_one_missed(114.0) for agent in living] == [False, False]


def test_who_says_that_all_of_his_ranks_stand_is_believed_while_his_beats_are_new(agents: Make) -> None:
    one, two = agents(2)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda agent: agent.open(0, str), (one, two)))
    for second, stuck, told in ((0, False, []), (1, True, [3, 4]), (2, False, []), (3, True, [3, 4])):
        two.heartbeats.beat(100.0 + second * BEAT_S, stuck=stuck)
        one.heartbeats.beat(100.0 + second * BEAT_S)
        assert one.heartbeats.stuck_elsewhere(100.0 + second * BEAT_S) == told
    assert two.heartbeats.stuck_elsewhere(103.0) == [], "the other never said so"
    assert one.heartbeats.stuck_elsewhere(103.0 + 2 * BEAT_S) == [3, 4]
    assert one.heartbeats.stuck_elsewhere(103.1 + 2 * BEAT_S) == [], "nothing new was heard"


def test_everybody_knows_whose_ranks_an_agent_has(agents: Make) -> None:
    one, two = agents(2)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda agent: agent.open(0, str), (one, two)))
    assert one.ranks_of(1) == two.ranks_of(1) == (3, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_one_that_is_gone_meets_again_instead(
    agents: Make, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 met the others and died before its first word: the leader waits for it, and rank 1 for the leader."""
    monkeypatch.setattr(incarnation_rounds, "LOOK_S", 0.05)
    asked: list[int] = []

    def apart() -> str:
        asked.append(1)
        return "1 of 3 launchers that met is gone" if len(asked) > 1 else ""

    with pytest.raises(RoundAbandoned, match="is gone"):
        agents(3)[rank].open(0, apart)
    assert len(asked) == 2, "as soon as it is known, and not before"
    assert issubclass(RoundAbandoned, DistError), "whoever moves with the store knows it"


def test_hung_ranks_are_awaited_until_every_other_agent_has_no_rank_that_saves(agents: Make) -> None:
    first, second, third = agents(3)
    opened([first, second, third], 0, 0, 0)
    second.spend()
    assert not second.all_spent(()), "two agents did not say that theirs have ended or hang"
    third.spend()
    assert not second.all_spent({2}), "the first may save still"
    assert second.all_spent({0}), "the first is gone"
    first.spend()
    assert [agent.all_spent(()) for agent in (first, second, third)] == [True] * 3


def test_launchers_that_share_a_name_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without a label all launchers of one host have its name: none keeps a version in the memory of another one."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False) for _ in range(3)]
    names = ("host", "host", "other")
    rounds = [
        Round(store, rank=rank, size=3, address="here", node=names[rank], ranks=(rank,))
        for rank, store in enumerate(stores)
    ]
    opened(rounds, 0, 0, 0)
    slot: Any = SimpleNamespace(order=1)
    for name, round_ in zip(names, rounds, strict=True):
        agent: Any = object.__new__(Agent)
        agent._rules, agent._has_told_of_namesakes = SimpleNamespace(node=name), False
        agent._num_namesakes, agent._watch, agent._jobs = round_.namesakes(), None, {}
        caplog.clear()
        agent._note_state(slot, {"op": "started", "number": 1})
        assert not caplog.records, "a script that saves nothing has nothing in memory to lose"
        for number in (1, 2):
            agent._note_state(slot, {"op": "works on", "number": number, "root": "/c", "job": "j"})
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (name == "host")
        assert all("2 launchers" in text and "node name, host:" in text and "--node-label" in text for text in told)


def test_an_incarnation_without_a_store_is_granted_later(agents: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has no descriptor for a moment: no job ends by that."""
    leader, other = agents(2)
    opened([leader, other], 0, 0)
    other.propose(2, "rank 3 died")

    def none() -> TCPStore:
        raise DistError("Too many open files")

    monkeypatch.setattr(incarnation_rounds, "_workers_store", none)
    assert [leader.newest().number, other.newest().number] == [1, 1]
    monkeypatch.undo()
    assert leader.newest().number == 2


def missing(round_: Round, *, holds: bool = False, finished: bool = False, gone: Sequence[int] = ()) -> Any:
    """An agent of one worker, to which other launchers are proven gone."""
    agent: Any = object.__new__(Agent)
    status = WorkerStatus.HOLDS if holds else WorkerStatus.FINISHED if finished else WorkerStatus.RUNS
    agent._workers = SimpleNamespace(worker_slots={0: SimpleNamespace(status=status, order=1)})
    agent._round, agent._serial, agent._current = round_, 1, SimpleNamespace(number=1)
    agent._meeting = SimpleNamespace(links=SimpleNamespace(gone=lambda: dict.fromkeys(gone, "it has ended")))
    return agent


def test_a_failure_that_a_dead_leader_does_not_answer_shows_that_it_is_lost(agents: Make) -> None:
    leader, other, third = agents(3)
    opened([leader, other, third], 0, 0, 0)
    assert missing(other, gone=[0])._sign_of_loss({}) is None, "steps go on"
    assert missing(other, holds=True)._sign_of_loss({}) is Sign.BROKEN
    third.propose(2, "rank 6 ended")
    assert missing(other)._sign_of_loss({2: 9.0}) is None, "the leader will answer"
    assert missing(leader)._sign_of_loss({2: 9.0}) is None
    assert missing(other, gone=[0])._sign_of_loss({}) is Sign.UNANSWERED
    assert missing(other)._sign_of_loss({0: 9.0}) is Sign.UNANSWERED


def test_who_has_finished_misses_those_that_have_not(agents: Make) -> None:
    first, second = agents(2)
    opened([first, second], 0, 0)
    assert missing(first, finished=True)._sign_of_loss({}) is Sign.AWAITED
    second.finish(1)
    assert missing(first, finished=True, gone=[1])._sign_of_loss({}) is None, "it has finished, and left"


def test_a_launcher_that_went_when_its_ranks_had_finished_is_not_missed(agents: Make) -> None:
    first, second, third = agents(3)
    opened([first, second, third], 0, 0, 0)
    second.finish(1)
    agent = missing(first, finished=True, gone=[1])
    agent._node_lost = lambda _now, node, *_: node
    assert agent._look_for_lost(0.0, {}) is None, "the third is at work"
    agent._meeting.links.gone = lambda: {1: "it has ended", 2: "it has ended"}
    assert agent._look_for_lost(0.0, {}) == 2
    third.finish(1)
    assert agent._look_for_lost(0.0, {}) is None
