"""What keeps one node from its hardware: python -m benchmarks.node [--quick] [--json]

`slot_populate_ratio`: a new slot as a keeper makes it, by all its threads, over a plain anonymous mapping of the same size
that one thread populates by writing. `prepare_seconds` (told): from the question of a rank for two slots until it is
granted, and until both are mapped here. `call_minus_copy_ms`: what a `save()` costs beyond a plain copy of the same
tensors, with `overlap=False`, for 300, 3,000 and 10,000 tensors of 4 KiB. `first_save_ratio`: the first such save of a
job over the median of the later ones. `gather_ms` (told): looking at the state alone, its median and its worst.
`question_p99_ms` (told): a question to the keeper of a rank that does nothing else.
`busy_question_p99_ms:W`: the same while a replica travels, to its sender and its receiver, the worse of both: `plain` on Unix
sockets, `tls`, and `lines` by LINES limited lines under TLS. Where the system allows it, keepers and asker are real-time
processes, so that other work of the machine does not count (`alone`). The same without a replica is told.

Where a store gives each stream STREAM_MIB_PER_S: `write_stream_share` and `read_stream_share` are the rate of one bundle by at
most 8 streams over that of 8 such streams (the first, which begins with 8, and the best are told). `durable_ratio_to_dcp` is the
seconds of a save to durable, by as many streams as are learnt, over those of DCP's FileSystemWriter with 8 threads, in turn.

Where a network gives each connection LINE_MIB_PER_S (SO_MAX_PACING_RATE on loopback, under TLS): `replicate_lines_gain` is the
rate of replicas from keeper to keeper by at most LINES lines over that by one, in turn. The first version of each, in which
the lines are learnt, is told.

`load_ratio_to_torch_load`: `restore()` of a rank whose keeper runs and holds nothing, from files in the page cache into
tensors that exist, over `torch.load(mmap=True)` and a copy of the same bytes into the same tensors, in turn. `straight`:
where the keeper has no memory for slots, so that the rank itself reads what goes into its tensors.
"""

from __future__ import annotations

import io
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from benchmarks import measure, pace, replicate
from benchmarks.measure import MIB, Report, timed
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

import holdfast
from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Level, Version
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.testing.faults.rig import Rig
from holdfast.tiers.backends.parallel_streams import StreamCount
from holdfast.tiers.format import image as image_format
from holdfast.tiers.memory.page_populate import Populator, share_of_cores
from holdfast.tiers.memory.slots import Slot
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import BundleFile
from holdfast.tiers.storage.version_store import open_storage

_MADV_POPULATE_WRITE = 23
TENSOR_BYTES = 4096
LARGE_MIB = 3072
STREAM_MIB_PER_S, STREAMS, STREAMED_MIB = 64, 8, 256
LINE_MIB_PER_S, LINES = 64, 4


def populate(report: Report, num_bytes: int, rounds: int) -> None:
    """Slots against plain memory, in turn."""

    def slot() -> None:
        populator = Populator(share_of_cores())
        made = Slot.promise(num_bytes)
        populator.fill(made)
        made.close()
        populator.stop()

    def plain() -> None:
        with mmap.mmap(-1, num_bytes) as memory:
            memory.madvise(_MADV_POPULATE_WRITE)

    pairs = [(timed(slot), timed(plain)) for _ in range(rounds)]
    ratio = statistics.median(one / other for one, other in pairs)
    per_gib = statistics.median(one for one, _ in pairs) * (1 << 30) / num_bytes
    report.figure("slot_populate_ratio", ratio, "ratio", "<= 1.3", mib=num_bytes // MIB, seconds_per_gib=per_gib)


def prepare(report: Report, home: Path, num_bytes: int, num_questions: int) -> None:
    """A rank asks a real keeper for memory, and then how it is."""
    rig = Rig(home, memory_budget=str(8 * num_bytes))
    try:
        (trainer,) = rig.start(prepare=False)
        granted = timed(lambda: trainer.client.prepare(num_bytes, 2, num_ready=0))
        mapped = granted + timed(lambda: trainer.client.prepare(num_bytes, 2))
        report.figure("prepare_seconds:granted", granted, "s", mib=num_bytes // MIB)
        report.figure("prepare_seconds:mapped", mapped, "s", mib=num_bytes // MIB)
        asked = sorted(timed(trainer.client.status) for _ in range(num_questions))
        report.figure("question_p99_ms", 1e3 * asked[int(0.99 * len(asked))], "ms", median=1e3 * asked[len(asked) // 2])
    finally:
        rig.close()


class Many(nn.Module):
    """So many parameters of 4 KiB."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(TENSOR_BYTES // 4) for _ in range(count))


def many_tensors(report: Report, home: Path, count: int, rounds: int) -> None:
    """Saves of very many small tensors against a plain copy of them, in turn."""
    model = Many(count)
    sources = [parameter.detach() for parameter in model.parameters()]
    copies = list(torch.ones(count, TENSOR_BYTES // 4).unbind())
    checkpointer = holdfast.Checkpointer(
        home / f"job{count}", model=model, overlap=False, config=measure.only_on_demand(home)
    )
    checkpointer.restore()
    saves, beyond, looks = [], [], []
    for step in range(rounds):
        seconds = timed(lambda step=step: checkpointer.save(step))
        saves.append(seconds)
        beyond.append(seconds - timed(lambda: torch._foreach_copy_(copies, sources)))
        assert checkpointer._run is not None
        looks.append(timed(checkpointer._run.state.gather))
        checkpointer._run.saver.settle()
    checkpointer.abandon()
    later = statistics.median(saves[1:])
    report.figure(
        f"call_minus_copy_ms:{count}", 1e3 * statistics.median(beyond[1:]), "ms", "<= 2", saves_ms=1e3 * later
    )
    report.figure(f"first_save_ratio:{count}", saves[0] / later, "ratio", "<= 1.5")
    report.figure(f"gather_ms:{count}", 1e3 * statistics.median(looks), "ms", worst_ms=1e3 * max(looks))


def stream_shares(report: Report, home: Path, rounds: int) -> None:
    """One bundle by at most eight of the library's own streams, to storage and back, each limited."""
    data = mmap.mmap(-1, STREAMED_MIB * MIB)
    data[:] = os.urandom(MIB) * STREAMED_MIB
    seal = image_format.seal("all", data)
    back = memoryview(mmap.mmap(-1, len(data)))
    storage = open_storage(home, Events(), encryption=KeySource(""))
    storage.bundles._readers = StreamCount(most=STREAMS)
    storage._backend._streams = StreamCount(most=STREAMS)  # type: ignore[attr-defined]
    storage.claim()
    end = pace.limit_streams(STREAM_MIB_PER_S * MIB)
    try:
        rates: dict[str, list[float]] = {"write": [], "read": []}
        for number in range(rounds):
            version, ref = Version(1, number + 1), BundleRef("all", (0,), 0, 1, 0, "")
            write = partial(storage.bundles.write, version, ref, seal, memoryview(data), stamp=make_stamp(1))
            writing = timed(write)
            file = BundleFile.of(ref, seal, "")
            reading = timed(partial(storage.bundles.read_into, version, file, back))
            assert back == data
            rates["write"].append(STREAMED_MIB / writing)
            rates["read"].append(STREAMED_MIB / reading)
    finally:
        end()
    for way, found in rates.items():
        shares = [rate / (STREAMS * STREAM_MIB_PER_S) for rate in found]
        report.figure(
            f"{way}_stream_share", statistics.median(shares), "ratio", ">= 0.75", first=shares[0], best=max(shares)
        )


class SlowFiles(FileSystem):
    """DCP's files, each limited as a stream."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with pace.SlowWriter(path, STREAM_MIB_PER_S * MIB) if mode == "wb" else open(path, mode) as file:
            yield file


def durable(report: Report, home: Path, rounds: int) -> None:
    """Saves to durable against PyTorch's own writer, in turn; the streams of both are limited."""
    model = nn.ParameterList(torch.rand(8 * MIB // 4) for _ in range(STREAMED_MIB // 8))
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    root, config = home / "job", measure.only_on_demand(home)
    root.mkdir(parents=True)
    pace.start_keeper(str(root), config, STREAM_MIB_PER_S * MIB)
    steps = iter(range(1, 1000))

    def theirs() -> None:
        writer = FileSystemWriter(home / f"dcp{next(steps)}", thread_count=STREAMS)
        writer.fs = SlowFiles()
        dcp.save(state, storage_writer=writer, no_dist=True)

    with holdfast.Checkpointer(root, model=model, overlap=False, config=config) as checkpointer:
        checkpointer.restore()

        def ours() -> None:
            checkpointer.save(next(steps), level="durable").wait("durable", timeout_s=120)

        first = timed(ours)
        pairs = [(timed(ours), timed(theirs)) for _ in range(rounds)]
    report.figure(
        "durable_ratio_to_dcp",
        statistics.median(one / other for one, other in pairs),
        "ratio",
        "<= 0.8",
        seconds=statistics.median(one for one, _ in pairs),
        first_seconds=first,
    )


def replicate_lines(report: Report, home: Path, mib: int, rounds: int) -> None:
    """Replicas by several limited lines and by one, in turn; and questions to keepers meanwhile."""
    home.mkdir(parents=True)
    secret = home / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())
    network = {"listen": "127.0.0.1", "secret_file": str(secret)}
    for name, way in (("plain", {}), ("tls", network)):
        with replicate.pair_in(home / name, mib * MIB, way) as pair:
            questions(report, name, pair, rounds)

    def keepers(most: int) -> AbstractContextManager[replicate.Pair]:
        limit = f"connections:{LINE_MIB_PER_S * MIB}:{most}"
        return replicate.pair_in(home / str(most), mib * MIB, network, partial(pace.start_keeper, line=limit))

    with keepers(1) as one, keepers(LINES) as many:
        firsts = [pair.replicate() / MIB for pair in (one, many)]
        many.replicate()  # learnt by now, or nearly
        pairs = [(many.replicate() / MIB, one.replicate() / MIB) for _ in range(rounds)]
        questions(report, "lines", many, rounds)
    report.figure(
        "replicate_lines_gain",
        statistics.median(several / single for several, single in pairs),
        "ratio",
        ">= 3.5",
        mib=mib,
        mib_per_s=[round(statistics.median(found)) for found in zip(*pairs, strict=True)],
        first_gain=firsts[1] / firsts[0],
    )


def questions(report: Report, name: str, pair: replicate.Pair, rounds: int) -> None:
    """A rank of each of two keepers asks while a replica travels between them, and while none does."""
    pids = [client.welcome.pid for client in pair.clients]
    pair.replicate()  # its threads exist
    told = pair.clients[0].announced
    busy: tuple[list[float], ...] = ([], [])
    idle: tuple[list[float], ...] = ([], [])

    def ask(asked: list[float], client: KeeperClient, is_over: Callable[[], bool]) -> None:
        while not is_over():
            asked.append(timed(client.status))
            time.sleep(0.001)

    with measure.undisturbed(pids) as alone:
        for which, client in [*enumerate(pair.clients)] * rounds:
            deadline = time.monotonic() + 0.25
            ask(idle[which], client, lambda deadline=deadline: time.monotonic() > deadline)
            version = pair.save()
            told.wait(version, Level.CAPTURED, replicate.WAIT_S)
            ask(busy[which], client, lambda version=version: told.level(version)[0] >= Level.REPLICATED)

    def p99_ms(found: tuple[list[float], ...]) -> list[float]:
        return [round(1e3 * sorted(asked)[int(0.99 * len(asked))], 3) for asked in found]

    during = p99_ms(busy)
    report.figure(
        f"busy_question_p99_ms:{name}",
        max(during),
        "ms",
        "<= 1",
        sender_and_receiver=during,
        idle=p99_ms(idle),
        questions=[len(asked) for asked in busy],
        alone=alone,
    )


def load(report: Report, home: Path, mib: int, rounds: int, *, straight: bool = False) -> None:
    """Restores from storage against PyTorch's own reading of the same bytes, in turn. `straight`: without memory for slots."""
    model = nn.ParameterList(torch.rand(8 * MIB // 4) for _ in range(mib // 8))
    live = {name: parameter.detach() for name, parameter in model.named_parameters()}
    root, config = home / "job", measure.only_on_demand(home)
    config = replace(config, memory_budget="100KB") if straight else config
    home.mkdir(parents=True)
    torch.save(live, home / "stock.pt")
    with holdfast.Checkpointer(root, model=model, overlap=False, config=config) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1, level="durable").wait("durable", timeout_s=240)
    parts: list[str] = []

    def ours() -> float:
        ensure_keeper(str(root), config)
        with holdfast.Checkpointer(root, model=model, overlap=False, config=config) as checkpointer:
            seconds = timed(checkpointer.restore)
            found = checkpointer.last_restore
            assert found is not None
            assert found.bytes.keys() == {"storage"}, found
            parts.append(", ".join(f"{name} {1e3 * took:.0f}" for name, took in found.seconds.items()))
        return seconds

    def theirs() -> float:
        return timed(lambda: [live[n].copy_(t) for n, t in torch.load(home / "stock.pt", mmap=True).items()])

    both = measure.paired(ours, theirs, rounds)
    seconds, torch_seconds = (statistics.median(found) for found in both)
    report.figure(
        f"load_ratio_to_torch_load:{mib}{':straight' * straight}",
        measure.ratio(*both),
        "ratio",
        "<= 1.2",
        seconds=seconds,
        torch_seconds=torch_seconds,
        last_ms=parts[-1],
    )


def main() -> None:
    """Prints and keeps the figures."""
    options = measure.options("node", __doc__ or "").parse_args()
    report = Report("node", options.quick, options.json)
    home = Path(tempfile.mkdtemp(prefix="hf-", dir=options.dir))
    try:
        size = min(options.mib * MIB, measure.available_bytes() // 8)
        populate(report, size, 5 if options.quick else 15)
        prepare(report, home / "p", size // 2, 200 if options.quick else 2000)
        stream_shares(report, home / "s", 4 if options.quick else 8)
        durable(report, home / "d", 3 if options.quick else 7)
        replicate_lines(report, home / "r", min(options.mib, 256), 3 if options.quick else 7)
        load(report, home / "l", options.mib, 4 if options.quick else 10)
        load(report, home / "n", options.mib, 4 if options.quick else 10, straight=True)
        if not options.quick and measure.available_bytes() > 14 * LARGE_MIB * MIB // 3:
            load(report, home / "m", LARGE_MIB, 4)
        for count in (300, 3_000, 10_000):
            many_tensors(report, home, count, 12 if options.quick else 40)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    report.save()


if __name__ == "__main__":
    main()
