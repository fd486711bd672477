"""Jobs of very many ranks: messages stay small, what all are told is encoded once."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from core.test_ranks import PER_NODE, WORLD, state_of, topology
from holdfast.base.errors import KeeperError
from holdfast.core import bundles
from holdfast.core.commit import Announcement, Kind
from holdfast.core.model import RankLayout, Version
from holdfast.core.tables import new_table
from holdfast.node import messages
from holdfast.node.coordinate import Coordinator
from holdfast.node.messages import Assembly, News, Register

V = Version(1, 3)


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
    state = SimpleNamespace(hear=heard.append)
    assembly = Assembly(1, "/ck", "job", where, ())
    coordinator = Coordinator(state, SimpleNamespace(), assembly)
    coordinator._board._tables["L"] = new_table({ref.bundle_id: ref for ref in refs}, topology())
    packed: list[object] = []
    pack = messages.pack
    monkeypatch.setattr("holdfast.node.coordinate.pack", lambda value: packed.append(value) or pack(value))
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
