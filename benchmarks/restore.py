"""How fast a rank comes back from its own memory: python -m benchmarks.restore [--quick] [--json]

A trainer saves (level "captured") and kills itself with SIGKILL; the next process, same state, calls `restore()`.

- `memory_restore_ratio`: `restore()` of a process whose tensors exist (it called `restore()` before), over a plain copy
  of the same bytes from pre-faulted memory into the same tensors, interleaved.
- `memory_restore_ratio:new_process`: the first `restore()` of a new process over the same copy: also finds the
  keeper, agrees on the version, maps memory it has never seen and creates the optimizer's moments.
- `storage_bytes_read`: what the keeper and the restore report count as read from storage.

- `memory_restore_ratio:512_mib`: the first of these for a small state: a restore also takes some 25 ms that do not depend
  on bytes (agreeing, and finding a place for each of 583 entries).

The state has 2 GiB where the machine has the memory for it (two slots, the tensors, the plain copy), else 1 GiB or 512 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmarks import measure
from benchmarks.measure import MIB, PlainCopy, Report, ratio, timed

import holdfast

SMALL_MIB = 512


def trainer(options: argparse.Namespace) -> None:
    """Saves and dies (`--part save`), or restores and reports (`--part restore`)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = measure.gpt_of(options.mib * MIB)
    config = measure.only_on_demand(options.dir)
    checkpointer = holdfast.Checkpointer(
        options.dir / "job", model=model, optimizer=optimizer, overlap=False, config=config
    )
    first = timed(checkpointer.restore)
    if options.part == "save":
        measure.training(model, optimizer)()
        checkpointer.save(1).wait("captured", timeout_s=60)
        os.kill(os.getpid(), signal.SIGKILL)
    copy = PlainCopy(measure.state_tensors(model, optimizer))
    again, copies = measure.paired(lambda: timed(checkpointer.restore), copy.back, options.rounds)
    report = checkpointer.last_restore
    facts = {
        "first": first,
        "again": again,
        "copies": copies,
        "bytes": dict(report.bytes),
        "version": str(report.version),
    }
    options.out.write_text(json.dumps(facts), encoding="utf-8")
    if options.last:
        checkpointer.close()
        return
    checkpointer.save(2).wait("captured", timeout_s=60)
    os.kill(os.getpid(), signal.SIGKILL)


def start(options: argparse.Namespace, part: str, out: Path, rounds: int, *, last: bool = False) -> None:
    """One trainer process to its end, which is a violent one except for the last."""
    command = [sys.executable, "-m", "benchmarks.restore", "--part", part, "--out", str(out)]
    command += ["--dir", str(options.dir), "--mib", str(options.mib), "--rounds", str(rounds)]
    command += ["--last"] if last else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode != (0 if last else -signal.SIGKILL):
        measure.fail(result.stdout + result.stderr)


def main() -> None:
    parser = measure.options("restore", "How fast a rank comes back from its own memory.")
    fits = (mib for mib in (2048, 1024) if measure.available_bytes() > 6 * mib * MIB)
    parser.set_defaults(mib=next(fits, SMALL_MIB))
    parser.add_argument("--part", choices=["save", "restore"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--last", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        trainer(options)
        return
    report = Report("restore", options.quick, options.json)
    found = killed_and_back(options, 1 if options.quick else 4)
    again, copies = found["again"], found["copies"]
    copy_s = statistics.median(copies)
    again_ms, copy_ms = round(statistics.median(again) * 1e3, 1), round(copy_s * 1e3, 1)
    more = {"mib": options.mib, "restore_ms": again_ms, "copy_ms": copy_ms}
    report.figure("memory_restore_ratio", ratio(again, copies), "ratio", "<= 1.3", **more)
    first = statistics.median(found["first"])
    report.figure("memory_restore_ratio:new_process", first / copy_s, "ratio", restore_ms=round(first * 1e3, 1))
    read = sum(found["storage"])
    if not options.quick:
        options.mib = SMALL_MIB
        small = killed_and_back(options, 1)
        report.figure("memory_restore_ratio:512_mib", ratio(small["again"], small["copies"]), "ratio")
        read += sum(small["storage"])
    report.figure("storage_bytes_read", read, "bytes", "<= 0")
    report.save()


def killed_and_back(options: argparse.Namespace, times: int) -> dict[str, list[float]]:
    """What the processes of one job measured that was killed so often, and once more ended in order."""
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    here = argparse.Namespace(**{**vars(options), "dir": home})
    out = home / "found.json"
    found: dict[str, list[float]] = {"first": [], "again": [], "copies": [], "storage": []}
    try:
        start(here, "save", out, 0)
        for number in range(times + 1):
            start(here, "restore", out, 8 if options.quick else 12, last=number == times)
            facts = json.loads(out.read_text(encoding="utf-8"))
            found["first"].append(facts["first"])
            found["again"] += facts["again"]
            found["copies"] += facts["copies"]
            found["storage"].append(facts["bytes"].get("storage", 0))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return found


if __name__ == "__main__":
    main()
