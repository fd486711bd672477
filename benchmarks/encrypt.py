"""What encryption at rest costs: python -m benchmarks.encrypt [--quick] [--json]

The same sealed image is written to storage, durably, and read back, plain and encrypted in turns.

- `encrypted_throughput_ratio`: bytes per second of encrypted writes over plain ones.
- `encrypted_throughput_ratio:read`: the same for reading into memory that is there already.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import MIB, Report, ratio, timed

from holdfast.base.events import Events
from holdfast.core.model import BundleRef, Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage


def main() -> None:
    options = measure.options("encrypt", "What encryption at rest costs.").parse_args()
    size = (64 if options.quick else min(options.mib, 512)) * MIB
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    report = Report("encrypt", options.quick, options.json)
    try:
        key = home / "key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        image, into = memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size))
        for at in range(0, size, 1 << 20):
            image[at : at + 1024] = os.urandom(1024)
        into[:] = image
        seal, version = image_format.seal("b", image), Version(1, 1)
        ref, stamp = BundleRef("b", (0,), 0, 1, size, "f"), make_stamp(1)

        def job(name: str, setting: str) -> Storage:
            storage = open_storage(home / name, Events(), encryption=KeySource(setting))
            storage.claim()
            return storage

        plain, secret = job("plain", ""), job("secret", str(key))
        files = [storage.bundles.write(version, ref, seal, image, stamp=stamp) for storage in (plain, secret)]
        rounds = 3 if options.quick else 9
        writes = measure.paired(
            lambda: timed(lambda: plain.bundles.write(version, ref, seal, image, stamp=stamp)),
            lambda: timed(lambda: secret.bundles.write(version, ref, seal, image, stamp=stamp)),
            rounds,
        )
        reads = measure.paired(
            lambda: timed(lambda: plain.bundles.read_into(version, files[0], into)),
            lambda: timed(lambda: secret.bundles.read_into(version, files[1], into)),
            rounds,
        )
        if into != image:
            measure.fail("what was read is not what was written")
        report.figure("encrypted_throughput_ratio", ratio(*writes), "ratio", mib=size // MIB)
        report.figure("encrypted_throughput_ratio:read", ratio(*reads), "ratio", mib=size // MIB)
        report.save()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
