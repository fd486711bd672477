"""Real checkpoints for the commands to look at, written by the storage room itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
from holdfast.base.events import Events
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.model import BundleRef, Extent, Shard, Topology, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.format import values
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def holdfast() -> Run:
    """Runs the command in a process of its own, as a user does; forked, with what it starts: an import each would take longer."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast.cli.cli", *map(str, arguments)]
        return forked.run(command, capture_output=True, text=True, timeout=60, warm_children=True)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two committed versions of a job of two ranks: a twin tensor of 4 x 3 floats, and a step count as value."""
    root = tmp_path / "checkpoints"
    storage = open_storage(root, Events())
    job = storage.claim()
    storage.incarnations.register()
    for step in (10, 20):
        commit(storage, job, Version(1, step))
    return root


def commit(storage: Storage, job: str, version: Version) -> None:
    """Writes one version as the keeper of node 0 would."""
    topology = Topology(("a",), (0, 0))
    weight = Shard("model.weight", "F32", (4, 3), Extent((0, 0), (4, 3)), (0, 1))
    bundles = plan_bundles([weight], values_of=[(0, 1)], topology=topology)
    stamp = make_stamp(version.incarnation)
    files = []
    for bundle in bundles:
        raw = image_format.pad_values(values.encode({"trainer.step": version.step})) if bundle.has_values else b""
        plan = image_format.plan_image(bundle, len(raw))
        image = bytearray(plan.length)
        image[: len(plan.header)] = plan.header
        for offset, size in plan.spans.values():
            image[offset : offset + size] = bytes(version.step % 256 for _ in range(size))
        if plan.values_span:
            image[plan.values_span[0] :] = raw
        ref = BundleRef(
            bundle.bundle_id, bundle.ranks, bundle.index, bundle.count, bundle.num_bytes, fingerprint(bundle)
        )
        seal = image_format.seal(bundle.bundle_id, image)
        files.append(storage.bundles.write(version, ref, seal, memoryview(image), stamp=stamp))
    name, length, digest = storage.write_part(version, 0, files, stamp=stamp)
    storage.commit(Manifest(version, job, 2, "f" * 32, None, {name: (length, digest)}), stamp=stamp)
