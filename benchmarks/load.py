"""Loading from storage by 1, 2, 4 and 8 ranks: python -m benchmarks.load [--quick] [--json]

Every rank stands on a node of its own with its own keeper, all hold the same state (data parallel), and no memory holds
anything. No trainer runs: one thread per rank asks its keeper, which is what a restore waits for.

- `storage_read_amplification:N`: bytes read from storage by all keepers over the bytes of the state. Goal 1.
- `load_seconds:N`: until every rank's node holds the whole state, proved; includes handing on.
- `dcp_load_seconds:N`: `torch.distributed.checkpoint.load` of the same version by its own reader (HuggingFaceStorageReader) in N
  processes' worth of loads, one after the other in one process, each reading all: its amplification is N.

These read from the page cache. Then the same on storage of SLOW_MIB_PER_S that all ranks share (benchmarks.pace), as a
file server is shared, with N real processes for `torch.distributed.checkpoint.load` (gloo, FileSystemReader, every rank
reads its own), in turn:

- `slow_storage_load_ratio:N`: seconds of holdfast over seconds of dcp.load, median of the paired ratios. On our side too
  until every rank has copied the state out of its keeper's memory.
- `slow_storage_growth`: seconds of 8 ranks over seconds of one, told for both. What is read once does not grow.

Last, real ranks of one node that all want the same bundles, with their keeper (`benchmarks.load_together`):

- `load_together_ratio:N`: `restore()` of N ranks from files in the page cache over `torch.load(mmap=True)` and a copy in as many
  ranks, median of the paired ratios.
- `load_together_amplification:N`: bytes that they read from storage over those of the state. Goal 1.

All keepers share one machine here, so passing on costs the cores that reading needs; on a cluster it does not.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from benchmarks import measure, pace
from benchmarks.load_together import load_together
from benchmarks.measure import MIB, Report
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from holdfast.base.config import Config
from holdfast.base.events import Events
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.model import BundleRef, Extent, Shard, Topology, Version
from holdfast.core.recovery.version_choice import Facts, Fetch, Stored, choose_version, fetches
from holdfast.core.versions.lineage import Lineage
from holdfast.keeper.rpc.client import Assembly, KeeperClient
from holdfast.keeper.rpc.paths import RuntimePaths
from holdfast.keeper.rpc.spawn import ensure_keeper
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

TIMEOUT_S = 120.0
COLUMNS = 1024
WORLDS = (1, 2, 4, 8)
TOGETHER = (2, 4)
SLOW_MIB_PER_S = 32
SLOW_ROUNDS = 3
# Of the ratio: what is left of a rival's time if storage is all that counts and is read once, and a half of it more.
GOALS = {1: "", 2: "<= 0.75", 4: "<= 0.38", 8: "<= 0.19"}


class Job:
    """A checkpoint that `world` ranks on as many nodes hold, in a directory of its own."""

    def __init__(self, home: Path, world: int, num_bytes: int) -> None:
        self.root = str(home / f"ck{world}")
        self.runtime = str(home / "rt")
        self.storage = open_storage(self.root, Events())
        self.id = self.storage.claim()
        self.version = Version(self.storage.incarnations.register(), 1)
        self.manifest = write(self.storage, self.version, world, num_bytes)
        self.topology = Topology(tuple(f"n{rank}" for rank in range(world)), tuple(range(world)))

    def load(self, start: Callable[[str, Config], RuntimePaths]) -> tuple[float, float]:
        """Seconds for all ranks with fresh keepers, and bytes read from storage over those of the state."""
        places = [start(self.root, Config(runtime_dir=self.runtime, node_label=n, linger_s=30.0)) for n in self.nodes]
        incarnation = self.storage.incarnations.register()
        assembly = Assembly(
            incarnation, self.root, self.id, self.topology, tuple(place.address for place in places), lineage=()
        )
        clients = [KeeperClient.connect(place.socket, job=place.job, rank=rank) for rank, place in enumerate(places)]
        failed: list[BaseException] = []

        def bring(client: KeeperClient, plan: tuple[Fetch, ...]) -> None:
            try:
                for located in client.obtain(self.version, plan, timeout_s=TIMEOUT_S):
                    bytes(located.view)
            except BaseException as error:  # noqa: BLE001  raised below, by the thread that started this one
                failed.append(error)

        try:
            for client in clients:
                client.assemble(assembly)
            threads = [
                threading.Thread(target=bring, args=pair)
                for pair in zip(clients, plan(self.manifest, self.version, self.topology), strict=True)
            ]
            seconds = measure.timed(lambda: _all(threads))
            if failed:
                raise failed[0]
            read = sum(client.status()["counters"].get("storage_read_bytes", 0) for client in clients)
            return seconds, read / self.manifest.num_bytes
        finally:
            end(clients, places)

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.topology.nodes


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end(clients: list[KeeperClient], places: list[RuntimePaths]) -> None:
    """Ends the keepers and waits until they have cleared away."""
    for client in clients:
        pid = client.welcome.pid
        client.close()
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT_S
    while any(place.keeper_lock.exists() for place in places) and time.monotonic() < deadline:
        time.sleep(0.05)


def write(storage: Storage, version: Version, world: int, num_bytes: int) -> Manifest:
    """A version of twelve tensors that all ranks hold."""
    rows = num_bytes // 12 // 4 // COLUMNS
    ranks = tuple(range(world))
    shards = [Shard(f"layer{i}", "F32", (rows, COLUMNS), Extent((0, 0), (rows, COLUMNS)), ranks) for i in range(12)]
    topology = Topology(tuple(f"n{rank}" for rank in ranks), ranks)
    stamp, files = make_stamp(version.incarnation), []
    for bundle in plan_bundles(shards, values_of=[], topology=topology):
        plan = image_format.plan_image(bundle, 0)
        image = bytearray(plan.length)
        image[: len(plan.header)] = plan.header
        for start, size in plan.spans.values():
            image[start : start + size] = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
        seal = image_format.seal(bundle.bundle_id, image)
        ref = BundleRef(
            bundle.bundle_id, bundle.ranks, bundle.index, bundle.count, bundle.num_bytes, fingerprint(bundle)
        )
        files.append(storage.bundles.write(version, ref, seal, memoryview(image), stamp=stamp))
    name, length, digest = storage.write_part(version, 0, files, stamp=stamp)
    root = Manifest(version, storage.job_id(), world, "0123456789abcdef", None, {name: (length, digest)})
    storage.commit(root, stamp=stamp)
    return storage.manifest(version)


def plan(manifest: Manifest, version: Version, topology: Topology) -> list[tuple[Fetch, ...]]:
    """What every rank fetches."""
    table = tuple(file.ref for file in manifest.bundles)
    seals = {file.ref.bundle_id: file.seal for file in manifest.bundles}
    facts = Facts((), {}, {version: Stored(version, topology.world_size, table, seals)}, Lineage(), topology)
    choice = choose_version(facts, wanted=version).value
    assert choice is not None
    return [fetches(choice, rank, facts) for rank in range(topology.world_size)]


def empty_state(num_bytes: int) -> dict[str, torch.Tensor]:
    """What is loaded into."""
    rows = num_bytes // 12 // 4 // COLUMNS
    return {f"layer{i}": torch.zeros(rows, COLUMNS) for i in range(12)}


def stock(path: Path, num_bytes: int, world: int) -> float:
    """What stock PyTorch takes to load the same version, once per rank."""
    state = empty_state(num_bytes)
    started = time.perf_counter()
    for _ in range(world):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return time.perf_counter() - started


# --- storage that is slow


class PacedReader(FileSystemReader):
    """DCP's own reader, with every file behind the line."""

    def __init__(self, path: Path, line: pace.Line) -> None:
        super().__init__(path)
        self.fs = _PacedFiles(line)


class _PacedFiles(FileSystem):
    def __init__(self, line: pace.Line) -> None:
        super().__init__()
        self._line = line

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[pace.PacedFile]:
        assert mode == "rb"
        with pace.PacedFile(path, self._line) as file:
            yield file


class Rival:
    """Real ranks that load with torch.distributed.checkpoint, started once for all measurements."""

    def __init__(self, home: Path, num_bytes: int, line: pace.Line) -> None:
        self.path = home / "dcp"
        state = {name: torch.rand_like(tensor) for name, tensor in empty_state(num_bytes).items()}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path), no_dist=True)
        command = [sys.executable, "-m", "benchmarks.load", "--home", str(home), "--line", str(line.path)]
        command += ["--num-bytes", str(num_bytes), "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORLDS[-1])
        ]
        self._told(range(len(self.ranks)))

    def load(self, world: int) -> float:
        """Seconds until all of so many ranks have the state."""
        started = time.perf_counter()
        for rank in range(world):
            self._say(rank, f"{world}\n")
        self._told(range(world))
        return time.perf_counter() - started

    def close(self) -> None:
        """Ends the ranks."""
        for rank, process in enumerate(self.ranks):
            self._say(rank, "0\n")
            process.wait(TIMEOUT_S)

    def _say(self, rank: int, text: str) -> None:
        said = self.ranks[rank].stdin
        assert said is not None
        said.write(text)
        said.flush()

    def _told(self, ranks: range) -> None:
        for rank in ranks:
            told = self.ranks[rank].stdout
            if told is None or told.readline() != "ready\n":
                measure.fail(f"rank {rank} of dcp.load ended")


def rival_rank(options: argparse.Namespace) -> None:
    """One rank of Rival: a number on standard input is a load by so many ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.home}/meeting", rank=options.rank, world_size=WORLDS[-1]
    )
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    state, line = empty_state(options.num_bytes), pace.Line(options.line)
    while True:
        print("ready", flush=True)
        world = int(sys.stdin.readline() or 0)
        if not world:
            break
        reader = PacedReader(options.home / "dcp", line)
        dcp.load(state, storage_reader=reader, process_group=groups[world])
    dist.destroy_process_group()


def slow(home: Path, num_bytes: int, rounds: int, report: Report) -> None:
    """Both sides on slow storage, in turn."""
    line = pace.Line(home / "line")
    line.bound(0)
    rival = Rival(home, num_bytes, line)
    first: tuple[float, float] | None = None
    try:
        for world in WORLDS:
            job = Job(home / "slow", world, num_bytes)
            amplification: list[float] = []

            def load(job: Job = job, amplification: list[float] = amplification) -> float:
                seconds, read = job.load(lambda root, config: pace.start_keeper(root, config, line))
                amplification.append(read)
                return seconds

            line.bound(SLOW_MIB_PER_S * MIB)
            ours, theirs = measure.paired(load, lambda world=world: rival.load(world), rounds)
            line.bound(0)
            medians = statistics.median(ours), statistics.median(theirs)
            first = first or medians
            report.figure(
                f"slow_storage_load_ratio:{world}",
                measure.ratio(ours, theirs),
                "ratio",
                GOALS[world],
                seconds=round(medians[0], 3),
                dcp_seconds=round(medians[1], 3),
                amplification=round(max(amplification), 4),
            )
        for name, at in (("slow_storage_growth", 0), ("slow_storage_growth:dcp_load", 1)):
            report.figure(name, medians[at] / first[at], "x", "<= 1.5" if not at else "")
    finally:
        rival.close()


def main() -> None:
    """All world sizes."""
    parser: argparse.ArgumentParser = measure.options("load", __doc__ or "")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-bytes", type=int, help=argparse.SUPPRESS)
    for name in ("--home", "--line"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rival_rank(options)
        return
    num_bytes = (24 if options.quick else 192) * MIB
    report = Report("load", options.quick, options.json)
    with tempfile.TemporaryDirectory() as home:
        for world in WORLDS:
            job = Job(Path(home), world, num_bytes)
            seconds, read = job.load(ensure_keeper)
            report.figure(f"storage_read_amplification:{world}", read, "x", "<= 1.001")
            report.figure(f"load_seconds:{world}", seconds, "s")
            path = Path(job.root) / str(job.version)
            report.figure(f"dcp_load_seconds:{world}", stock(path, num_bytes, world), "s")
        slow(Path(home), (24 if options.quick else 64) * MIB, 1 if options.quick else SLOW_ROUNDS, report)
        mib, rounds = (64, 3) if options.quick else (options.mib, 7)
        for world in TOGETHER:
            found = load_together(Path(home) / f"together{world}", mib, world, rounds)
            ours, theirs = found["ours"], found["theirs"]
            report.figure(
                f"load_together_ratio:{world}",
                measure.ratio(ours, theirs),
                "ratio",
                "<= 1.2",
                mib=mib,
                seconds=round(statistics.median(ours), 3),
                torch_seconds=round(statistics.median(theirs), 3),
            )
            report.figure(f"load_together_amplification:{world}", found["read"], "x", "<= 1.001")
    report.save()


if __name__ == "__main__":
    main()
