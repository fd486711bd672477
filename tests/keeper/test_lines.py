"""Several lines to one peer: they bring what one brings, whatever becomes of one of them, and as many as are worth it."""

from __future__ import annotations

import heapq
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from holdfast.base.errors import CorruptError, HoldfastError, KeeperError, KeeperLost
from holdfast.core.model import Level, Seal, Version
from holdfast.core.recovery import version_choice
from holdfast.keeper.replication import image_transfer, peer_line
from holdfast.keeper.replication.image_transfer import CHUNKS_PER_LINE, MOST_LINES, count_lines
from holdfast.keeper.replication.peer_line import ImagePart, PeerLine
from holdfast.keeper.replication.rate_limit import Pace
from holdfast.keeper.rpc.messages import KEEPER, Hello
from holdfast.keeper.service import peer_requests
from holdfast.keeper.service.peer_requests import MAX_FURTHER_LINES, STALL_S, PeerRequests
from holdfast.keeper.slots.idle_windows import Windows
from holdfast.tiers.backends.parallel_streams import StreamCount
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format.image import CHUNK_BYTES
from keeper.rig import TIMEOUT_S, Rig, eventually, reached, save_all
from kit.nodes import facts_of, reborn, restored
from kit.peer_proxy import Proxy, Source
from sample_kit import MORE, sampled

MakeRig = Callable[..., Rig]
LINES = 4
# Of the image, without its last, short chunk.
CHUNKS = 6
# Of several lines at once; none of the tests waits for it.
PATIENCE_S = 60.0


def four() -> StreamCount:
    return StreamCount(first=LINES, most=LINES)


@pytest.fixture
def source(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(image_transfer, "CHUNKS_PER_LINE", 1)
    return Source(make_rig(own_bytes=CHUNKS * CHUNK_BYTES + 8192))


@pytest.fixture
def proxy(source: Source, base: Path) -> Iterator[Proxy]:
    with Proxy(source.rig.keeper(0).socket, base / "p") as made:
        yield made


def lines_at_work() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast line"]


@dataclass
class Gate:
    """Holds the first piece of every line up until so many lines have one; then `then` may do something to each piece."""

    lines: int = LINES
    then: Callable[[int, bytearray], bool] = lambda *_: False
    seen: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = threading.Barrier(self.lines)
        self._lock = threading.Lock()

    def __call__(self, data: bytearray) -> bool:
        with self._lock:  # a thread of the proxy is a line
            is_new = threading.get_ident() not in self.seen
            number = self.seen.setdefault(threading.get_ident(), len(self.seen))
        if is_new:
            self._all.wait(PATIENCE_S)
        return self.then(number, data)


def test_several_lines_bring_what_one_brings(source: Source, proxy: Proxy) -> None:
    proxy.damage = gate = Gate()
    told: list[int] = []
    assert source.pull(f"unix:{proxy.path}", four(), told.append) == source.images[source.version]
    assert len(gate.seen) == proxy.opened == LINES
    assert sorted(told)[1:] == [CHUNK_BYTES] * CHUNKS, "each chunk is told once"
    assert not lines_at_work()


def test_what_comes_in_another_order_has_its_own_place(source: Source, proxy: Proxy) -> None:
    others = threading.Event()
    came: list[int] = []

    def progress(num_bytes: int) -> None:
        came.append(num_bytes)
        if len(came) == CHUNKS:  # all but the one that is held up
            others.set()

    def hold_up_one(number: int, _: bytearray) -> bool:
        assert number or others.wait(PATIENCE_S)
        return False

    proxy.damage = Gate(then=hold_up_one)
    assert source.pull(f"unix:{proxy.path}", four(), progress) == source.images[source.version]
    assert len(came) == CHUNKS + 1


def test_chunks_from_the_middle_come_by_several_lines_and_are_proved(source: Source, proxy: Proxy) -> None:
    proxy.damage = gate = Gate(lines=3)
    reader = source.reader(f"unix:{proxy.path}", four())
    try:
        seal = source.seal(reader)
        target = bytearray(3 * CHUNK_BYTES)
        told: list[int] = []
        reader.read_chunks_into(source.version, seal, 2, memoryview(target), told.append)
        assert target == source.images[source.version][2 * CHUNK_BYTES : 5 * CHUNK_BYTES]
        assert (len(gate.seen), told) == (3, [CHUNK_BYTES] * 3), "a line for each chunk"

        proxy.damage = damaged
        with pytest.raises(CorruptError, match=r"chunk [234] of image"):
            reader.read_chunks_into(source.version, seal, 2, memoryview(target), told.append)
    finally:
        reader.close()


def damaged(data: bytearray) -> bool:
    data[-1] ^= 1
    return False


def test_a_small_image_comes_by_one_line(make_rig: MakeRig, base: Path) -> None:
    source = Source(make_rig(own_bytes=2 * CHUNK_BYTES))
    with Proxy(source.rig.keeper(0).socket, base / "p") as proxy:
        assert source.pull(f"unix:{proxy.path}", four()) == source.images[source.version]
        assert proxy.opened == 1 < CHUNKS_PER_LINE


# --- what goes wrong on one of them


def swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: a line takes the second chunk for the third, and the third for the second."""
    real = PeerLine._pieces
    moved = {1: CHUNK_BYTES, 2: -CHUNK_BYTES}

    def pieces(line: PeerLine, part: ImagePart, chunks: Iterator[int]) -> Iterator[tuple[int, int, bool]]:
        for start, end, is_last in real(line, part, chunks):
            by = moved.get(start // CHUNK_BYTES, 0)
            yield start + by, end + by, is_last

    monkeypatch.setattr(PeerLine, "_pieces", pieces)


@pytest.mark.parametrize("has_chunk_digests", sampled([True, False], False))
def test_a_line_that_swaps_two_chunks_is_found(
    source: Source, monkeypatch: pytest.MonkeyPatch, has_chunk_digests: bool
) -> None:
    swap(monkeypatch)
    reader = source.reader(f"unix:{source.rig.keeper(0).socket}", four())
    try:
        seal = source.seal(reader)
        seal = seal if has_chunk_digests else replace(seal, chunk_digests=())
        with pytest.raises(CorruptError, match="differs from its seal"):
            reader.read_into(source.version, seal, memoryview(bytearray(seal.length)))
    finally:
        reader.close()
    assert not lines_at_work()


def cut(number: int, data: bytearray) -> bool:
    if number == LINES - 1:
        del data[len(data) // 2 :]
    return number == LINES - 1


def test_a_line_that_is_cut_ends_all_and_the_next_transfer_is_whole(source: Source, proxy: Proxy) -> None:
    proxy.damage = Gate(then=cut)
    count = four()
    with pytest.raises(KeeperLost):
        source.pull(f"unix:{proxy.path}", count)
    assert not lines_at_work(), "nothing writes to that memory any more"
    assert count.now == LINES // 2, "the next time fewer share the way"
    proxy.damage = None
    assert source.pull(f"unix:{proxy.path}", count) == source.images[source.version]


def test_nobody_waits_for_a_line_that_stalls_when_another_one_is_cut(
    source: Source, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_line, "BLOCK_TIMEOUT_S", 10 * PATIENCE_S)
    over = threading.Event()
    waited: list[bool] = []

    def stall_and_cut(number: int, data: bytearray) -> bool:
        if number == 0:
            waited.append(over.wait(PATIENCE_S))
        return cut(number, data)

    proxy.damage = Gate(then=stall_and_cut)
    with pytest.raises(KeeperLost):
        source.pull(f"unix:{proxy.path}", four())
    over.set()
    eventually(lambda: waited)
    assert waited == [True]


@MORE
def test_a_line_that_stalls_ends_all(source: Source, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_line, "BLOCK_TIMEOUT_S", 0.5)
    over = threading.Event()

    def stall(number: int, _: bytearray) -> bool:
        assert number or over.wait(PATIENCE_S)
        return False

    proxy.damage = Gate(then=stall)
    with pytest.raises(KeeperError, match="did not finish its frame in time"):
        source.pull(f"unix:{proxy.path}", four())
    assert not lines_at_work()
    over.set()
    proxy.damage = None
    monkeypatch.undo()
    assert source.pull(f"unix:{proxy.path}", four()) == source.images[source.version]


def test_a_sender_that_is_killed_ends_all_lines_and_leaves_nothing(source: Source, proxy: Proxy) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    keeper = source.rig.pid_of(source.rig.keeper(0))
    killed = threading.Event()

    def kill(number: int, _: bytearray) -> bool:
        if number == LINES - 1 and not killed.is_set():
            killed.set()
            os.kill(keeper, signal.SIGKILL)
        return False

    proxy.damage = gate = Gate(then=kill)
    with pytest.raises(KeeperLost):
        source.pull(f"unix:{proxy.path}", four())
    assert len(gate.seen) == LINES
    assert not lines_at_work()
    eventually(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before)


def test_an_error_of_the_receiver_ends_all_lines(source: Source, proxy: Proxy) -> None:
    proxy.damage = Gate()

    def full(_: int) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        source.pull(f"unix:{proxy.path}", four(), full)
    assert not lines_at_work()


# --- the sender


def counts(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_neither_descriptors_nor_threads_of_a_sender_grow(source: Source, proxy: Proxy) -> None:
    keeper = source.rig.pid_of(source.rig.keeper(0))
    source.pull(f"unix:{proxy.path}", four())
    eventually(lambda: proxy.idle)
    fds, threads = counts(keeper)
    for _ in range(12):
        proxy.damage = Gate()  # all lines work
        source.pull(f"unix:{proxy.path}", four())
    eventually(lambda: counts(keeper)[0] <= fds)
    assert counts(keeper)[1] <= threads + LINES


def test_a_sender_serves_so_many_further_lines_and_no_transfer_fails_for_it(source: Source) -> None:
    address = f"unix:{source.rig.keeper(0).socket}"
    reader, other = source.reader(address), source.reader(address, four())
    further: list[PeerLine] = []
    try:
        further += [reader._dial() for _ in range(MAX_FURTHER_LINES)]
        with pytest.raises(KeeperError, match="further lines already"):
            reader._dial()
        seal = source.seal(other)
        target = bytearray(seal.length)
        other.read_into(source.version, seal, memoryview(target))
        assert bytes(target) == source.images[source.version]
        assert len(other._lines) == 1, "by the one that it had"
        further.pop().close()
        eventually(lambda: dialled(reader, further), TIMEOUT_S)
    finally:
        for line in (*further, reader, other):
            line.close()


def dialled(reader: image_transfer.PeerReader, further: list[PeerLine]) -> bool:
    try:
        further.append(reader._dial())
    except HoldfastError:
        return False
    return True


class Line:
    """A connection as the sender sees it."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.is_cut = False
        self.channel = SimpleNamespace(abort=self._abort)

    @property
    def greeted(self) -> Hello:
        assert self.hello is not None
        return self.hello

    def _abort(self) -> None:
        self.is_cut = True


@contextmanager
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any], list[float]]]:
    """The sender's side with two lines of a transfer and one of another, all of one node; its clock; what was let go."""
    now = [100.0]
    monkeypatch.setattr(peer_requests, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = SimpleNamespace(
        lock=threading.RLock(), assembly=None, incarnation=1, unpin=lambda held, _: held.append("free")
    )
    windows = Windows(lambda _: None, lambda *_: None, lambda _: False, lambda _: None)
    peers: Any = PeerRequests(state, lambda: None, Pace(0), windows)  # type: ignore[arg-type]
    lines = [Line(), Line(), Line()]
    for line, transfer in zip(lines, (7, 7, 8), strict=True):
        peers.attach(line, Hello(job="j", role=KEEPER, node=1, incarnation=1, transfer=transfer))
    yield peers, lines, now


class Held(list[str]):
    rank, replica = 0, False


def test_a_transfer_stalls_when_nothing_moves_on_any_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with transfers(monkeypatch) as (peers, lines, now):
        slot = Held()
        mine, other = peers._transfers[lines[0]], peers._transfers[lines[2]]
        assert peers._transfers[lines[1]] is mine is not other
        for transfer in (mine, other):
            transfer.held.append(slot)
            transfer.moved_s = now[0]
        now[0] += STALL_S
        peers._transfers[lines[1]].moved_s = now[0]  # the further line moves, the first has nothing to do
        now[0] += 0.1
        peers.yield_slots(())
        assert [line.is_cut for line in lines] == [False, False, True]
        now[0] += STALL_S
        peers.yield_slots(())
        assert all(line.is_cut for line in lines)
        assert slot == ["free", "free"]


def test_with_its_first_line_a_transfer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with transfers(monkeypatch) as (peers, lines, _):
        slot = Held()
        peers._transfers[lines[0]].held.append(slot)
        peers.gone(lines[1])
        assert (lines[0].is_cut, slot) == (False, [])
        peers.attach(lines[1], Hello(job="j", role=KEEPER, node=1, incarnation=1, transfer=7))
        peers.gone(lines[0])
        assert (lines[1].is_cut, slot) == (True, ["free"])
        peers.gone(lines[1])
        peers.gone(lines[2])
        assert not peers._transfers


def test_a_line_that_comes_later_is_not_held_back_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with transfers(monkeypatch) as (peers, lines, _):
        transfer = peers._transfers[lines[0]]
        peers._turns(transfer, lines[0]).held_s = 1.25
        assert peers._turns(transfer, lines[1]).held_s == 1.25
        assert peers._turns(peers._transfers[lines[2]], lines[2]).held_s == 0.0


# --- how many


def learnt(monkeypatch: pytest.MonkeyPatch, seconds_of_a_chunk: Callable[[int], float], num_chunks: int = 400) -> int:
    """Lines at the end of a part, where a chunk takes so long with so many of them."""
    now = [0.0]
    monkeypatch.setattr(image_transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(image_format, "CHUNK_BYTES", 1)
    part = ImagePart(Version(1, 1), Seal("b", num_chunks, ""), 0, memoryview(bytearray(num_chunks)))
    count = count_lines()
    deal = image_transfer._Deal(part, count, MOST_LINES, "here", lambda _: None)
    dealt: dict[int, Iterator[int]] = {}
    under_way: list[tuple[float, int, int]] = []

    def go_on(line: int) -> None:
        chunk = next(dealt[line], None)
        if chunk is None:
            deal.end()
            del dealt[line]
        else:
            heapq.heappush(under_way, (now[0] + seconds_of_a_chunk(len(dealt)), line, chunk))

    while True:
        while deal.is_short(len(dealt)):
            line = len(dealt)
            dealt[line] = deal.chunks(line)
            deal.begin()
            go_on(line)
        if not under_way:
            break
        now[0], line, chunk = heapq.heappop(under_way)
        deal.came(chunk, "")
        go_on(line)
    assert len(deal.digests()) == num_chunks
    return count.now


def test_what_came_of_a_chunk_before_a_trial_is_not_counted_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(image_transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(image_format, "CHUNK_BYTES", 1)
    found: list[tuple[int, float]] = []
    count: Any = SimpleNamespace(now=2, learn=lambda *trial: found.append(trial))
    deal = image_transfer._Deal(
        ImagePart(Version(1, 1), Seal("b", 100, ""), 0, memoryview(bytearray(100))), count, 2, "here", lambda _: None
    )
    for _ in range(2):
        deal.begin()
    for chunk in range(2):  # most of these was here before the second line came
        deal.came(chunk, "")
    for chunk in range(2, 10):
        now[0] += 0.5
        deal.came(chunk, "")
    assert found == [(2, 2.0)] * 2


def test_where_each_line_is_limited_as_many_as_may_be_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert learnt(monkeypatch, lambda _: 1.0) == MOST_LINES


def test_where_all_share_one_limit_one_line_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert learnt(monkeypatch, float, num_chunks=40) == 1


def test_where_two_fill_the_way_two_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert learnt(monkeypatch, lambda lines: max(1.0, lines / 2), num_chunks=60) == 2


# --- real keepers

# Of an image that goes by two lines: the second comes with the third chunk, and a trial of both takes one more than is left.
TWO_LINES_BYTES = 8 * CHUNK_BYTES - (64 << 10)


def replica_slots(rig: Rig, node: int, version: Version) -> list[dict[str, Any]]:
    return [slot for slot in rig.status(node)["replicas"] if slot["version"] == str(version)]


def num_lines(pid: int) -> int:
    """Connections of a process over TCP, its reports to the coordinator included."""
    return len([found for found in psutil.Process(pid).net_connections("tcp") if found.status == "ESTABLISHED"])


def test_several_lines_keep_to_the_bandwidth_and_a_node_that_dies_meanwhile_costs_one_version(
    make_rig: MakeRig, secret_file: Path
) -> None:
    rig = make_rig(
        num_nodes=2, own_bytes=TWO_LINES_BYTES, listen="127.0.0.1", secret_file=str(secret_file),
        replicate_bandwidth=f"{6 * CHUNK_BYTES}", memory_budget="2GiB",
    )  # fmt: skip
    trainers = rig.start()
    receiver, sender = (rig.pid_of(rig.keeper(node)) for node in (1, 0))
    first = save_all(trainers, 1)
    eventually(lambda: replica_slots(rig, 1, first))
    alone = num_lines(receiver)
    eventually(lambda: num_lines(receiver) > alone)
    reached(trainers, first, Level.REPLICATED)
    facts = rig.status(1)["replication"]
    assert facts["last_seconds"] >= 0.9 * facts["last_bytes"] / (6 * CHUNK_BYTES)

    second = save_all(trainers, 2)
    eventually(lambda: num_lines(receiver) > alone and replica_slots(rig, 1, second))
    os.kill(sender, signal.SIGKILL)
    eventually(lambda: not replica_slots(rig, 1, second))
    assert [slot["state"] for slot in replica_slots(rig, 1, first)] == ["sealed"]
    for trainer in trainers:
        trainer.client.close()
    rig.next_incarnation(first)
    back = [reborn(rig, rank) for rank in range(2)]
    known = facts_of(rig, back[0].client.inventory())
    found = [restored(trainer, known) for trainer in back]  # every byte compared
    assert [version for version, _ in found] == [first, first]
    assert version_choice.Source.PEER in found[0][1].values()
