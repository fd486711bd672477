"""What one keeper hands on to another: found and pinned in one step, and never from a slot that is given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.base.errors import CorruptError, VersionNotFound
from holdfast.base.events import Events
from holdfast.core.model import Topology, Version
from holdfast.core.recovery.version_choice import Fetch, Source
from holdfast.core.versions.lineage import Lineage
from holdfast.core.versions.node_ledger import NodeLedger
from holdfast.keeper.fetch.fetch_bundles import BundleFetcher
from holdfast.keeper.fetch.streaming_relay import IncomingBundles, RelayRequests
from holdfast.keeper.rpc import messages
from holdfast.keeper.slots.keeper_state import NodeState
from holdfast.keeper.slots.progress import Activities
from holdfast.keeper.slots.slot_pool import HeldSlot, SlotPool
from holdfast.keeper.storage.lazy_storage import LazyStorage
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage
from tiers.samples import JOB_LAYOUT, STAMP, bundle, page_memory, piece, random_image, ref_of

V = Version(1, 4)


def nothing(*_: object, **__: object) -> None:
    return None


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Storage, Fetch]:
    """A version of one bundle of three chunks, the last of which is damaged in storage."""
    storage = open_storage(tmp_path / "root", Events())
    job = storage.claim()
    storage.incarnations.register()
    one = bundle("big-0", piece("w", "U8", (2 * CHUNK_BYTES,)))
    image = random_image(one)
    view = page_memory(len(image))
    view[:] = image
    seal = image_format.seal(one.bundle_id, view)
    file = storage.bundles.write(V, ref_of(one), seal, view, stamp=STAMP)
    name, length, digest = storage.write_part(V, 0, [file], stamp=STAMP)
    storage.commit(Manifest(V, job, 1, JOB_LAYOUT, None, {name: (length, digest)}), stamp=STAMP)
    path = tmp_path / "root" / str(V) / file.file
    with path.open("r+b") as stream:
        stream.seek(2 * CHUNK_BYTES + 5)
        stream.write(b"\xff\x00\xff")
    return storage, Fetch(file.ref, file.seal, Source.STORAGE, None)


@pytest.fixture
def state(stored: tuple[Storage, Fetch]) -> Iterator[NodeState]:
    budget = SimpleNamespace(reserve=nothing, came=nothing, release=nothing, close=nothing)
    made = NodeState(SimpleNamespace(node="a", job="j"), SlotPool(budget))
    made.ledger = NodeLedger(node=0, topology=Topology(("a",), (0,)), incarnation=2, lineage=Lineage())
    made.ledger.resume(None)
    callbacks = ("report", "push", "replicate", "writing", "began", "examine", "follow", "changed")
    made.callbacks = SimpleNamespace(**dict.fromkeys(callbacks, nothing))
    yield made
    made.slot_pool.close()


def test_what_failed_to_arrive_is_handed_on_no_more_before_its_slot_is_free(
    stored: tuple[Storage, Fetch], state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first chunks were proved, and the next node asks for them just when the fetch is given up."""
    storage, fetch = stored
    incoming = IncomingBundles()
    desk = RelayRequests(state, incoming)
    lazy_storage = LazyStorage(storage.where, Events())
    bundle_fetcher = BundleFetcher(state, lazy_storage, Activities(state), incoming, nothing)
    sent: list[int] = []
    channel = SimpleNamespace(send_bulk=lambda _, view, **__: sent.append(len(view)))
    connection = SimpleNamespace(greeted=SimpleNamespace(job_id="", incarnation=2), channel=channel)
    asked: list[int] = []

    def ask() -> None:
        desk.pull(
            connection,
            messages.PullLanding(id=1, version=V, bundle_id=fetch.ref.bundle_id, start=0, length=CHUNK_BYTES),
        )

    clear, known = HeldSlot.clear, IncomingBundles.proved

    def proved(self: IncomingBundles, landing: object, num_bytes: int) -> None:
        known(self, landing, num_bytes)  # type: ignore[arg-type]
        if not sent:
            ask()

    def cleared(self: HeldSlot) -> None:
        asked.append(1)
        with pytest.raises(VersionNotFound):
            ask()
        clear(self)

    monkeypatch.setattr(IncomingBundles, "proved", proved)
    monkeypatch.setattr(HeldSlot, "clear", cleared)
    with pytest.raises(CorruptError, match="chunk 2"):
        bundle_fetcher.obtain(0, V, [fetch], 30.0)
    assert sent == [CHUNK_BYTES], "while it arrived it was handed on"
    assert asked == [1]
