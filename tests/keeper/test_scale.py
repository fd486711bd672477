"""Jobs of very many ranks: messages stay small, what all are told is encoded once."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.base.errors import AnswerTooLong, KeeperError
from holdfast.cli import running_job
from holdfast.core.layout import bundles
from holdfast.core.model import BundleRef, Level, RankLayout, Seal, Version
from holdfast.core.rank_runs import spread
from holdfast.core.versions.bundle_table import new_table
from holdfast.core.versions.coordinator_board import Announcement, Board, Kind
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger, Reports
from holdfast.core.versions.slot_guard import SlotView
from holdfast.keeper.coordination.coordinator import Coordinator
from holdfast.keeper.observe import describe_job
from holdfast.keeper.rpc import messages, server
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.messages import (
    VIEWER,
    AskStatus,
    Assembly,
    Hello,
    News,
    Ok,
    Ping,
    Register,
    Report,
    StatusReply,
    Welcome,
)
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.frames import Channel
from keeper.rig import TIMEOUT_S, Rig, eventually, reached
from kit.large_jobs import PER_NODE, WORLD, state_of, topology

V = Version(1, 3)
NUM_CONNECTIONS = 4096


def layout_of(num_bytes: int) -> RankLayout:
    shards = state_of(num_bytes)
    found = bundles.plan_bundles(shards, values_of=[shards[0].ranks], topology=topology())
    return bundles.rank_layout(found, PER_NODE, topology())


@pytest.mark.parametrize("num_bytes", [2 * 10**9, 14 * 10**9])
def test_a_rank_of_a_group_of_16384_registers_with_less_than_a_mebibyte(num_bytes: int) -> None:
    """4,096 ranks took 41 MiB, and a frame has 16."""
    layout = layout_of(num_bytes)
    body = messages.encode(Register(id=1, layout=layout))

    assert len(body) <= 1 << 20
    decoded = messages.decode(body)
    assert isinstance(decoded, Register)
    assert decoded.layout == layout
    assert decoded.layout.bundles[0].ranks == tuple(range(WORLD))


def test_4096_keepers_are_served_by_few_threads(make_rig: Callable[..., Rig]) -> None:
    """The coordinator's keeper turned the 1,025th away, and had two threads for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_CONNECTIONS + 512
    if hard < wanted:
        pytest.skip(f"this process may have {hard} descriptors, and needs {wanted}")
    rig = make_rig()
    (trainer,) = rig.start()
    place, pid = rig.keeper(0), trainer.client.welcome.pid
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    channels: list[Channel] = []
    try:
        for node in range(NUM_CONNECTIONS):
            channels.append(frames.connect(place.address, timeout_s=TIMEOUT_S))
            hello = Hello(job=place.job, role=VIEWER, node=node)
            channels[-1].send(messages.encode(hello), timeout_s=TIMEOUT_S)
            assert isinstance(messages.decode(channels[-1].receive(timeout_s=TIMEOUT_S)[0]), Welcome)

        assert len(os.listdir(f"/proc/{pid}/task")) < 64
        for channel in (channels[0], channels[-1]):
            channel.send(messages.encode(AskStatus(id=7)), timeout_s=TIMEOUT_S)
            assert isinstance(messages.decode(channel.receive(timeout_s=TIMEOUT_S)[0]), StatusReply)
        reached([trainer], trainer.save(1), Level.CAPTURED)
        assert len(os.listdir(f"/proc/{pid}/task")) < 64
    finally:
        for channel in channels:
            channel.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 64)


def test_requests_that_wait_hold_up_nobody_else(make_rig: Callable[..., Rig]) -> None:
    """More of them at once than there are threads: each asks a node that is frozen."""
    rig = make_rig(num_nodes=2)
    frozen = rig.start()[1].client.welcome.pid
    place = rig.keeper(0)
    os.kill(frozen, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        viewers = [KeeperClient.connect(place.socket, job=place.job) for _ in range(server.MAX_THREADS + 8)]
        for viewer in viewers:
            stack.callback(viewer.close)
        threads = [threading.Thread(target=viewer.inventory) for viewer in viewers[1:]]
        for thread in threads:
            thread.start()

        assert viewers[0].status(timeout_s=TIMEOUT_S)["pid"] == viewers[0].welcome.pid

        assert any(thread.is_alive() for thread in threads), "they were answered before it was asked"
        for thread in threads:
            thread.join(TIMEOUT_S)


def test_runs_that_are_no_group_are_refused_when_they_come() -> None:
    raw = msgspec.msgpack.decode(messages.encode(Register(id=1, layout=layout_of(2 * 10**9))))
    raw["layout"]["bundles"][0]["runs"] = [[0, 1 << 40, 1]]
    with pytest.raises(KeeperError):
        messages.decode(msgspec.msgpack.encode(raw))


def test_a_table_is_encoded_once_for_all_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    where = topology(64)
    refs = layout_of(2 * 10**9).bundles[:64]
    heard: list[News] = []
    sent: dict[int, list[bytes]] = {}
    state = SimpleNamespace(hear=heard.append, ledger=None)
    assembly = Assembly(1, "/ck", "job", where, ())
    coordinator = Coordinator(state, SimpleNamespace(), assembly)
    coordinator._board._tables["L"] = new_table({ref.bundle_id: ref for ref in refs}, topology())
    packed: list[object] = []
    pack = messages.pack
    monkeypatch.setattr(
        "holdfast.keeper.coordination.coordinator.pack", lambda value: packed.append(value) or pack(value)
    )
    for node in range(8):
        coordinator.join(node, SimpleNamespace(send_encoded=sent.setdefault(node, []).append))

    coordinator._announce(Announcement(Kind.CAPTURED, V, "all sealed", layout="L"))
    coordinator.join(8, SimpleNamespace(send_encoded=sent.setdefault(8, []).append))

    assert len({id(bodies[0]) for node, bodies in sent.items() if node < 8}) == 1
    assert len(packed) == 1
    for bodies in sent.values():
        (news,) = [messages.decode(body) for body in bodies]
        assert isinstance(news, News)
        assert news.table == heard[0].table == tuple(sorted(refs, key=lambda ref: ref.bundle_id))


def test_an_answer_that_no_frame_holds_is_refused_and_the_line_stays(tmp_path: Path) -> None:
    """The connection broke, and with it a restore: whoever asked heard that the keeper was lost."""
    status = messages.pack("s" * (frames.MAX_FRAME_BYTES + 1))
    handler: Any = SimpleNamespace(
        greet=lambda connection, hello: setattr(connection, "hello", hello) or Welcome(node="n0", pid=1, incarnation=1),
        handle=lambda _, message, __: (
            StatusReply(id=message.id, status=status) if isinstance(message, AskStatus) else Ok(id=message.id)
        ),
        gone=lambda _: None,
        tick=lambda: 1.0,
    )
    keeper = server.Server(tmp_path / "s", handler)
    thread = threading.Thread(target=keeper.serve)
    thread.start()
    try:
        with contextlib.closing(KeeperClient.connect(tmp_path / "s", job="j")) as client:
            with pytest.raises(AnswerTooLong, match="StatusReply") as caught:
                client.status(timeout_s=TIMEOUT_S)
            assert caught.value.where
            assert caught.value.remedy
            assert client._ask(Ping(), Ok) == Ok(id=2)
    finally:
        keeper.stop()
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("is_twins", [True, False], ids=["twins", "each its own"])
def test_all_that_a_node_of_1024_knows_is_told_in_a_fraction_of_a_message(is_twins: bool) -> None:
    """It had 35 MB with 40 versions behind each other, and 1,024 nodes: no new coordinator ever heard of it."""
    num_nodes = 1024
    where = topology(num_nodes * PER_NODE)
    everybody = tuple(range(where.world_size))
    table = tuple(
        BundleRef(
            f"g{0 if is_twins else n}-{n:012x}-{n}", everybody if is_twins else (n,), n, 2048, 1 << 20, f"{n:032}"
        )
        for n in range(2048 if is_twins else where.world_size)
    )
    ledger = NodeLedger(node=0, topology=where, incarnation=1, lineage=Lineage())
    ledger.resume(None)
    for rank in range(PER_NODE):
        own = (
            tuple(ref.bundle_id for ref in table[rank * 256 : rank * 256 + 256])
            if is_twins
            else (table[rank].bundle_id,)
        )
        ledger.register(RankLayout(rank, table if is_twins else (table[rank],), own))
    ledger.tables.learn("L", table)
    layouts = ledger.reports().layouts
    for step in range(40):
        version = Version(1, step)
        for layout in layouts:
            assert ledger.begin(layout.rank, version, [SlotView(0)]).value == 0
            ledger.seal(layout.rank, version, [Seal(name, 1, "0" * 32) for name in layout.captures], durable=True)
        ledger.told(Announcement(Kind.CAPTURED, version, "all sealed it", layout="L"))
        ledger.told(Announcement(Kind.PERSIST, version, "due"))

    facts = ledger.reports()
    body = messages.encode(Report.of(0, 1, facts, whole=True))

    assert len(body) <= frames.MAX_FRAME_BYTES // 12
    decoded = messages.decode(body)
    assert isinstance(decoded, Report)
    assert decoded.facts == facts
    assert len({id(layout.bundles) for layout in decoded.facts.layouts}) == (1 if is_twins else PER_NODE)


def test_reports_of_further_twins_cost_a_coordinator_next_to_nothing() -> None:
    """With 512 nodes it had work for 18 s, under its lock, and whoever reports waits 3 s for the answer."""
    refs = layout_of(14 * 10**9).bundles
    board, seconds, lists = Board(topology()), [], set()
    for node in range(33):
        layouts = tuple(
            RankLayout(node * PER_NODE + n, refs, tuple(ref.bundle_id for ref in refs[n::PER_NODE]))
            for n in range(PER_NODE)
        )
        body = messages.encode(Report.of(node, 1, Reports(layouts=layouts), whole=True))
        began = time.thread_time()
        decoded = messages.decode(body)
        assert isinstance(decoded, Report)
        for layout in decoded.facts.layouts:
            board.register(layout)
            lists.add(id(layout.bundles))
        seconds.append(time.thread_time() - began)
    assert len(lists) == 1
    assert sum(seconds[1:]) < 10 * seconds[0]  # about 2; what is looked into for each node takes 40 and more


def test_what_a_job_of_1024_nodes_is_made_of_is_told_with_its_groups_as_runs() -> None:
    """4,096 bundles of 8,192 ranks each were 100 MB."""
    layout = layout_of(14 * 10**9)
    state: Any = SimpleNamespace(
        lock=threading.Lock(), assembly=Assembly(1, "/ck", "job", topology(), ("a",) * (WORLD // PER_NODE)),
        incarnation=1, layouts={0: layout}, ledger=None, slot_pool=(),
    )  # fmt: skip
    body = messages.encode(messages.InsideReply(id=1, inside=messages.pack(describe_job.describe(state))))
    assert len(body) <= frames.MAX_FRAME_BYTES // 4
    reply = messages.decode(body)
    assert isinstance(reply, messages.InsideReply)
    told = msgspec.msgpack.decode(reply.inside, type=running_job._Inside)
    assert [(one.bundle, spread(one.runs)) for one in told.bundles] == [(b.bundle_id, b.ranks) for b in layout.bundles]
