"""What a save costs beside an accelerator: python -m benchmarks.device [--quick] [--json] [--device sim]

On the simulated device, whose copies and kernels take the time that is set here, or with `--device cuda` on a card (`make gpu` has
many more checks for one). A step is one kernel of a set length and a fused update of all tensors; a version is saved behind each.

- `device_stall_ratio`: host seconds of `save()` and of the next step, beyond those of a step without a save, over one plain
  asynchronous copy of the same tensors into registered memory, until it is there.
- `device_copy_hidden_percent`: how much of the copy costs the device nothing: 100 less what steps with a save last longer, in
  percent of the plain copy; by the device's events.
- `device_versions_given_up`: of those saved while the host was five seconds ahead of its device (one, in the short form).
- `device_memory_mib`: peak memory of the device with saves, proofs included, minus that without.
- `device_restore_ratio`: `restore()` from the own slot, every byte verified, over a plain copy from registered memory.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks import measure
from benchmarks.gpu.card import Card, host_seconds
from benchmarks.gpu.state import Training
from benchmarks.measure import MIB, Report

from holdfast.base.errors import LevelNotReached
from holdfast.checkpoint.device import accelerator

# Of the simulated device: a version of 64 MiB takes an eighth of a second, a step a quarter.
COPY_RATE = 512 * MIB
NUM_TENSORS = 300


class Registered:
    """Plain copies of the same tensors into memory that the driver knows, and back."""

    def __init__(self, card: Card, tensors: list[torch.Tensor]) -> None:
        self._card, self._tensors = card, tensors
        self._memory = mmap.mmap(-1, sum(tensor.nbytes for tensor in tensors))
        whole = torch.frombuffer(self._memory, dtype=torch.float32)
        whole.zero_()
        self._copies = [
            part.view(tensor.shape)
            for part, tensor in zip(whole.split([t.numel() for t in tensors]), tensors, strict=True)
        ]
        self._device, self._address = accelerator.device_of(card.kind), whole.data_ptr()
        self.is_registered = self._device.register(card.device, self._address, len(self._memory))

    def out(self) -> float:
        """Seconds until the tensors are there, by the device's events."""
        return self._card.seconds(lambda: torch._foreach_copy_(self._copies, self._tensors, non_blocking=True))

    def back(self) -> float:
        """Seconds until they are back."""
        return self._card.seconds(lambda: torch._foreach_copy_(self._tensors, self._copies, non_blocking=True))

    def close(self) -> None:
        """Nothing may be copied any more."""
        self._card.synchronize()
        self._device.unregister(self._card.device, self._address)


def step(training: Training, kernel_s: float) -> None:
    """Forward and backward, which write nothing of the state, and the update."""
    training.card.sleep(kernel_s)
    training.step()


def with_saves(training: Training, kernel_s: float, rounds: int) -> tuple[float, float]:
    """What a save adds to a step: seconds of the host, in the call and up to the end of the next step, and of the device."""
    host: list[float] = []
    device: list[float] = []

    def pair() -> None:
        training.save()
        step(training, kernel_s)

    for _ in range(rounds):
        training.card.synchronize()
        plain_host = host_seconds(lambda: step(training, kernel_s))
        training.card.synchronize()
        plain = training.card.seconds(lambda: step(training, kernel_s))
        host.append(host_seconds(pair) - plain_host)
        training.card.synchronize()
        device.append(training.card.seconds(pair) - plain)
    return statistics.median(host), statistics.median(device)


def given_up(training: Training, ahead_s: float, kernel_s: float) -> int:
    """How many versions are lost while the host is ahead."""
    training.card.sleep(ahead_s)
    handles = []
    for _ in range(3):
        handles.append(training.save())
        step(training, kernel_s)
    for handle in handles:
        with contextlib.suppress(LevelNotReached):
            handle.wait("captured", timeout_s=120)
    return sum(bool(handle.given_up) for handle in handles)


def peak(card: Card, work: Callable[[], object]) -> int:
    """The most bytes of the device that were in tensors."""
    card.synchronize()
    card.forget_peak()
    work()
    card.synchronize()
    return card.peak_bytes()


def main() -> None:
    parser = measure.options("device", "What a save costs beside an accelerator.")
    parser.set_defaults(mib=64)
    parser.add_argument("--device", default="sim", help="sim: the simulated one; cuda: a card")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="hf-bench-", dir=options.dir))
    report = Report("device", options.quick, options.json)
    try:
        card = Card(options.device, small=False, directory=home)
        if card.is_simulated:
            card.simulated.set_copy_rate(COPY_RATE)
        run(card, report, options.mib * MIB, rounds=2 if options.quick else 8, ahead_s=1.0 if options.quick else 5.0)
        report.save()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def run(card: Card, report: Report, num_bytes: int, *, rounds: int, ahead_s: float) -> None:
    """All figures of one device."""
    training = Training(card, card.directory, num_bytes=num_bytes, num_tensors=NUM_TENSORS // 2)
    plain = Registered(card, training.state())
    copy_s = statistics.median(plain.out() for _ in range(3))
    kernel_s = 2 * copy_s
    more = {"device": card.name, "mib": num_bytes >> 20, "copy_ms": round(copy_s * 1e3, 1)}
    without = peak(card, lambda: step(training, kernel_s))
    beyond = peak(card, training.prove) - without
    host_s, device_s = with_saves(training, kernel_s, rounds)
    report.figure("device_stall_ratio", host_s / copy_s, "ratio", "<= 0.3", stall_ms=round(host_s * 1e3, 2), **more)
    report.figure("device_copy_hidden_percent", 100 * (1 - device_s / copy_s), "%", ">= 90", **more)
    lost = given_up(training, ahead_s, kernel_s)
    report.figure("device_versions_given_up", lost, "versions", "<= 0", ahead_s=ahead_s, **more)
    report.figure("device_memory_mib", beyond / MIB, "MiB", "<= 64", **more)
    training.save().wait("captured", timeout_s=120)
    back = statistics.median(plain.back() for _ in range(3))
    restore = statistics.median(
        host_seconds(lambda: (training.checkpointer.restore(), card.synchronize())) for _ in range(3)
    )
    report.figure("device_restore_ratio", restore / back, "ratio", restore_ms=round(restore * 1e3, 1), **more)
    plain.close()
    training.end()


if __name__ == "__main__":
    main()
