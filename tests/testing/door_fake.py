"""A training script as the contract suite of doors sees it, without torch: quick, and with bugs on demand. No test.

python door_fake.py ROOT --ranks N --steps N [--bug NAME]: state is one number that every step changes; a version holds
it in a real file of the storage room, for all ranks alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
from pathlib import Path

from holdfast.base import config
from holdfast.base.errors import HoldfastError, MismatchError
from holdfast.base.events import Events
from holdfast.core.layout.bundles import fingerprint, plan_bundles
from holdfast.core.model import BundleRef, Extent, Shard, Topology, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.version_store import Storage, open_storage

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shape", type=int, default=LENGTH)
    parser.add_argument("--bug", default="")
    options = parser.parse_args()
    off = config.disabled() and options.bug != "cannot be switched off"
    storage = None if off else open_storage(options.root, Events())
    start, number, job = (0, 1, "") if storage is None else restore(storage, options)
    for rank in range(options.ranks):
        say(rank=rank, start=start)
    say(rank=0, at=start, whole=digest(number + (options.bug == "another layout is loaded wrong") * options.ranks))
    for step in range(start, options.steps):
        number = number * 31 + step + (options.bug == "changes numbers" and not off)
        for rank in range(options.ranks):
            say(rank=rank, step=step, digest=digest(number))
        if storage is not None and not (options.bug == "saves seldom" and step % 4):
            commit(storage, job, Version(1, step), number, options)
    say(rank=0, at=options.steps, whole=digest(number))


def restore(storage: Storage, options: argparse.Namespace) -> tuple[int, int, str]:
    """Step, number, job id."""
    job = storage.claim()
    for version in reversed(storage.versions() if options.bug != "starts afresh" else []):
        file = storage.manifest(version).bundles[0]
        try:
            if options.bug != "believes files":
                storage.bundles.verify(version, file)
        except HoldfastError:
            continue
        data = (options.root / str(version) / file.file).read_bytes()
        if file.ref.num_bytes != 4 * options.shape and options.bug != "takes any model":
            raise MismatchError(f"saved {file.ref.num_bytes} bytes", remedy="build the model that was saved")
        number = struct.unpack("<q", data[-8:])[0] if options.bug != "half a state" else 1
        return version.step + 1, number, job
    if not storage.incarnations.highest():
        storage.incarnations.register()
    return 0, 1, job


def commit(storage: Storage, job: str, version: Version, number: int, options: argparse.Namespace) -> None:
    """A version of one tensor, whose last bytes are the number."""
    ranks = tuple(range(options.ranks)) if options.bug != "twins are not known" else (0,)
    shape = (options.shape,)
    shard = Shard("model.weight", "F32", shape, Extent((0,), shape), ranks)
    (bundle,) = plan_bundles([shard], values_of=[], topology=Topology(("a",), (0,) * options.ranks))[:1]
    image = bytearray(image_format.plan_image(bundle, 0).length)
    header = image_format.plan_image(bundle, 0).header
    image[: len(header)] = header
    # Bytes in the middle count too, so that damage there is damage to the state.
    image[-8 - 4 * options.shape + 8 :] = b"\7" * (4 * options.shape - 8) + struct.pack("<q", wrapped(number))
    ref = BundleRef(bundle.bundle_id, bundle.ranks, bundle.index, bundle.count, bundle.num_bytes, fingerprint(bundle))
    stamp = make_stamp(version.incarnation)
    file = storage.bundles.write(
        version, ref, image_format.seal(bundle.bundle_id, image), memoryview(image), stamp=stamp
    )
    name, length, told = storage.write_part(version, 0, [file], stamp=stamp)
    manifest = Manifest(version, job, options.ranks, "f" * 32, None, {name: (length, told)})
    storage.commit(manifest, stamp=stamp)


def wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def digest(number: int) -> str:
    return hashlib.blake2b(struct.pack("<q", wrapped(number)), digest_size=8).hexdigest()


def say(**facts: object) -> None:
    print(f"door {json.dumps(facts)}", flush=True)


if __name__ == "__main__":
    main()
