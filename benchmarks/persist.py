"""How fast a version becomes durable: python -m benchmarks.persist [--quick] [--json]

`durable_throughput_ratio`: bytes per second from `save(level="durable")` until the manifest is committed, over a plain
buffered write + fsync of the same bytes into one file in the same directory. The way to durable includes the copy, the
digests, all files, every fsync of file and directory, the commit and retention. Told besides: the same over a plain
write with O_DIRECT, which is the fastest this disk can do.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from benchmarks import measure
from benchmarks.measure import MIB, PlainCopy, Report, timed

import holdfast

CHUNK_BYTES = 8 * MIB


def plain_write(path: Path, data: memoryview, *, direct: bool) -> None:
    """Writes and synchronises one new file."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, flags, 0o600)
    try:
        offset = 0
        length = len(data) // MIB * MIB  # O_DIRECT wants whole blocks; what is cut off is below a MiB
        while offset < length:
            offset += os.pwrite(descriptor, data[offset : min(offset + CHUNK_BYTES, length)], offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    options = measure.options("persist", "How fast a version becomes durable.").parse_args()
    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    report = Report("persist", options.quick, options.json)
    try:
        model, optimizer = measure.gpt_of(options.mib * MIB)
        measure.training(model, optimizer)()
        copy = PlainCopy(measure.state_tensors(model, optimizer))
        config = measure.only_on_demand(home)
        rounds = 5 if options.quick else 15
        with holdfast.Checkpointer(
            home / "job", model=model, optimizer=optimizer, overlap=False, config=config
        ) as checkpointer:
            checkpointer.restore()
            steps = iter(range(1, 1000))

            def durable() -> None:
                checkpointer.save(next(steps), level="durable").wait("durable", timeout_s=120)

            durable()
            ours, buffered, direct = [], [], []
            for _ in range(rounds):
                ours.append(timed(durable))
                buffered.append(timed(lambda: plain_write(home / "plain", copy.view, direct=False)))
                direct.append(timed(lambda: plain_write(home / "plain", copy.view, direct=True)))
        mib_per_s = options.mib / statistics.median(ours)
        report.figure(
            "durable_throughput_ratio", measure.ratio(buffered, ours), "ratio", ">= 0.85", mib_per_s=round(mib_per_s)
        )
        report.figure("durable_throughput_ratio:direct", measure.ratio(direct, ours), "ratio")
        report.save()
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
