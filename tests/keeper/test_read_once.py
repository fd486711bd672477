"""Storage is read once in the whole job: one node reads a bundle, the others get it from keeper to keeper, proved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.base.errors import CorruptError, HoldfastError, KeeperError, VersionNotFound
from holdfast.core.model import Version
from holdfast.core.recovery.version_choice import Facts, Fetch, Stored, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.fetch.streaming_relay import IncomingBundles, RelayRequests
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.client import Located
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from keeper.rig import Rig, Trainer, rig_in
from tiers.samples import JOB_LAYOUT, bundle, piece, random_image, ref_of

NUM_NODES = 8
ONCE, TWICE, DEAD, AGREED, FLIPPED, TORN = (Version(1, step) for step in range(10, 70, 10))
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Eight nodes of one rank, with nothing in memory, and six versions in storage."""
    with rig_in(tmp_path_factory.mktemp("once"), num_nodes=NUM_NODES) as made:
        made.next_incarnation()
        for seed, version in enumerate((ONCE, TWICE, DEAD, AGREED, FLIPPED, TORN)):
            write(made, version, seed)
        assembly = made.assembly()
        for rank in range(NUM_NODES):
            made.trainer(rank).join(assembly, prepare=False)
        yield made


def write(rig: Rig, version: Version, seed: int) -> None:
    """All twins share two bundles, one of them of three chunks; every rank has one of its own."""
    rows = 2 * CHUNK_BYTES // 4096 + 5
    made = [
        bundle("shared-0", piece("big", "F32", (rows, 1024)), ranks=range(NUM_NODES)),
        bundle("shared-1", piece("small", "F32", (100, 8)), ranks=range(NUM_NODES)),
        *(bundle(f"own-{rank}", piece(f"rank{rank}/rng", "U8", (999,)), ranks=(rank,)) for rank in range(NUM_NODES)),
    ]
    stamp, files = make_stamp(1), []
    for one in made:
        image = random_image(one, seed)
        sealed = image_format.seal(one.bundle_id, image)
        files.append(rig.storage.bundles.write(version, ref_of(one), sealed, memoryview(image), stamp=stamp))
    name, length, digest = rig.storage.write_part(version, 0, files, stamp=stamp)
    root = Manifest(version, rig.job_id, NUM_NODES, JOB_LAYOUT, None, {name: (length, digest)})
    rig.storage.commit(root, stamp=stamp)


def plans(rig: Rig, version: Version, **options: Any) -> list[tuple[Fetch, ...]]:
    found = rig.storage.manifest(version)
    table = tuple(file.ref for file in found.bundles)
    stored = Stored(version, NUM_NODES, table, {file.ref.bundle_id: file.seal for file in found.bundles})
    facts = Facts((), {}, {version: stored}, Lineage(), rig.topology, **options)
    choice = choose_version(facts, wanted=version).value
    assert choice is not None
    return [fetches(choice, rank, facts) for rank in range(NUM_NODES)]


def obtain_all(rig: Rig, version: Version, plan: list[tuple[Fetch, ...]], ranks: list[int]) -> dict[int, object]:
    """What each rank got, all asking at once: what it may read, or the error."""
    got: dict[int, object] = {}

    def ask(trainer: Trainer) -> None:
        try:
            got[trainer.rank] = trainer.client.obtain(version, plan[trainer.rank], timeout_s=TIMEOUT_S)
        except HoldfastError as error:
            got[trainer.rank] = error

    threads = [threading.Thread(target=ask, args=(rig.trainers[rank],)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    return got


def prove(located: object, plan: tuple[Fetch, ...]) -> None:
    assert isinstance(located, tuple), located
    for item, fetch in zip(located, plan, strict=True):
        assert isinstance(item, Located)
        image_format.verify(item.view, item.seal, "obtained")
        assert item.seal.digest == fetch.seal.digest


def counters(rig: Rig, name: str, ranks: list[int]) -> dict[int, int]:
    return {rank: rig.trainers[rank].client.status()["counters"].get(name, 0) for rank in ranks}


@pytest.mark.parametrize(("version", "ranks_per_reader", "readers"), [(ONCE, 512, 1), (TWICE, 4, 2)])
def test_storage_is_read_once_per_reader_of_a_group(
    rig: Rig, version: Version, ranks_per_reader: int, readers: int
) -> None:
    everybody = list(range(NUM_NODES))
    before = counters(rig, "storage_read_bytes", everybody)
    plan = plans(rig, version, ranks_per_reader=ranks_per_reader)
    for rank, located in obtain_all(rig, version, plan, everybody).items():
        prove(located, plan[rank])
    after = counters(rig, "storage_read_bytes", everybody)
    files = rig.storage.manifest(version).bundles
    unique = sum(file.length * (readers if len(file.ref.ranks) > 1 else 1) for file in files)
    assert sum(after.values()) - sum(before.values()) == unique
    for trainer in rig.trainers:
        trainer.client.release()


def test_a_reader_that_died_costs_a_second_read_and_nothing_else(rig: Rig) -> None:
    plan = plans(rig, DEAD)
    reader = next(
        rank for rank in range(NUM_NODES) if any(f.ref.bundle_id == "shared-0" and f.via is None for f in plan[rank])
    )
    place = rig.keeper(reader)
    os.kill(rig.pid_of(place), signal.SIGKILL)
    others = [rank for rank in range(NUM_NODES) if rank != reader]
    for rank, located in obtain_all(rig, DEAD, plan, others).items():
        prove(located, plan[rank])
    assert sum(counters(rig, "relay_fallbacks", others).values()) >= 1
    for rank in others:
        rig.trainers[rank].client.release()


def test_what_is_handed_on_is_what_was_agreed_on_or_nothing(rig: Rig) -> None:
    plan = plans(rig, AGREED)
    living = [rank for rank in range(NUM_NODES) if rig.trainers[rank].client.alive]
    rank, fetch = next((r, f) for r in living for f in plan[r] if f.ref.bundle_id == "shared-1" and f.via in living)
    assert fetch.via is not None
    rig.trainers[fetch.via].client.obtain(AGREED, plan[fetch.via], timeout_s=TIMEOUT_S)
    other = replace(fetch, seal=replace(fetch.seal, digest=image_format.chunk_digest(b"other")))
    with pytest.raises(CorruptError, match="agreed on"):
        rig.trainers[rank].client.obtain(AGREED, [other], timeout_s=TIMEOUT_S)


def test_a_byte_that_flips_in_the_reader_is_found_on_the_next_hop(rig: Rig) -> None:
    plan = plans(rig, FLIPPED)
    living = [rank for rank in range(NUM_NODES) if rig.trainers[rank].client.alive]
    child = next(
        (rank, f.via) for rank in living for f in plan[rank] if f.ref.bundle_id == "shared-1" and f.via in living
    )
    rank, upstream = child
    assert upstream is not None
    slots = rig.trainers[upstream].client.prepare(2 * sum(f.seal.length for f in plan[upstream]), 2)
    located = rig.trainers[upstream].client.obtain(FLIPPED, plan[upstream], timeout_s=TIMEOUT_S)
    image = bytes(next(item.view for item in located if item.ref.bundle_id == "shared-1"))
    places = [(slot.view, bytes(slot.view).find(image)) for slot in slots]
    view, at = next(place for place in places if place[1] >= 0)
    view[at + len(image) // 2] ^= 1
    before = counters(rig, "relay_fallbacks", [rank])[rank]
    prove(rig.trainers[rank].client.obtain(FLIPPED, plan[rank], timeout_s=TIMEOUT_S), plan[rank])
    assert counters(rig, "relay_fallbacks", [rank])[rank] > before


def test_a_torn_file_is_refused_by_every_rank(rig: Rig) -> None:
    file = next(file for file in rig.storage.manifest(TORN).bundles if file.ref.bundle_id == "shared-1")
    path = Path(rig.root) / str(TORN) / file.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    plan = plans(rig, TORN)
    living = [rank for rank in range(NUM_NODES) if rig.trainers[rank].client.alive]
    wanted = [tuple(f for f in mine if f.ref.bundle_id == "shared-1") for mine in plan]
    for got in obtain_all(rig, TORN, wanted, living).values():
        assert isinstance(got, CorruptError), got


# What is handed on while the rest still arrives.


def desk(incoming: IncomingBundles) -> tuple[RelayRequests, SimpleNamespace, list[bytes]]:
    sent: list[bytes] = []
    state = SimpleNamespace(
        lock=threading.RLock(),
        assembly=None,
        incarnation=1,
        slot_pool=SimpleNamespace(find=lambda *_: None),
        unpin=lambda held, why: held.unpin(why),
    )
    channel = SimpleNamespace(send_bulk=lambda _, view, **__: sent.append(bytes(view)))
    return (
        RelayRequests(state, incoming),
        SimpleNamespace(channel=channel, greeted=SimpleNamespace(incarnation=1)),
        sent,
    )  # type: ignore[arg-type]


def test_proved_chunks_are_handed_on_before_the_bundle_is_whole() -> None:
    from collections import Counter

    data = memoryview(bytearray(os.urandom(3 * 1000)))
    pins: Counter[str] = Counter()
    held = SimpleNamespace(slot=SimpleNamespace(view=data), pins=pins, unpin=lambda why: pins.subtract([why]))
    seal = image_format.seal("b", data)
    incoming = IncomingBundles()
    one, connection, sent = desk(incoming)
    landing = incoming.begin(ONCE, "b", held, 0)  # type: ignore[arg-type]
    incoming.known(landing, seal)
    incoming.proved(landing, 1000)
    answer = one.ask(connection, messages.AskLanding(id=1, version=ONCE, bundle_id="b", beyond=0))
    assert (answer.ready, answer.seal) == (1000, seal)
    one.pull(connection, messages.PullLanding(id=1, version=ONCE, bundle_id="b", start=0, length=1000))
    assert sent == [bytes(data[:1000])]
    with pytest.raises(KeeperError, match="not to be had"):
        one.pull(connection, messages.PullLanding(id=1, version=ONCE, bundle_id="b", start=1000, length=1000))
    waiting: list[int] = []
    ask = messages.AskLanding(id=1, version=ONCE, bundle_id="b", beyond=1000)
    thread = threading.Thread(target=lambda: waiting.append(one.ask(connection, ask).ready))
    thread.start()
    incoming.proved(landing, 2000)
    thread.join(30)
    assert waiting == [3000]
    incoming.end(ONCE, {"b": landing}, "the disk is gone")
    with pytest.raises(VersionNotFound):
        one.pull(connection, messages.PullLanding(id=1, version=ONCE, bundle_id="b", start=0, length=1000))
    assert pins.total() == 0
