"""Checks of copies: registration, rates, the call, torn versions, a host that is ahead, memory, restore."""

from __future__ import annotations

import mmap
import statistics
import time

import torch
from benchmarks.gpu.card import GIB, MIB, Card, Figure, NotHere, host_seconds
from benchmarks.gpu.state import Training

from holdfast.checkpoint.capture import side_stream_copy
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.liveness import open_checkpointers

REPEATS = 3


def void(card: Card) -> list[Figure]:
    """What was queued behind a collective that is about to be aborted counts neither as saved nor as live."""
    training = Training(card, card.directory, num_bytes=card.size(256 * MIB, MIB), num_tensors=8)
    training.prove()
    card.sleep(2.0)  # the collective
    for parameter in training.model:
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))  # what it left unreduced
    training.step()
    handle = training.save()
    open_checkpointers.void()
    card.synchronize()
    believed = not handle.given_up
    open_checkpointers.begin()
    training.checkpointer.interrupted()
    step = training.checkpointer.restore()
    wrong = sum(not bool(torch.isfinite(tensor).all()) for tensor in training.state())
    training.end()
    return [
        Figure("void_versions_believed", float(believed), "versions", "<= 0"),
        Figure("tensors_not_finite_after_restore", float(wrong), "tensors", "<= 0"),
        Figure("restored_step", float(step), "step"),
    ]


def register(card: Card) -> list[Figure]:
    """Host memory is made known to the driver; a second time fails softly, and no launch of the user's raises."""
    device, figures = accelerator.device_of(card.kind), []
    for gib in (1, 8, 32) if not card.small else (1 / 256,):
        size = int(gib * GIB)
        memory = mmap.mmap(-1, size)
        view = torch.frombuffer(memory, dtype=torch.uint8)
        view[:: mmap.PAGESIZE] = 1
        began = time.perf_counter()
        done = device.register(card.device, view.data_ptr(), size)
        seconds = time.perf_counter() - began
        if not done:
            raise NotHere("this driver registers no host memory")
        twice = device.register(card.device, view.data_ptr(), size)
        device.unregister(card.device, view.data_ptr())
        torch.ones(8, device=card.device).add_(1)
        card.synchronize()  # raises what a failed registration left behind
        figures += [
            Figure(f"register_seconds_per_gib:{gib:g}", seconds / gib, "s/GiB", "<= 0.3" if not card.small else ""),
            Figure(f"registered_twice:{gib:g}", float(twice), "times", "<= 0"),
        ]
    return figures


def rates(card: Card) -> list[Figure]:
    """Device to host: registered memory, as slots are, against plain pinned and pageable memory."""
    size = card.size(8 * GIB, 8 * MIB)
    source = torch.ones(size, dtype=torch.uint8, device=card.device)
    memory = mmap.mmap(-1, size)
    slot = torch.frombuffer(memory, dtype=torch.uint8)
    slot.zero_()
    device = accelerator.device_of(card.kind)
    if not device.register(card.device, slot.data_ptr(), size):
        raise NotHere("this driver registers no host memory")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pageable = torch.zeros(size, dtype=torch.uint8)
    rate = {}
    for name, target in (("registered", slot), ("pinned", pinned), ("pageable", pageable)):
        times = [card.seconds(lambda t=target: t.copy_(source, non_blocking=True)) for _ in range(REPEATS)]
        rate[name] = size / statistics.median(times)
    device.unregister(card.device, slot.data_ptr())
    return [
        Figure(
            "registered_over_pinned", rate["registered"] / rate["pinned"], "ratio", ">= 0.95" if not card.small else ""
        ),
        Figure("pageable_over_pinned", rate["pageable"] / rate["pinned"], "ratio"),
        *(Figure(f"device_to_host:{name}", value / 1e9, "GB/s") for name, value in rate.items()),
    ]


def call(card: Card) -> list[Figure]:
    """How long a save holds up its caller once copies are late."""
    figures = []
    for count, goal in ((300, 5.0), (10_000, 40.0)):
        count = card.size(count, count // 50)
        training = Training(
            card, card.directory / str(count), num_bytes=card.size(10 * GIB, MIB), num_tensors=count // 2
        )
        training.prove()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            handle = training.save()
            times.append(time.perf_counter() - began)
            training.step()
            handle.wait("captured")  # the next one finds a free slot
        training.end()
        goal_text = f"<= {goal}" if not card.small else ""
        figures.append(Figure(f"save_call_ms:{count}", statistics.median(times) * 1e3, "ms", goal_text))
    return figures


def torn(card: Card) -> list[Figure]:
    """Saves beside steps: every version is the state at its call. Without the wait of the streams it is not."""

    def wrong(name: str, rounds: int) -> int:
        num_tensors = card.size(16, 1)  # few: small neighbours are set aside on the device, and not torn
        training = Training(card, card.directory / name, num_bytes=card.size(512 * MIB, MIB), num_tensors=num_tensors)
        training.prove()
        count = 0
        for _ in range(rounds):
            expected = [tensor.clone() for tensor in training.state()]
            handle = training.save()
            training.step()
            try:
                handle.wait("captured")
            except Exception:  # noqa: BLE001 - given up is right as well, and counted elsewhere
                continue
            training.checkpointer.restore(handle.version)
            count += not all(map(torch.equal, training.state(), expected))
            training.step()
        training.end()
        return count

    if card.is_simulated:
        card.simulated.set_copy_rate(10e6)  # a tenth of a second: the host steps in it, also on a busy machine
    honest = wrong("honest", card.size(200, 3))
    own = side_stream_copy.DeviceCopy.hold_current_streams
    side_stream_copy.DeviceCopy.hold_current_streams = lambda _: None  # type: ignore[method-assign]
    try:
        planted = wrong("planted", card.size(20, 5))
    finally:
        side_stream_copy.DeviceCopy.hold_current_streams = own  # type: ignore[method-assign]
    return [
        Figure("torn_versions", float(honest), "versions", "<= 0"),
        Figure("torn_versions_without_the_wait", float(planted), "versions"),
    ]


def ahead(card: Card) -> list[Figure]:
    """The host is five seconds ahead of its device: no version is given up, and no step of the host waits."""
    seconds = 5.0 if not card.small else 0.5
    training = Training(card, card.directory, num_bytes=card.size(GIB, MIB), num_tensors=64)
    training.prove()
    card.sleep(seconds)
    handles, waits = [], []
    for _ in range(3):
        waits.append(host_seconds(lambda: handles.append(training.save())))
        waits.append(host_seconds(training.step))
        if len(handles) > 1:
            break  # the next save waits for the slot of this one
    for handle in handles:
        handle.wait("captured")
    training.end()
    return [
        Figure("versions_given_up", float(sum(bool(handle.given_up) for handle in handles)), "versions", "<= 0"),
        Figure("first_save_and_step_ms", sum(waits[:2]) * 1e3, "ms", "<= 20" if not card.small else ""),
    ]


def memory(card: Card) -> list[Figure]:
    """Memory of the device that saves take beside the training's own, while tensors are proven and after."""
    training = Training(card, card.directory, num_bytes=card.size(4 * GIB, MIB), num_tensors=64)
    training.step()
    card.synchronize()
    card.forget_peak()
    training.step()
    card.synchronize()
    without = card.peak_bytes()
    card.forget_peak()
    training.prove()
    training.save().wait("captured")
    card.synchronize()
    taken = card.peak_bytes() - without
    training.end()
    return [Figure("peak_beyond_training", taken / MIB, "MiB", "<= 64")]


def restore(card: Card) -> list[Figure]:
    """Back from the own slot, every byte verified, against a plain copy from pinned memory."""
    training = Training(card, card.directory, num_bytes=card.size(10 * GIB, 4 * MIB), num_tensors=300)
    training.save().wait("captured")
    num_bytes = training.num_bytes
    pinned = torch.zeros(num_bytes // 4, dtype=torch.float32, pin_memory=True)
    target = torch.empty(num_bytes // 4, dtype=torch.float32, device=card.device)
    plain, back, fill = [], [], []
    for _ in range(REPEATS):
        plain.append(card.seconds(lambda: target.copy_(pinned, non_blocking=True)))
        back.append(host_seconds(lambda: (training.checkpointer.restore(), card.synchronize())))
        report = training.checkpointer.last_restore
        fill.append(report.seconds["fill"] if report is not None else 0.0)
    training.end()
    share = statistics.median(plain) / statistics.median(back)
    return [
        Figure("restore_over_pinned_rate", share, "ratio", ">= 0.6" if not card.small else ""),
        Figure("restore_rate", num_bytes / statistics.median(back) / 1e9, "GB/s"),
        Figure("fill_share", statistics.median(fill) / statistics.median(back), "ratio"),
    ]
