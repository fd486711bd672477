"""What happens to bytes between keepers: damaged, cut off, stale, late. Every damage is found, and the transfer repeated.

The wire here is the plain one (Unix sockets), where nothing but our own digests can notice; TLS would end the
connection before.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from holdfast.base.errors import CorruptError, HoldfastError, KeeperError, KeeperLost
from holdfast.core.model import Level, Version
from holdfast.core.recovery.version_choice import choose_version
from holdfast.keeper.replication.peer_line import PIECE_BYTES
from holdfast.keeper.rpc import messages
from holdfast.keeper.rpc.server import MAX_THREADS
from holdfast.tiers.format import image as image_format
from holdfast.tiers.wire import frames
from holdfast.tiers.wire.frames import Channel
from keeper.rig import Rig, Trainer, reached, save_all
from kit.nodes import facts_of, reborn, restored
from kit.peer_proxy import PAGE, Proxy, Source
from sample_kit import sampled

MakeRig = Callable[..., Rig]
# Pages of an image before this one are alike, and to swap two that are equal is no damage.
RANDOM_FROM = 5
DAMAGES = ("flip", "swap", "stale", "cut")


def damage_of(kind: str, chance: random.Random, before: bytes) -> Callable[[bytearray], bool]:
    """Damages bytes in one of the ways in which a wire, a switch or a bug does."""

    def damage(data: bytearray) -> bool:
        if kind == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del data[chance.randrange(len(data)) :]
            return True
        else:
            one, two = sorted(chance.sample(range(RANDOM_FROM, len(data) // PAGE), 2))
            here, there = slice(one * PAGE, one * PAGE + PAGE), slice(two * PAGE, two * PAGE + PAGE)
            if kind == "swap":
                data[here], data[there] = data[there], data[here]
            else:  # a block of the version before
                data[there] = before[there]
        return False

    return damage


@pytest.mark.parametrize("trials", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_every_damage_on_the_wire_is_found_and_no_clean_transfer_is_blamed(
    make_rig: MakeRig, base: Path, trials: int
) -> None:
    source = Source(make_rig(own_bytes=64 << 10))
    right, before = source.images[source.version], source.images[Version(source.version.incarnation, 1)]
    chance = random.Random(11)
    found = dict.fromkeys(DAMAGES, 0)
    with Proxy(source.rig.keeper(0).socket, base / "p") as proxy:
        for trial in range(trials):
            kind = DAMAGES[trial % len(DAMAGES)]
            proxy.damage = damage_of(kind, chance, before)
            try:
                source.pull(f"unix:{proxy.path}")
            except HoldfastError:
                found[kind] += 1
            if trial % 10 == 0:
                proxy.damage = None
                assert source.pull(f"unix:{proxy.path}") == right
    assert found == dict.fromkeys(DAMAGES, trials // len(DAMAGES))
    assert proxy.damaged == trials


def test_a_damaged_transfer_is_repeated_until_it_is_right(make_rig: MakeRig, base: Path) -> None:
    rig = make_rig(num_nodes=2, own_bytes=64 << 10)
    chance = random.Random(5)
    flip = damage_of("flip", chance, b"")

    def three_times(data: bytearray) -> bool:
        if proxy.damaged <= 3:
            flip(data)
        return False

    with Proxy(rig.keeper(0).socket, base / "p") as proxy:
        proxy.damage = three_times
        rig.next_incarnation()
        assembly = rig.assembly()
        assembly = replace(assembly, addresses=(f"unix:{proxy.path}", assembly.addresses[1]))
        trainers = [rig.trainer(rank) for rank in range(2)]
        for trainer in trainers:
            trainer.join(assembly)
        for trainer in trainers:
            trainer.client.resume(rig.incarnation, None)
        version = save_all(trainers, 1)
        reached(trainers, version, Level.REPLICATED)
        assert proxy.damaged > 3
        assert rig.status(1)["replication"]["pulled_bytes"] >= 64 << 10


def test_several_pieces_are_asked_for_ahead_and_arrive_in_order(make_rig: MakeRig) -> None:
    source = Source(make_rig(own_bytes=5 * PIECE_BYTES + 8192))
    assert source.pull(source.rig.keeper(0).address) == source.images[source.version]


def test_chunks_from_the_middle_are_proved_where_they_arrive(make_rig: MakeRig, base: Path) -> None:
    """For what is read in pieces nobody compares the digest of the whole."""
    source = Source(make_rig(own_bytes=image_format.CHUNK_BYTES + (64 << 10)))
    right = source.images[source.version][image_format.CHUNK_BYTES :]
    target = bytearray(len(right))
    with Proxy(source.rig.keeper(0).socket, base / "p") as proxy:
        reader = source.reader(f"unix:{proxy.path}")
        try:
            seal = reader.seals(source.version, (source.own.bundle_id,))[source.own.bundle_id]
            reader.read_chunks_into(source.version, seal, 1, memoryview(target), lambda _: None)
            assert target == right
            proxy.damage = damage_of("flip", random.Random(7), b"")
            with pytest.raises(CorruptError, match="chunk 1 of image"):
                reader.read_chunks_into(source.version, seal, 1, memoryview(target), lambda _: None)
        finally:
            reader.close()


# --- streams that end or lie


def test_a_stream_that_ends_at_any_byte_of_a_frame_ends_the_reader(make_rig: MakeRig) -> None:
    frame = frames._framed(messages.encode(messages.Welcome(node="n", pid=1, incarnation=1, address="unix:/x")))
    for end in range(len(frame)):
        one, two = socket.socketpair()
        channel = Channel(two, where="peer")
        one.sendall(frame[:end])
        one.close()
        with pytest.raises(KeeperLost):
            channel.receive(timeout_s=5)
        channel.close()

    rig = make_rig()
    place = rig.keeper(0)
    keeper = psutil.Process(rig.pid_of(place))
    hello = frames._framed(messages.encode(messages.Hello(job=place.job, role=messages.VIEWER)))
    for end in range(len(hello)):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(place.socket))
            sock.sendall(hello[:end])
    most = MAX_THREADS + 16  # and the keeper's own, of which some begin late
    assert len(hello) > most
    assert keeper.num_threads() <= most
    with socket.socket(socket.AF_UNIX) as sock:  # no thread is left that reads what never comes
        sock.connect(str(place.socket))
        sock.settimeout(10)
        sock.sendall(hello)
        assert sock.recv(1)
    assert rig.status(0)["node"] == "n0"


SAMPLES = (
    messages.Hello(job="a" * 16, role="keeper", node=1, incarnation=3, job_id="j"),
    messages.Welcome(node="n0", pid=7, incarnation=3, address="tcp:h:1"),
    messages.Pull(id=4, version=Version(1, 2), bundle_id="g0x1-ab-0", start=0, length=9),
    messages.Bulk(id=4, length=9),
    messages.AskSeals(id=1, version=Version(1, 2), bundle_ids=("a", "b")),
    messages.TakeInventory(id=2, wide=True),
    messages.Refusal(id=3, kind="Fenced", what="no"),
)


@pytest.mark.parametrize(
    "trials", [10_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_no_frame_makes_the_reader_do_anything_but_understand_or_refuse(trials: int) -> None:
    chance = random.Random(trials)
    bodies = [messages.encode(sample) for sample in SAMPLES]
    understood = 0
    for _ in range(trials):
        body = bytearray(chance.choice(bodies))
        for _ in range(chance.randint(1, 4)):
            where = chance.randrange(len(body))
            action = chance.randrange(4)
            if action == 0:
                body[where] = chance.randrange(256)
            elif action == 1:
                del body[where]
            elif action == 2:
                body[where:where] = chance.randbytes(chance.randint(1, 9))
            else:
                body = body[: where + 1] + chance.choice(bodies)[chance.randrange(8) :]
        for decode in (messages.decode, messages.decode_hello):
            try:
                message = decode(bytes(body))
            except KeeperError:
                continue
            understood += 1
            assert isinstance(message, messages.Message)
            assert msgspec.msgpack.encode(message)
    assert 0 < understood < trials


def test_no_stream_of_bytes_makes_the_channel_wait_or_take_memory() -> None:
    chance = random.Random(3)
    for trial in range(300):
        one, two = socket.socketpair()
        channel = Channel(two, where="peer")
        stream = frames._framed(messages.encode(chance.choice(SAMPLES))).tobytes() + chance.randbytes(trial % 64)
        if trial % 3 == 0:
            stream = struct.pack(">I", chance.getrandbits(32)) + stream
        one.sendall(stream)
        one.close()
        with pytest.raises((KeeperLost, KeeperError)):
            drain(channel)
        channel.close()


def drain(channel: Channel) -> None:
    for _ in range(100):
        channel.receive(timeout_s=5)


# --- nodes that are lost


@pytest.fixture(params=sampled([2, 3, 5], 3))
def nodes(request: pytest.FixtureRequest, make_rig: MakeRig, secret_file: Path) -> Rig:
    return make_rig(
        num_nodes=request.param, own_bytes=256 << 10, listen="127.0.0.1", secret_file=str(secret_file), linger_s=90.0
    )


def test_any_lost_node_costs_nothing_that_was_called_replicated(nodes: Rig) -> None:
    wipe_at_random(nodes, {2: 4, 3: 3, 5: 3}[len(nodes.labels)])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_lost_nodes_cost_nothing_that_was_called_replicated(nodes: Rig) -> None:
    wipe_at_random(nodes, {2: 34, 3: 33, 5: 33}[len(nodes.labels)])


def wipe_at_random(rig: Rig, trials: int) -> None:
    """Ranks save as fast as they may; at a random instant one node dies with all its memory; the others remember."""
    chance = random.Random(len(rig.labels))
    trainers, step = rig.start(), 0
    for _ in range(trials):
        acknowledged = save_all(trainers, step)
        reached(trainers, acknowledged, Level.REPLICATED)
        step += 1
        acknowledged, step = save_until_killed(rig, trainers, step, chance)
        for trainer in trainers:
            trainer.client.close()
        rig.incarnation = rig.storage.incarnations.register()  # what it resumes from is not known yet
        trainers = [reborn(rig, rank) for rank in range(rig.topology.world_size)]
        facts = facts_of(rig, trainers[0].client.inventory())
        choice = choose_version(facts).value
        assert choice is not None
        assert choice.version >= acknowledged
        assert {restored(trainer, facts)[0] for trainer in trainers} == {choice.version}  # every byte compared
        rig.storage.incarnations.record_resumed(rig.incarnation, choice.version)
        for trainer in trainers:
            trainer.client.release()
            trainer.client.resume(rig.incarnation, choice.version)
        step = choice.version.step + 1


def save_until_killed(rig: Rig, trainers: list[Trainer], step: int, chance: random.Random) -> tuple[Version, int]:
    """Returns the newest version that any rank heard to be replicated when the node died."""
    victim = rig.pid_of(rig.keeper(chance.randrange(len(rig.labels))))
    killer = threading.Timer(chance.uniform(0.0, 0.15), os.kill, (victim, signal.SIGKILL))
    killer.start()
    last = step + 40
    try:
        while step < last:
            for trainer in trainers:
                trainer.save(step)
            step += 1
    except HoldfastError:
        pass  # its keeper is gone, or the guard kept the slots of what is not in two nodes
    finally:
        killer.join()
    newest = max(
        (v for v in [Version(rig.incarnation, s) for s in range(step + 1)] for t in trainers
         if t.client.announced.level(v)[0] >= Level.REPLICATED),
        default=Version(0, 0),
    )  # fmt: skip
    return newest, step


def test_with_both_holders_lost_the_durable_version_comes_back(make_rig: MakeRig, secret_file: Path) -> None:
    rig = make_rig(num_nodes=3, own_bytes=64 << 10, listen="127.0.0.1", secret_file=str(secret_file))
    trainers = rig.start()
    durable = save_all(trainers, 0, durable=True)
    reached(trainers, durable, Level.DURABLE)
    newer = save_all(trainers, 1)
    reached(trainers, newer, Level.REPLICATED)
    for node in (0, 1):  # what lives in node 0 only has its replica on node 1
        os.kill(rig.pid_of(rig.keeper(node)), signal.SIGKILL)
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(durable)
    back = [reborn(rig, rank) for rank in range(3)]
    facts = facts_of(rig, back[2].client.inventory(), with_storage=True)
    assert {restored(trainer, facts)[0] for trainer in back} == {durable}
