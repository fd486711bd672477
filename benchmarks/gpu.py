"""Checks for a card, one process each, one JSON line each: what no CPU can show of the way from a device to memory and back.

    python3 -m benchmarks.gpu [--seconds 520] [--out DIRECTORY] [--scale 1.0] [--only NAME] [--simulated]

Needs torch, and this package with what it imports on the path: no network, no virtual environment. Each check runs in a
process of its own with a deadline; its line is written and flushed before the next begins, so that a machine that goes
away leaves what was measured. `--scale` divides sizes and times, for a try; `--simulated` takes the simulated device, where
no figure means anything and every check must hold all the same. Exit code 1 if a check that was run does not hold.

A line has `check`, `holds` (null: could not be tried here), `seconds`, `device`, and the figures. No card has run this yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.base.events import Events
from holdfast.testing import device as simulated_device
from holdfast.tiers.format import CHUNK_BYTES, start_digest
from holdfast.tiers.memory import Slot
from holdfast.train import alive, devices
from holdfast.train.copies import SideStreams
from holdfast.train.fence import Fence, Job
from holdfast.train.staging import Staging, Starts
from holdfast.train.trust import same_bits

MIB, GIB = 1 << 20, 1 << 30
CHECKS: dict[str, Callable[[Rig], dict[str, Any]]] = {}
CHECK_S = 120.0


def check(function: Callable[[Rig], dict[str, Any]]) -> Callable[[Rig], dict[str, Any]]:
    """One of the checks, by its name; in the order of risk."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


class Rig:
    """The device of this process.

    Args:
        scale: of sizes and times.
        simulated: it is the one of holdfast.testing.device.
    """

    def __init__(self, *, scale: float, simulated: bool) -> None:
        self.scale, self.simulated = scale, simulated_device if simulated else None
        if simulated:
            simulated_device.load()
        found = torch.accelerator.current_accelerator()
        if found is None:
            raise SystemExit("there is no accelerator here; --simulated takes the simulated one")
        self.place = torch.device(found.type, 0)
        self.module: Any = torch.get_device_module(found.type)

    def num_bytes(self, whole: int) -> int:
        """So many bytes, scaled, in whole megabytes."""
        return max(4 * MIB, int(whole * self.scale) // MIB * MIB)

    def full(self, num_bytes: int, value: float = 1.0) -> Any:
        """A tensor of so many bytes."""
        return torch.full((num_bytes // 4,), value, dtype=torch.float32, device=self.place)

    def sleep(self, seconds: float) -> None:
        """A kernel of about that length on the current stream."""
        if self.simulated is not None:
            self.simulated.sleep(seconds)
            return
        if not hasattr(self, "_cycles"):
            began, ended = (torch.Event(self.place, enable_timing=True) for _ in range(2))
            began.record()
            self.module._sleep(100_000_000)
            ended.record()
            ended.synchronize()
            self._cycles = 100_000_000 / began.elapsed_time(ended) * 1e3
        self.module._sleep(int(seconds * self._cycles))

    def seconds(self, call: Callable[[], object]) -> float:
        """How long the device takes for what the call queues, by its events, after one try."""
        call()
        began, ended = (torch.Event(self.place, enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize()
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return max(1e-9, float(began.elapsed_time(ended)) / 1e3)

    @contextmanager
    def slot(self, num_bytes: int) -> Iterator[tuple[Any, Any, Any]]:
        """Side streams, a slot that is registered with them, and its memory as float32."""
        slot, streams = Slot.create(num_bytes), SideStreams()
        try:
            streams.pin(slot, self.place)
            yield streams, slot, torch.frombuffer(slot.view, dtype=torch.float32)[: num_bytes // 4]
            assert streams.unpin(60.0)
        finally:
            slot.close()


@check
def versions(rig: Rig) -> dict[str, Any]:
    """What this is, and what a context costs."""
    rig.full(MIB)
    free, total = torch.accelerator.get_memory_info(0)
    properties = rig.module.get_device_properties(0)
    return {
        "torch": torch.__version__, "python": sys.version.split()[0], "card": properties.name, "of_card": devices.names(),
        "total_bytes": total, "taken_bytes": total - free, "holds": devices.healthy(10.0),
    }  # fmt: skip


@check
def void_before_abort(rig: Rig) -> dict[str, Any]:
    """A save behind a step whose collective hangs is void, although the device passes it later."""
    source, reasons = rig.full(rig.num_bytes(64 * MIB)), []
    gate = Fence(timeout_s=5.0, events=Events())
    thing = _Thing(gate.void)
    alive.register(thing)
    with rig.slot(source.nbytes) as (streams, _, target):
        gate.start(good := Job([], streams.queue([target], [source]), reasons.append))
        good.done.wait(30)
        gate.release()
        rig.sleep(max(0.5, 2 * rig.scale))  # the collective
        source.fill_(float("nan"))
        gate.start(bad := Job([], streams.queue([target], [source]), reasons.append))
        alive.void()
        bad.done.wait(60)
        gate.close()
    return {"reasons": reasons, "holds": reasons[0] == "" and "broke off" in reasons[1]}


class _Thing:
    """What is open in this process."""

    def __init__(self, void: Callable[[], None]) -> None:
        self.void = void


@check
def register(rig: Rig) -> dict[str, Any]:
    """Slots of three sizes become known to the driver; a second time fails softly, and the next kernel raises nothing."""
    figures: dict[str, Any] = {"holds": True}
    for gib in (1, 8, 32):
        num_bytes = rig.num_bytes(gib * GIB)
        if num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4:
            continue
        began = time.perf_counter()
        with rig.slot(num_bytes) as (streams, slot, _):
            figures[f"seconds_per_gib_{gib}"] = (time.perf_counter() - began) / (num_bytes / GIB)
            registered = bool(streams._registered)
            again = SideStreams()
            again.pin(slot, rig.place)
            kernel = float((rig.full(MIB) + 1)[0]) == 2
            figures["holds"] &= registered and not again._registered and kernel
    return figures


@check
def device_to_host(rig: Rig) -> dict[str, Any]:
    """Copies into a registered slot, into torch's own pinned memory, and into ordinary memory, by events."""
    source = rig.full(rig.num_bytes(8 * GIB))
    pinned = torch.empty(source.numel(), pin_memory=True)
    ordinary = torch.zeros(source.numel())
    with rig.slot(source.nbytes) as (_, _, target):
        rates = {
            name: source.nbytes / rig.seconds(lambda to=to: to.copy_(source, non_blocking=True))
            for name, to in (("registered", target), ("pinned", pinned), ("ordinary", ordinary))
        }
        right = bool((target[:1000] == 1).all())
    ratio = rates["registered"] / rates["pinned"]
    return {
        **{f"{name}_bytes_per_s": rate for name, rate in rates.items()},
        "ratio": ratio,
        "holds": right and ratio > 0.8,
    }


@check
def call(rig: Rig) -> dict[str, Any]:
    """What the call itself costs the host, with few and with many tensors; the expectations are 5 and 40 ms."""
    figures: dict[str, Any] = {}
    for count, most_s in ((300, 5e-3), (10_000, 40e-3)):
        count = max(30, int(count * rig.scale))
        sources = [rig.full(4096) for _ in range(count)]
        with rig.slot(4096 * count) as (streams, _, target):
            targets = list(target.split(1024))
            spent = []
            for _ in range(5):
                torch.accelerator.synchronize()
                began = time.perf_counter()
                copy = streams.queue(targets, sources)
                spent.append(time.perf_counter() - began)
                copy.wait(lambda: False)
            figures[f"seconds_of_{count}_tensors"] = sorted(spent)[2]
            figures["holds"] = figures.get("holds", True) and (rig.simulated is not None or sorted(spent)[2] < most_s)
            del targets, copy
    return figures


@check
def torn(rig: Rig) -> dict[str, Any]:
    """Saves beside steps that write what is copied: none is torn, and without the hold of the stream some are."""
    source = rig.full(rig.num_bytes(256 * MIB))
    if rig.simulated is not None:
        rig.simulated.set_copy_rate(100 * MIB)
    counts = {}
    with rig.slot(source.nbytes) as (streams, _, target):
        for held in (True, False):
            counts[held] = 0
            for value in range(max(4, int(200 * rig.scale)) if held else 8):
                source.fill_(value)
                copy = streams.queue([target], [source])
                if held:
                    copy.hold_current_streams()
                source.fill_(-1)
                copy.wait(lambda: False)
                counts[held] += not bool((target == value).all())
                torch.accelerator.synchronize()
    return {"torn": counts[True], "torn_without_hold": counts[False], "holds": counts[True] == 0 and counts[False] > 0}


class _Training:
    """A model that saves at every step."""

    def __init__(self, rig: Rig, root: str, **options: Any) -> None:
        torch.manual_seed(0)
        width = 256 if rig.simulated is not None else 4096
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).to(rig.place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.data = torch.randn(16, width, generator=torch.Generator().manual_seed(5)).to(rig.place)
        config = holdfast.Config(every="0", durable_every="0", linger_s=1.0)
        self.checkpointer = holdfast.Checkpointer(root, model=self.model, optimizer=self.optimizer, config=config)
        self.handles: list[Any] = []

    def step(self, number: int, *, save: bool = True) -> None:
        self.model(self.data * (1 + number / 100)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if save:
            self.handles.append(self.checkpointer.save(number))

    def sum(self) -> float:
        return sum(float(parameter.detach().double().sum()) for parameter in self.model.parameters())


@check
def host_ahead(rig: Rig) -> dict[str, Any]:
    """The device is seconds behind its host: no version is given up, and once tensors are trusted no fence waits."""
    with tempfile.TemporaryDirectory() as root:
        training = _Training(rig, root, foreach=True)
        training.checkpointer.restore()
        behind_s = max(1.2, 5 * rig.scale)
        for number in range(4):
            rig.sleep(behind_s)
            training.step(number)
        counters = training.checkpointer.events.counters
        before = counters()["fence_wait_seconds"]
        for number in range(4, 8):
            rig.sleep(behind_s / 4)
            training.step(number)
        waited = counters()["fence_wait_seconds"] - before
        given_up = [handle.given_up for handle in training.handles if handle.given_up]
        training.checkpointer.close()
    return {"given_up": given_up, "fence_wait_s": waited, "holds": not given_up and waited < 0.05}


@check
def memory_of_proofs(rig: Rig) -> dict[str, Any]:
    """What the comparison of a tensor with its copy takes of the device at its peak, beside the tensor."""
    source = rig.full(rig.num_bytes(4 * GIB))
    copy = source.cpu()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats(0)
    before = torch.accelerator.memory_allocated(0)
    same = same_bits(source, copy)
    more = torch.accelerator.max_memory_allocated(0) - before
    return {"peak_bytes": more, "holds": same and more < 64 * MIB}


@check
def host_to_device(rig: Rig) -> dict[str, Any]:
    """A restore's way, proven on it, over a plain copy from pinned memory; the expectation is 0.6 with four threads."""
    num_bytes = rig.num_bytes(2 * GIB) // CHUNK_BYTES * CHUNK_BYTES or CHUNK_BYTES
    target = rig.full(num_bytes, 0.0)
    plain = torch.ones(num_bytes // 4).pin_memory()
    plain_s = rig.seconds(lambda: target.copy_(plain, non_blocking=True))
    target.zero_()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    sender = Staging(Starts([target]), CHUNK_BYTES)
    for part, chunk in zip(target.split(CHUNK_BYTES // 4), plain.split(CHUNK_BYTES // 4), strict=True):
        buffer = sender.take(CHUNK_BYTES)
        buffer.copy_(chunk.view(torch.uint8))
        start_digest().update(buffer.numpy().data)
        sender.send(buffer, [part], [buffer.view(torch.float32)])
    sender.close()
    seconds = time.perf_counter() - began
    right = bool((target == 1).all())
    return {"plain_bytes_per_s": num_bytes / plain_s, "one_thread_bytes_per_s": num_bytes / seconds, "holds": right}


@check
def bit_for_bit(rig: Rig) -> dict[str, Any]:
    """Saved, restored into another model, and on: equal, for three kinds of optimizer."""
    equal = {}
    for name, options in (
        ("foreach", {"foreach": True}),
        ("fused", {"fused": True}),
        ("capturable", {"capturable": True}),
    ):
        with tempfile.TemporaryDirectory() as root:
            first = _Training(rig, root, **options)
            first.checkpointer.restore()
            for number in range(6):
                first.step(number)
            first.checkpointer.close()
            second = _Training(rig, root, **options)
            start = second.checkpointer.restore()
            for training in (first, second):
                for number in range(start, start + 3):
                    training.step(number, save=False)
            equal[name] = start == 6 and first.sum() == second.sum()
            second.checkpointer.abandon()
    return {**equal, "holds": all(equal.values())}


@check
def hang(rig: Rig) -> dict[str, Any]:
    """A device that hangs is told from one that works, and nothing of ours waits for it beyond its bounds."""
    with tempfile.TemporaryDirectory() as root:
        training = _Training(rig, root, foreach=True)
        training.checkpointer.restore()
        for number in range(4):
            training.step(number)
        well = devices.healthy(10.0)
        rig.sleep(max(15.0, 60 * rig.scale))
        training.step(4)
        ill = not devices.healthy(1.0)
        began = time.monotonic()
        training.checkpointer.abandon()
        seconds = time.monotonic() - began
    return {"told": well and ill, "abandon_s": seconds, "holds": well and ill and seconds < 12}


def run_one(name: str, *, scale: float, simulated: bool) -> int:
    """Makes one check, and prints its line."""
    line: dict[str, Any] = {"check": name, "holds": None}
    began = time.perf_counter()
    try:
        rig = Rig(scale=scale, simulated=simulated)
        line |= {"device": str(rig.module.get_device_properties(0).name), **CHECKS[name](rig)}
    except Exception as error:  # noqa: BLE001 - the next check is another process
        line |= {"holds": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    print(json.dumps(line | {"seconds": round(time.perf_counter() - began, 2)}, default=str), flush=True)
    os._exit(0 if line["holds"] else 1)  # a device that hangs would hold up the end


def run_all(options: argparse.Namespace) -> int:
    """Makes every check that there is time for; each in a process of its own."""
    until, failed = time.monotonic() + options.seconds, 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gpu.jsonl").open("a", encoding="utf-8") as file:
        for name in CHECKS:
            left = min(CHECK_S, until - time.monotonic())
            if left < 1:
                break
            command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--scale", str(options.scale)]
            command += ["--simulated"] if options.simulated else []
            try:
                answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=left, check=False)
                said = [line for line in answer.stdout.splitlines() if line.startswith("{")]
                line = (
                    said[-1]
                    if said
                    else json.dumps({"check": name, "holds": False, "error": f"ended with {answer.returncode}"})
                )
            except subprocess.TimeoutExpired:
                line = json.dumps({"check": name, "holds": False, "error": f"no end within {left:.0f} s"})
            failed += not json.loads(line)["holds"]
            for stream in (file, sys.stdout):
                stream.write(line + "\n")
                stream.flush()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=520.0, help="for all checks together")
    parser.add_argument("--out", default="build/gpu", help="directory of gpu.jsonl")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", choices=sorted(CHECKS))
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.only:
        return run_one(options.only, scale=options.scale, simulated=options.simulated)
    return run_all(options)


if __name__ == "__main__":
    sys.exit(main())
