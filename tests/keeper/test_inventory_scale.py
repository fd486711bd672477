"""What the keepers of a large job hold is told in one message, whole, and each rank reads what is nearest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.base.errors import AnswerTooLong, KeeperError, KeeperLost
from holdfast.checkpoint.restore import version_vote
from holdfast.checkpoint.restore.version_vote import Verdict
from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, Seal, Version
from holdfast.core.rank_runs import spread
from holdfast.core.recovery.version_choice import Choice, Facts, Source, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.replication.replicator import to_refill
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.messages import Assembly, Held, Inventory, InventoryReply
from holdfast.keeper.service import peer_requests
from holdfast.keeper.service.peer_requests import PeerRequests
from holdfast.keeper.slots import node_report
from holdfast.tiers.wire import frames
from keeper.rig import TIMEOUT_S
from kit.large_jobs import PER_NODE, state_of, topology

NODES = 128
WORLD = NODES * PER_NODE
WHERE = topology(WORLD)
V = Version(1, 4)
NOTHING = Inventory((), (), (), (), (0,))
# An inventory takes no more than a quarter of what a message may have.
ROOM = frames.MAX_FRAME_BYTES // 4


def image(ref: BundleRef) -> Any:
    return SimpleNamespace(ref=ref, seal=Seal(ref.bundle_id, 4 << 20, f"{ref.bundle_id:>32.32}", ("of a chunk",)))


def twins() -> tuple[BundleRef, ...]:
    """What all ranks hold: 4 GB."""
    shards = state_of(4 * 10**9, WORLD)
    found = bundles.plan_bundles(shards, values_of=[shards[0].ranks], topology=WHERE)
    return bundles.rank_layout(found, 0, WHERE).bundles


TWINS = twins()
# What each rank holds alone, as the part of an optimizer that is sharded.
ALONE = tuple(BundleRef(f"g{rank}x1-{rank:012x}-0", (rank,), 0, 1, 1 << 20, "f") for rank in range(WORLD))
TABLE = (*TWINS, *ALONE)
SHARED = [
    {ref.bundle_id: image(ref) for ref in TWINS if ref.index * PER_NODE // ref.count == local}
    for local in range(PER_NODE)
]


def told(node: int, *, bad: str = "") -> Inventory:
    """What a keeper tells of itself, as it comes over the wire; `bad` is a bundle whose copies it took out of use."""
    slots = [
        SimpleNamespace(
            version=V, rank=rank, replica=False, preloaded=False, parity=None, condemned={bad},
            images={**SHARED[rank % PER_NODE], ALONE[rank].bundle_id: image(ALONE[rank])},
        )
        for rank in range(node * PER_NODE, (node + 1) * PER_NODE)
    ]  # fmt: skip
    past = SimpleNamespace(tables={V: TABLE}, suspects={}, levels={})
    pool = SimpleNamespace(sealed=lambda: slots)
    state: Any = SimpleNamespace(lock=threading.Lock(), node=node, past=past, slot_pool=pool)
    return over_the_wire(node_report.inventory(state))


def over_the_wire(inventory: Inventory) -> Inventory:
    body = messages.encode(InventoryReply(id=1, inventory=inventory))
    assert len(body) <= ROOM
    reply = messages.decode(body)
    assert isinstance(reply, InventoryReply)
    return reply.inventory


def chosen(found: Inventory) -> tuple[Choice, Facts]:
    """The version that rank 0 chooses, as every rank hears of it."""
    facts = Facts(found.copies, found.tables, {}, Lineage(), WHERE)
    choice = choose_version(facts).value
    assert isinstance(choice, Choice)
    body = version_vote.encode(Verdict(choice, "", exists=True))
    assert len(body) <= ROOM
    heard = version_vote.decode(body).choice
    assert heard == choice
    return choice, facts


def test_every_copy_of_a_large_job_is_told_and_each_rank_reads_the_nearest() -> None:
    """From some 80 nodes on, of 8 ranks that hold the same, no message had room for it, and there was no restore."""
    bad, condemning = TWINS[3].bundle_id, 5
    others = {node: told(node, bad=bad if node == condemning else "") for node in range(1, NODES)}

    found = over_the_wire(peer_requests._merge(0, told(0), {**others}))

    held: dict[str, set[int]] = {}
    for copy in found.copies:
        assert copy.seal.digest == f"{copy.seal.bundle_id:>32.32}"
        assert not held.setdefault(copy.seal.bundle_id, set()).intersection(spread(copy.nodes))
        held[copy.seal.bundle_id].update(spread(copy.nodes))
    assert held == {
        **{ref.bundle_id: set(range(NODES)) for ref in TWINS},
        **{ref.bundle_id: {rank // PER_NODE} for rank, ref in enumerate(ALONE)},
        bad: set(range(NODES)) - {condemning},
    }
    choice, facts = chosen(found)
    for rank in (0, condemning * PER_NODE, WORLD - 1):
        sources = {fetch.ref.bundle_id: (fetch.source, fetch.node) for fetch in fetches(choice, rank, facts)}
        home = rank // PER_NODE
        wanted = {
            ref.bundle_id: (Source.SLOT if ref.index * PER_NODE // ref.count == rank % PER_NODE else Source.NODE, home)
            for ref in TWINS
        } | {ALONE[rank].bundle_id: (Source.SLOT, home)}
        assert sources == wanted | ({bad: (Source.PEER, condemning + 1)} if home == condemning else {})


def test_a_node_of_a_large_job_that_lost_its_memory_reads_from_the_next_one() -> None:
    gone, following = 9, 10
    others: dict[int, Any] = {node: told(node) for node in range(1, NODES)}
    replicas = [image(ref).seal for ref in ALONE[gone * PER_NODE : (gone + 1) * PER_NODE]]
    row = Held(V, (), (), preloaded=False, seals=bytes(messages.pack(replicas)))
    others |= {
        gone: KeeperLost("no answer"),
        following: replace(others[following], held=(*others[following].held, row)),
    }

    found = over_the_wire(peer_requests._merge(0, told(0), others))

    choice, facts = chosen(found)
    rank = gone * PER_NODE
    reads = {fetch.ref.bundle_id: (fetch.source, fetch.node) for fetch in fetches(choice, rank, facts)}
    assert reads == {ref.bundle_id: (Source.PEER, following) for ref in (*TWINS, ALONE[rank])}
    # What one node alone has gets a second copy where it belongs; of twins there are enough.
    assert to_refill(V, TABLE, found.copies, WHERE, 1) == {0: {rank: [ALONE[rank]] for rank in range(PER_NODE)}}


def survey(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], InventoryReply]) -> Inventory:
    """What node 0 finds out, where `call` answers for the others."""
    monkeypatch.setattr(peer_requests, "inventory", lambda _: NOTHING)
    monkeypatch.setattr(PeerRequests, "_call", lambda _, index, *__: call(index))
    return PeerRequests(*[SimpleNamespace()] * 4).survey(Assembly(1, "/ck", "job", WHERE, ("",) * NODES), 0)  # type: ignore[arg-type]


def test_silent_keepers_hold_up_none_of_those_that_are_asked_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked 32 at a time: each of a few lost nodes cost seconds, and who asked waits ten."""
    silent, asked, all_asked = {1, 40, 80, 120}, [], threading.Event()

    def call(index: int) -> InventoryReply:
        if index in silent:
            raise KeeperLost("no answer" if all_asked.wait(2) else "the others were not asked")
        asked.append(index)
        if len(asked) == NODES - 1 - len(silent):
            all_asked.set()
        return InventoryReply(inventory=NOTHING)

    found = survey(monkeypatch, call)

    assert found.silent == tuple((index, "no answer") for index in sorted(silent))
    assert len(found.reachable) == NODES - len(silent)


def test_a_keeper_that_cannot_tell_all_it_holds_is_not_taken_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted among those that say no, so that an older version could be chosen without a wait."""

    def call(index: int) -> InventoryReply:
        if index == NODES // 2:
            messages.raise_refusal(messages.refusal(1, AnswerTooLong("more than a message holds")))
        return InventoryReply(inventory=NOTHING)

    with pytest.raises(AnswerTooLong, match="more than a message holds"):
        survey(monkeypatch, call)


def test_who_is_not_reached_in_time_is_told_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_requests, "SURVEY_TIMEOUT_S", 0.1)
    over = threading.Event()
    asked: list[int] = []

    def call(index: int) -> InventoryReply:
        asked.append(index)
        assert over.wait(TIMEOUT_S), "the survey waits for who is silent"
        raise KeeperLost("no answer")

    found = survey(monkeypatch, call)
    threads = [thread for thread in threading.enumerate() if thread.name == peer_requests.SURVEY]
    over.set()

    assert len(threads) == peer_requests.MAX_AT_ONCE
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(asked) == len(threads), "somebody was asked when the answer was given"
    assert found.unheard == tuple(range(1, NODES))


@pytest.mark.parametrize("wrong", [{"seals": b"no seals"}, {"nodes": [[0, 1 << 40, 1]]}], ids=["seals", "nodes"])
def test_what_is_no_inventory_is_refused(wrong: dict[str, Any]) -> None:
    row = Held(V, ((0, 0, 1),), (), preloaded=False, seals=bytes(messages.pack(())))
    raw = msgspec.msgpack.decode(messages.encode(InventoryReply(inventory=Inventory((row,), (), (), (), (0,)))))
    raw["inventory"]["held"][0] |= wrong
    with pytest.raises(KeeperError, match="not a message of this protocol"):
        _ = messages.decode(msgspec.msgpack.encode(raw)).inventory.copies
