"""Replicas of what did not change: not sent again, right all the same, and sent whenever that is in doubt.

The keeper's own Replicator, state and slot pool of node 1 of 2; the peer is a stand-in that serves real images with real seals.
The last test is of two real keepers.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.base.errors import KeeperLost
from holdfast.core.model import Level, Seal, Version
from holdfast.core.versions.coordinator_board import Kind
from holdfast.core.versions.slot_guard import SlotState
from holdfast.keeper.replication import kept_images
from holdfast.keeper.replication import replicator as replicate
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory import slots, spoiled_images
from keeper.rig import Rig, image_of, reached
from kit.replica_nodes import Node

FROZEN, TRAINED = "g0-0", "g0-1"
FROZEN_BYTES, TRAINED_BYTES = image_format.CHUNK_BYTES + (64 << 10), 32 << 10


def version(step: int) -> Version:
    return Version(1, step)


def bytes_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


class Peer:
    """The reader of another keeper: what it holds by version and bundle, and what was sent."""

    images: ClassVar[dict[tuple[Version, str], bytes]]
    sent: ClassVar[list[tuple[int, str]]]
    meet: ClassVar[Callable[[str, memoryview], None]]

    def __init__(self, *_: object, **__: object) -> None: ...

    def seals(self, wanted: Version, bundle_ids: tuple[str, ...]) -> dict[str, Seal]:
        return {name: image_format.seal(name, self.images[wanted, name]) for name in bundle_ids}

    def read_into(self, wanted: Version, seal: Seal, view: memoryview) -> None:
        self.meet(seal.bundle_id, view)
        view[:] = self.images[wanted, seal.bundle_id]
        self.sent.append((wanted.step, seal.bundle_id))

    def close(self) -> None: ...


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    Peer.images, Peer.sent, Peer.meet = {}, [], staticmethod(lambda *_: None)
    monkeypatch.setattr(replicate, "PeerReader", Peer)
    made = Node(tmp_path, parts=2)
    made.assemble(1)
    made.state.resume(1, None)
    yield made
    Peer.meet = staticmethod(lambda *_: None)
    made.replicator.stop()
    made.state.slot_pool.close()


def saved(step: int, *, frozen: bytes | None = None, trained_bytes: int = TRAINED_BYTES) -> None:
    """What node 0 holds of a step: the frozen part is the same unless another one is given."""
    Peer.images[version(step), FROZEN] = bytes_of(0, FROZEN_BYTES) if frozen is None else frozen
    Peer.images[version(step), TRAINED] = bytes_of(step, trained_bytes)


def replicated(node: Node, *steps: int) -> None:
    for step in steps:
        if (version(step), FROZEN) not in Peer.images:
            saved(step)
        node.replicate(version(step))


def sent(step: int) -> list[str]:
    return [name for number, name in Peer.sent if number == step]


def proved(node: Node, step: int) -> bool:
    """Whether the replica of the step stands, header and all, and is byte for byte what node 0 saved."""
    for held in node.replicas():
        if held.version == version(step) and held.state is SlotState.SEALED:
            header = slots.read_header(held.slot)
            assert header is not None
            assert {place.ref.bundle_id for place in header.images} == {FROZEN, TRAINED}
            assert not held.pins
            for place in header.images:
                there = held.slot.view[place.offset : place.offset + place.seal.length]
                assert there == Peer.images[version(step), place.ref.bundle_id]
            return True
    return False


def test_only_what_changed_is_sent_from_the_second_version_on(node: Node) -> None:
    replicated(node, 1, 2, 3, 4, 5)
    assert sorted(sent(1)) == [FROZEN, TRAINED]
    assert [sent(step) for step in (2, 3, 4, 5)] == [[TRAINED]] * 4
    assert proved(node, 4)
    assert proved(node, 5)
    facts, counters = node.replicator.facts(), node.replicator._events.counters()
    assert facts["pulled_bytes"] == counters["replicated_bytes"] == FROZEN_BYTES + 5 * TRAINED_BYTES
    assert facts["unsent_bytes"] == counters["replica_kept_bytes"] == 4 * FROZEN_BYTES
    assert facts["last_bytes"] == TRAINED_BYTES


def test_from_the_third_version_on_it_is_not_even_copied(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    replicated(node, 1, 2)
    asked: list[str] = []
    monkeypatch.setattr(kept_images, "_copied", lambda _, __, place, ___: asked.append(place.ref.bundle_id))
    replicated(node, 3, 4)
    assert [sent(step) for step in (3, 4)] == [[TRAINED]] * 2
    assert asked == [TRAINED] * 2
    assert proved(node, 4)


def test_one_bit_that_differs_is_sent(node: Node) -> None:
    replicated(node, 1, 2)
    other = bytearray(bytes_of(0, FROZEN_BYTES))
    other[-1] ^= 1
    saved(3, frozen=bytes(other))
    replicated(node, 3, 4, 5)
    assert sorted(sent(3)) == [FROZEN, TRAINED]
    assert [sent(step) for step in (4, 5)] == [[TRAINED]] * 2, "it is what it was in 2, and what it was in 4"
    assert proved(node, 4)
    assert proved(node, 5)


def test_an_average_that_pauses_and_moves_again(node: Node) -> None:
    for step, seed in enumerate((10, 10, 10, 11, 12, 12, 12), start=1):
        saved(step, frozen=bytes_of(seed, FROZEN_BYTES))
        replicated(node, step)
        assert proved(node, step)
    assert [FROZEN in sent(step) for step in range(1, 8)] == [True, False, False, True, True, False, False]


def test_what_lies_elsewhere_in_the_slot_is_right(node: Node) -> None:
    """The image before it grew, so that the place of this one lies behind where it was."""
    node.table = tuple(sorted(node.table, key=lambda ref: ref.bundle_id, reverse=True))
    for step, size in enumerate((TRAINED_BYTES, TRAINED_BYTES, 2 * TRAINED_BYTES, 2 * TRAINED_BYTES, 4096), start=1):
        saved(step, trained_bytes=size)
        replicated(node, step)
        assert proved(node, step)
    assert [FROZEN in sent(step) for step in range(1, 6)] == [True, False, False, False, False]


def test_a_pull_that_broke_in_the_middle_leaves_nothing_that_counts(node: Node) -> None:
    replicated(node, 1, 2)

    def breaks(_: str, view: memoryview) -> None:
        view[: len(view) // 2] = bytes(len(view) // 2)
        (writing,) = (held for held in node.replicas() if held.state is SlotState.WRITING)
        assert slots.read_header(writing.slot) is None
        assert not writing.images, "what is kept counts only with the rest"
        raise KeeperLost("the connection broke")

    Peer.meet = staticmethod(breaks)
    saved(3)
    node.hear(Kind.CAPTURED, version(3))
    node.rest()
    assert [held.version for held in node.replicas() if held.state is SlotState.SEALED] == [version(2)]
    (empty,) = (held for held in node.replicas() if held.state is SlotState.EMPTY)
    assert not empty.images
    assert not empty.before
    assert slots.read_header(empty.slot) is None
    Peer.meet = staticmethod(lambda *_: None)
    node.tick()
    assert proved(node, 3)
    assert sent(3) == [TRAINED], "the other slot holds the frozen part"
    node.hear(Kind.REPLICATED, version(3))
    replicated(node, 4)
    assert proved(node, 4)


@pytest.mark.parametrize("damaged", ["the slot that is overwritten", "both slots"])
def test_damage_of_what_lies_here_is_found_and_not_handed_on(
    node: Node, caplog: pytest.LogCaptureFixture, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoiled_images, "PROVED_PARTS", 1)  # all of it, else only chance would find it
    replicated(node, 1, 2)
    for held in node.replicas():
        if held.version == version(1) or damaged == "both slots":
            held.slot.view[held.images[FROZEN].offset + FROZEN_BYTES - 1] ^= 4
    with caplog.at_level(logging.WARNING):
        replicated(node, 3)
    assert proved(node, 3)
    assert (FROZEN in sent(3)) is (damaged == "both slots")
    assert "is not kept but brought anew: chunk 1 of image g0-0" in caplog.text
    assert ("is not copied but brought anew" in caplog.text) is (damaged == "both slots")


def test_one_chunk_of_what_stays_is_proved_every_time() -> None:
    image = bytearray(3 * image_format.CHUNK_BYTES)
    seal = image_format.seal("b", image)
    image[5] ^= 1
    random.seed(3)
    found = [spoiled_images.spoiled(memoryview(image), seal) for _ in range(30)]
    assert any(found)
    assert not all(found), "a share of it, not the whole"


def test_what_was_condemned_or_is_only_preloaded_is_sent(node: Node) -> None:
    replicated(node, 1, 2)
    for held in node.replicas():
        held.condemned.add(FROZEN)
    replicated(node, 3)
    assert sorted(sent(3)) == [FROZEN, TRAINED]
    for held in node.replicas():
        if held.version == version(3):
            held.preloaded = True
    replicated(node, 4)
    assert sorted(sent(4)) == [FROZEN, TRAINED], "the other slot's was condemned, and this one's may go any time"
    assert proved(node, 4)


def test_the_slot_that_is_copied_from_is_pinned_meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    replicated(node, 1)
    pins: list[dict[str, int]] = []
    check = image_format.check_chunk

    def look(*args: Any) -> None:
        pins.extend(dict(held.pins) for held in node.replicas() if held.version == version(1))
        check(*args)

    monkeypatch.setattr(image_format, "check_chunk", look)
    replicated(node, 2)
    assert pins == [{"copied from": 1}] * 2
    assert proved(node, 2)


def test_a_seal_that_proves_no_chunk_is_not_believed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Peer.seals

    def bare(self: Peer, wanted: Version, bundle_ids: tuple[str, ...]) -> dict[str, Seal]:
        found = whole(self, wanted, bundle_ids)
        return {name: Seal(name, seal.length, seal.digest) for name, seal in found.items()}

    monkeypatch.setattr(Peer, "seals", bare)
    replicated(node, 1, 2, 3)
    assert [sorted(sent(step)) for step in (1, 2, 3)] == [[FROZEN, TRAINED]] * 3


# --- real keepers


def test_two_keepers_send_what_changed_and_the_replica_is_the_version(make_rig: Callable[..., Rig]) -> None:
    """Each rank's own bundle stays as it is, but for one step; every step brings another shared one."""
    rig = make_rig(num_nodes=2, own_bytes=256 << 10)
    trainers = rig.start()
    own = [next(bundle for bundle in trainer.mine if len(bundle.ranks) == 1) for trainer in trainers]
    size = len(image_of(own[0], 0))

    def pulled() -> tuple[float, float]:
        facts = rig.status(1)["replication"]
        return facts["pulled_bytes"], facts["unsent_bytes"]

    at = []
    for step, salt in enumerate((0, 0, 0, 7, 7), start=1):
        for trainer in trainers:
            slot = trainer.begin(step)
            spans = trainer.write(slot, step)
            for span in spans:
                if len(span.ref.ranks) == 1:
                    bundle = next(bundle for bundle in trainer.mine if bundle.bundle_id == span.ref.bundle_id)
                    slot.view[span.offset : span.offset + span.length] = image_of(bundle, 0, salt)
            trainer.client.copied(trainer.version(step), spans)
        reached(trainers, trainers[0].version(step), Level.REPLICATED)
        at.append(pulled())
    assert at == [(size, 0), (size, size), (size, 2 * size), (2 * size, 2 * size), (2 * size, 3 * size)]
