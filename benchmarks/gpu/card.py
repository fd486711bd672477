"""The accelerator under test, by torch's generic names; what the simulated one does in another way stands here alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
MIB = 1 << 20


class NotHere(Exception):
    """This machine cannot show what the check is about; the text says why."""


class NoDevice(Exception):
    """This machine, or the torch that is installed, has no such device; the text says so."""


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        metric: its name.
        value: of it; None if it could not be had.
        unit: of the value.
        goal: a bound such as "<= 1"; empty for what is only told.
    """

    metric: str
    value: float | None
    unit: str
    goal: str = ""


class Card:
    """One device.

    Args:
        kind: `cuda`, or the name of another accelerator that torch knows; `sim` is the simulated one.
        small: sizes for the simulated device, which only show that the script runs.
        directory: where checks may write.
    """

    def __init__(self, kind: str, *, small: bool, directory: Path) -> None:
        self.kind, self.small, self.directory = kind, small, directory
        self._simulated: Any = None
        if kind == "sim":
            from holdfast.testing import device  # noqa: PLC0415 - built at its first use

            device.load()
            self._simulated = device
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != kind:
            here = f"its accelerator is {found.type!r}" if found is not None else "it has no accelerator"
            raise NoDevice(f"torch {torch.__version__} finds no device {kind!r} here: {here}; --device names another")
        self.device = torch.device(kind, 0)
        self.module: Any = torch.get_device_module(kind)
        self._cycles_per_s = 0.0

    @property
    def is_simulated(self) -> bool:
        return self._simulated is not None

    @property
    def simulated(self) -> Any:
        """The simulated device's controls."""
        if self._simulated is None:
            raise NotHere("only the simulated device can be told to do this")
        return self._simulated

    @property
    def name(self) -> str:
        return str(self.module.get_device_name(0))

    def size(self, large: int, small: int) -> int:
        """`large` on a card, `small` where only the script is tried."""
        return small if self.small else large

    def sleep(self, seconds: float) -> None:
        """Queues a kernel that lasts so long on the current stream."""
        if self.is_simulated:
            self.simulated.sleep(seconds)
            return
        if not self._cycles_per_s:
            cycles = 10**8
            torch.cuda._sleep(cycles)  # the first one loads it
            self._cycles_per_s = cycles / self.seconds(lambda: torch.cuda._sleep(cycles))
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def captured(self, work: Callable[[], object]) -> Any:
        """Returns a graph of what `work` queues; `replay()` queues it again."""
        if self.kind != "cuda":
            graph = torch.accelerator.Graph()
            graph.capture_begin()
            work()
            graph.capture_end()
            return graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device works on what `work` queues, by events."""
        begin, end = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        stream = torch.accelerator.current_stream()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def free_bytes(self) -> int:
        return int(self.module.mem_get_info()[0])

    def peak_bytes(self) -> int:
        return int(self.module.max_memory_allocated())

    def forget_peak(self) -> None:
        self.module.reset_peak_memory_stats()


def host_seconds(work: Callable[[], object]) -> float:
    """How long the host is in `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
