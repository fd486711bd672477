"""What keeps one node from its hardware: python -m benchmarks.node [--quick] [--json]

`slot_populate_ratio`: a new slot as a keeper makes it, by all its threads, over a plain anonymous mapping of the same size
that one thread populates by writing. `prepare_seconds` (told): from the question of a rank for two slots until it is
granted, and until both are mapped here. `call_minus_copy_ms`: what a `save()` costs beyond a plain copy of the same
tensors, with `overlap=False`, for 300, 3,000 and 10,000 tensors of 4 KiB. `first_save_ratio`: the first such save of a
job over the median of the later ones. `gather_ms` (told): looking at the state alone, its median and its worst.
`question_p99_ms` (told): a question to the keeper of a rank that does nothing else.
"""

from __future__ import annotations

import mmap
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from benchmarks import measure
from benchmarks.measure import MIB, Report, timed
from torch import nn

import holdfast
from holdfast.testing.faults.rig import Rig
from holdfast.tiers.memory.page_populate import Populator, share_of_cores
from holdfast.tiers.memory.slots import Slot

_MADV_POPULATE_WRITE = 23
TENSOR_BYTES = 4096


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


def main() -> None:
    """Prints and keeps the figures."""
    options = measure.options("node", __doc__ or "").parse_args()
    report = Report("node", options.quick, options.json)
    home = Path(tempfile.mkdtemp(prefix="hf-", dir=options.dir))
    try:
        size = min(options.mib * MIB, measure.available_bytes() // 8)
        populate(report, size, 5 if options.quick else 15)
        prepare(report, home / "p", size // 2, 200 if options.quick else 2000)
        for count in (300, 3_000, 10_000):
            many_tensors(report, home, count, 12 if options.quick else 40)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    report.save()


if __name__ == "__main__":
    main()
