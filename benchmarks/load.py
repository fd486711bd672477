"""Loading from storage by 1, 2, 4 and 8 ranks: python -m benchmarks.load [--quick] [--json]

Every rank stands on a node of its own with its own keeper, all hold the same state (data parallel), and no memory holds
anything. No trainer runs: one thread per rank asks its keeper, which is what a restore waits for.

- `storage_read_amplification:N`: bytes read from storage by all keepers over the bytes of the state. Goal 1.
- `load_seconds:N`: until every rank's node holds the whole state, proved; includes handing on.
- `dcp_load_seconds:N`: `torch.distributed.checkpoint.load` of the same version by its own reader (HuggingFaceStorageReader) in N
  processes' worth of loads, one after the other in one process, each reading all: its amplification is N.

All keepers share one machine here, so passing on costs the cores that reading needs; on a cluster it does not.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from benchmarks import measure
from benchmarks.measure import MIB, Report
from torch.distributed.checkpoint import HuggingFaceStorageReader

from holdfast.base.config import Config
from holdfast.base.events import Events
from holdfast.core.bundles import fingerprint, plan_bundles
from holdfast.core.lineage import Lineage
from holdfast.core.model import BundleRef, Extent, Shard, Topology, Version
from holdfast.core.recovery import Facts, Fetch, Stored, choose_version, fetches
from holdfast.node.client import Assembly, KeeperClient
from holdfast.node.start import ensure_keeper
from holdfast.tiers import format as image_format
from holdfast.tiers.manifest import Manifest
from holdfast.tiers.registry import make_stamp
from holdfast.tiers.storage import Storage, open_storage

TIMEOUT_S = 120.0
COLUMNS = 1024


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
        files.append(storage.write_bundle(version, ref, seal, memoryview(image), stamp=stamp))
    name, length, digest = storage.write_part(version, 0, files, stamp=stamp)
    root = Manifest(version, storage.job_id(), world, "0123456789abcdef", None, {name: (length, digest)})
    storage.commit(root, stamp=stamp)
    return storage.manifest(version)


def load(home: Path, world: int, num_bytes: int, report: Report) -> None:
    """One world size: fresh keepers, one load by all ranks."""
    root = str(home / f"ck{world}")
    storage = open_storage(root, Events())
    job = storage.claim()
    incarnation = storage.register_incarnation()
    version = Version(incarnation, 1)
    manifest = write(storage, version, world, num_bytes)
    topology = Topology(tuple(f"n{rank}" for rank in range(world)), tuple(range(world)))
    configs = [Config(runtime_dir=str(home / "rt"), node_label=label, linger_s=30.0) for label in topology.nodes]
    places = [ensure_keeper(root, config) for config in configs]
    assembly = Assembly(incarnation, root, job, topology, tuple(place.address for place in places), lineage=())
    clients = [KeeperClient.connect(place.socket, job=place.job, rank=rank) for rank, place in enumerate(places)]
    try:
        for client in clients:
            client.assemble(assembly)
        plans = plan(manifest, version, topology)
        started = time.perf_counter()
        threads = [
            threading.Thread(target=c.obtain, args=(version, p), kwargs={"timeout_s": TIMEOUT_S})
            for c, p in zip(clients, plans, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        read = sum(client.status()["counters"].get("storage_read_bytes", 0) for client in clients)
        report.figure(f"storage_read_amplification:{world}", read / manifest.num_bytes, "x", "<= 1.001")
        report.figure(f"load_seconds:{world}", seconds, "s")
        report.figure(f"dcp_load_seconds:{world}", stock(Path(root) / str(version), num_bytes, world), "s")
    finally:
        for client in clients:
            pid = client.pid
            client.close()
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + TIMEOUT_S
        while any(place.socket.exists() for place in places) and time.monotonic() < deadline:
            time.sleep(0.05)


def plan(manifest: Manifest, version: Version, topology: Topology) -> list[tuple[Fetch, ...]]:
    """What every rank fetches."""
    table = tuple(file.ref for file in manifest.bundles)
    seals = {file.ref.bundle_id: file.seal for file in manifest.bundles}
    facts = Facts((), {}, {version: Stored(version, topology.world_size, table, seals)}, Lineage(), topology)
    choice = choose_version(facts, wanted=version).value
    assert choice is not None
    return [fetches(choice, rank, facts) for rank in range(topology.world_size)]


def stock(path: Path, num_bytes: int, world: int) -> float:
    """What stock PyTorch takes to load the same version, once per rank."""
    rows = num_bytes // 12 // 4 // COLUMNS
    state = {f"layer{i}": torch.zeros(rows, COLUMNS) for i in range(12)}
    started = time.perf_counter()
    for _ in range(world):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return time.perf_counter() - started


def main() -> None:
    """All world sizes."""
    parser: argparse.ArgumentParser = measure.options("load", __doc__ or "")
    options = parser.parse_args()
    num_bytes = (24 if options.quick else 192) * MIB
    report = Report("load", options.quick, options.json)
    with tempfile.TemporaryDirectory() as home:
        for world in (1, 2, 4, 8):
            load(Path(home), world, num_bytes, report)
    report.save()


if __name__ == "__main__":
    main()
