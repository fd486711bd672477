"""Streams, events and their order: the host runs ahead, and what does not wait is torn."""

from __future__ import annotations

import os
import threading
import time
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.device
N = 1 << 20  # numbers of four bytes


def test_host_runs_ahead_of_kernels_that_take_their_time(sim: ModuleType) -> None:
    x = torch.zeros(4, device="sim")
    sim.hang()
    sim.set_kernel_time(0.02)
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        x.add_(1)
    end.record()
    assert not end.query(), "the host came back when the work was done"
    sim.free()
    assert x.tolist() == [20] * 4
    assert begin.elapsed_time(end) >= 400


def test_events_tell_the_device_time_between_them(sim: ModuleType) -> None:
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    begin.record()
    sim.sleep(0.05)
    sim.hang()
    end.record()
    assert not end.query()
    sim.free()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 50
    with pytest.raises(ValueError, match="enable_timing"):
        torch.Event("sim").elapsed_time(end)


def test_device_that_hangs_holds_its_stream_but_no_other(sim: ModuleType) -> None:
    x, y = torch.zeros(4, device="sim"), torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    sim.hang()
    x.add_(1)
    behind = torch.Event("sim")
    behind.record()
    with torch.Stream(device="sim"):
        y.add_(1)
        assert y.sum().item() == 4
    assert not behind.query()
    sim.free()
    behind.synchronize()
    assert x.tolist() == [1] * 4


def test_host_waits_for_numbers_without_holding_pythons_lock(sim: ModuleType) -> None:
    x = torch.ones(1, device="sim")
    sim.hang()
    waiting = threading.Thread(target=x.item)
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive(), "item() came back from a device that hangs"
    sim.free()
    waiting.join(30)
    assert not waiting.is_alive()


def test_late_copy_goes_into_pinned_memory_only(sim: ModuleType) -> None:
    source = torch.full((N,), 3.0, device="sim")
    pinned, pageable = torch.zeros(N).pin_memory(), torch.zeros(N)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    sim.set_copy_rate(source.nbytes / 0.3)
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    sim.hang()
    begin.record()
    pinned.copy_(source, non_blocking=True)
    end.record()
    assert not bool((pinned == 3).any()), "a late copy was there at once"
    sim.free()
    end.synchronize()
    assert begin.elapsed_time(end) >= 300
    assert bool((pinned == 3).all())
    began = time.monotonic()
    pageable.copy_(source, non_blocking=True)
    assert time.monotonic() - began >= 0.3, "a copy into memory that is not pinned did not block"
    assert bool((pageable == 3).all())


def test_registered_memory_takes_late_copies_until_it_is_unregistered(sim: ModuleType) -> None:
    target = torch.zeros(N)
    source = torch.full((N,), 3.0, device="sim")
    assert sim.register(target.data_ptr(), target.nbytes)
    assert not sim.register(target.data_ptr() + 8, 8), "registered twice"
    before = sim.counts()
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    after = sim.counts()
    assert after["late_copies"] == before["late_copies"] + 1
    assert after["blocking_copies"] == before["blocking_copies"]
    assert bool((target == 3).all())
    assert sim.unregister(target.data_ptr())
    assert not sim.unregister(target.data_ptr())
    target.copy_(source, non_blocking=True)
    assert sim.counts()["blocking_copies"] == after["blocking_copies"] + 1


@pytest.mark.parametrize("waits", [True, False])
def test_write_beside_a_late_copy_tears_it_unless_it_waits(sim: ModuleType, waits: bool) -> None:
    source = torch.full((N,), 1.0, device="sim")
    target = torch.zeros(N).pin_memory()
    torch.accelerator.synchronize()
    sim.set_copy_rate(source.nbytes / 0.2)
    side = torch.Stream(device="sim")
    copied = torch.Event("sim")
    with side:
        target.copy_(source, non_blocking=True)
        copied.record()
    while not bool((target == 1).any()):  # the first piece has come
        time.sleep(0.005)
    if waits:
        torch.accelerator.current_stream().wait_event(copied)
    source.fill_(2.0)
    torch.accelerator.synchronize()
    assert bool((target == 1).all()) == waits


def test_pinned_batch_that_is_written_too_early_is_torn(sim: ModuleType) -> None:
    batch = torch.full((N,), 1.0).pin_memory()
    target = torch.zeros(N, device="sim")
    sim.hang()
    target.copy_(batch, non_blocking=True)
    batch.fill_(2.0)
    sim.free()
    assert bool((target.cpu() == 2).all())
    pageable = torch.full((N,), 1.0)
    target.copy_(pageable, non_blocking=True)
    pageable.fill_(2.0)
    assert bool((target.cpu() == 1).all()), "memory that is not pinned was read after the call"


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_reused_at_once_unless_recorded(sim: ModuleType, recorded: bool) -> None:
    source = torch.full((N,), 7.0, device="sim")
    target = torch.zeros(N).pin_memory()
    torch.accelerator.synchronize()
    sim.set_copy_rate(source.nbytes / 0.2)
    side = torch.Stream(device="sim")
    with side:
        target.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    address = source.data_ptr()
    del source
    other = torch.full((N,), 9.0, device="sim")
    torch.accelerator.synchronize()
    assert (other.data_ptr() != address) == recorded
    assert bool((target == 7).all()) == recorded


def test_copy_to_another_device_is_ordered_on_both(sim: ModuleType) -> None:
    x = torch.zeros(N, device="sim:0")
    sim.sleep(0.1, 0)
    x.add_(5)
    y = x.to("sim:1", non_blocking=True)
    x.add_(1)
    assert y.device == torch.device("sim:1")
    assert bool((y.cpu() == 5).all())
    with pytest.raises(RuntimeError, match="same device"):
        x + y


def test_forked_child_is_refused(sim: ModuleType) -> None:
    x = torch.zeros(4, device="sim")
    torch.accelerator.synchronize()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            x.add_(1)
            os.write(write, b"it worked")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 10_000).decode()
    os.waitpid(child, 0)
    assert "Cannot re-initialize sim in a forked subprocess" in said
    assert x.add_(1).tolist() == [1] * 4, "the parent is hurt"
