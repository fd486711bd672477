"""Memory of the simulated device: its limit, its statistics, and cards that several processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import forked

pytestmark = pytest.mark.device
MIB = 1 << 20

# Fills a card, forks a child that does nothing, says so, and waits to be killed.
HOLDER = """
import os, sys, time, torch
from holdfast.testing import device
device.load()
x = torch.ones(24 << 20, dtype=torch.uint8, device="sim")
torch.accelerator.synchronize()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
time.sleep(600)
"""


def test_more_than_the_card_has_is_an_error_that_can_be_caught(sim: ModuleType) -> None:
    total = torch.accelerator.get_memory_info()[1]
    before = torch.accelerator.memory_reserved()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_reserved() <= before
    assert torch.ones(4, device="sim").sum().item() == 4, "the device is hurt"


def test_statistics_tell_tensors_cache_and_peaks(sim: ModuleType) -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    free = torch.accelerator.get_memory_info()[0]
    allocated, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    y = torch.empty(5 * MIB, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == allocated + 8 * MIB
    assert torch.accelerator.get_memory_info()[0] == free - 8 * MIB
    del x, y
    assert torch.accelerator.memory_allocated() == allocated
    assert torch.accelerator.memory_reserved() == reserved + 8 * MIB, "what is freed is not kept for later"
    assert torch.accelerator.max_memory_allocated() == allocated + 8 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved
    assert torch.accelerator.get_memory_info()[0] == free
    assert torch.get_device_module("sim").memory_allocated() == allocated


def test_generic_calls_for_memory_are_answered(sim: ModuleType) -> None:
    torch.ones(1, device="sim")
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["num_ooms"] == 0
    assert torch.float32 in torch.accelerator.get_device_capability()["supported_dtypes"]


def test_freed_memory_is_returned_to_make_room(sim: ModuleType) -> None:
    free = torch.accelerator.get_memory_info()[0]
    x = torch.empty(free // 2 + MIB, dtype=torch.uint8, device="sim")
    del x
    assert torch.empty(free // 2 + 2 * MIB, dtype=torch.uint8, device="sim").numel() > 0


def test_only_devices_that_are_used_take_memory(sim: ModuleType) -> None:
    torch.ones(1, device="sim:0")
    assert sim.is_started(0)
    assert not sim.is_started(3)
    assert torch.accelerator.device_count() == 4
    assert sim.holders(3) == {}
    assert list(sim.holders(0)) == [os.getpid()]


def test_killed_process_holds_its_card_until_its_children_end(tmp_path: Path) -> None:
    """The children of a killed rank (workers of a DataLoader) keep its memory, as device files that are open do."""
    environment = os.environ | {"SIMULATED_DEVICE_CARDS": str(tmp_path), "SIMULATED_DEVICE_MEMORY": str(64 * MIB)}
    holder = forked.Popen(
        [sys.executable, "-c", HOLDER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    asks = (
        "import json, torch; from holdfast.testing import device as d; d.load(); held = d.holders(0)\n"
        "try: torch.ones(1, device='sim'); room = True\n"
        "except torch.OutOfMemoryError: room = False\n"
        "print(json.dumps([sum(held.values()), room]))"
    )

    def ask() -> str:
        answer = forked.run([sys.executable, "-c", asks], env=environment, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    full = f"[{(32 + 24) * MIB}, false]"
    assert ask() == full
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    assert ask() == full, "the memory was free while a child lived"
    assert holder.stdin is not None
    holder.stdin.close()  # the child ends
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        pass
    assert ask() == "[0, true]"
    assert holder.stdout.close() is None


# What the host's memory is for copies, by the name of the setting: registering, pinning, and how a late copy goes.
REACHES = """
import torch
from holdfast.testing import device
device.load()
source, target = torch.ones(1 << 20, device="sim"), torch.zeros(1 << 20)
said = [device.register(target.data_ptr(), target.nbytes)]
target.copy_(source, non_blocking=True)
torch.accelerator.synchronize()
said += [device.counts()["late_copies"], bool((target == 1).all())]
try:
    said.append(torch.empty(8, pin_memory=True).is_pinned())
except RuntimeError as error:
    said.append(str(error).splitlines()[0])
print(*said, sep="; ")
"""


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("registered", "True; 1; True; True"),
        ("pinned", "False; 0; True; True"),
        ("none", "False; 0; True; this device pins no memory of the host"),
    ],
)
def test_host_memory_is_reached_as_the_setting_says(setting: str, expected: str) -> None:
    environment = os.environ | {"SIMULATED_DEVICE_HOST_MEMORY": setting}
    command = [sys.executable, "-c", REACHES]
    answer = forked.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert answer.stdout.strip() == expected, answer.stderr
