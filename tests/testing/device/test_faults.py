"""Faults of the simulated device: each in a process of its own, for a fault stays until the process ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import forked
from sample_kit import MORE

pytestmark = pytest.mark.device

BEGIN = """
import os, sys, time, torch
from holdfast.testing import device as sim
sim.load()
x = torch.zeros(4, device=sim.name())
torch.accelerator.synchronize()
def raises(call):
    try:
        call()
    except torch.AcceleratorError as error:
        return "stays" if "device has a fault" in str(error) else str(error)
    return "nothing"
"""


def run(code: str, **environment: str) -> str:
    answer = forked.run(
        [sys.executable, "-c", BEGIN + code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_every_call_raises_after_a_fault() -> None:
    said = run("""
event = torch.Event("sim")
target = torch.zeros(4).pin_memory()
sim.fault()
event.record()
print(raises(torch.accelerator.synchronize))
for call in (
    event.query, event.synchronize, lambda: x.add_(1), lambda: x.sum().item(), lambda: target.copy_(x, non_blocking=True),
    lambda: torch.zeros(5, device="sim"), torch.accelerator.empty_cache, torch.accelerator.get_memory_info,
    lambda: sim.register(4096, 4096), torch.accelerator.synchronize, torch.accelerator.current_stream().query,
):
    print(raises(call))
del x
print(torch.zeros(3, device="sim:1").add_(1).tolist())
""").splitlines()
    assert said == ["stays"] * 12 + ["[1.0, 1.0, 1.0]"]


def test_fault_ends_a_hang_at_once() -> None:
    said = run("""
sim.hang()
x.add_(1)
sim.fault(now=True, why="fell off the bus")
try:
    torch.accelerator.synchronize()
except torch.AcceleratorError as error:
    print("fell off the bus" in str(error))
""")
    assert said == "True\n"


def test_index_out_of_range_in_a_kernel_is_a_fault() -> None:
    said = run("""
y = torch.zeros(2, 4, device="sim").gather(1, torch.full((2, 1), 9, device="sim"))
print(raises(torch.accelerator.synchronize), raises(lambda: x.add_(1)))
""")
    assert said == "stays stays\n"


def test_memory_unregistered_under_a_copy_is_a_fault() -> None:
    said = run("""
target = torch.zeros(1 << 20)
source = torch.ones(1 << 20, device="sim")
sim.register(target.data_ptr(), target.nbytes)
sim.hang()
target.copy_(source, non_blocking=True)
sim.unregister(target.data_ptr())
sim.free()
print(raises(torch.accelerator.synchronize))
""")
    assert said == "stays\n"


def test_operator_without_code_is_told_and_no_fault() -> None:
    said = run("""
try:
    torch.ops.aten._fused_dropout(x, 0.5)
except NotImplementedError as error:
    print(str(error).splitlines()[0])
print(x.add_(1).tolist())
""").splitlines()
    assert said == [
        "aten::_fused_dropout has no code for the CPU, and therefore none for simulated devices",
        "[1.0, 1.0, 1.0, 1.0]",
    ]


@MORE
def test_process_ends_while_its_device_hangs() -> None:
    """A real interpreter, whose end is its own; a minute is for its start on a busy machine."""
    command = [sys.executable, "-c", BEGIN + "sim.hang(); y = x + 1; sim.hang(1); print('end')"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "end\n", "")


def test_device_takes_the_name_of_another() -> None:
    said = run(
        """
print(x.add_(1).device, torch.accelerator.current_accelerator(), torch.npu.memory_allocated() > 0)
event = torch.Event("npu")
event.record()
event.synchronize()
with torch.autocast("npu", dtype=torch.bfloat16):
    print((torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).dtype)
""",
        SIMULATED_DEVICE_NAME="npu",
    )
    assert said.splitlines() == ["npu:0 npu True", "torch.bfloat16"]


def test_name_that_pytorch_has_itself_is_refused() -> None:
    answer = forked.run(
        [sys.executable, "-c", "from holdfast.testing import device; device.load()"],
        env=os.environ | {"SIMULATED_DEVICE_NAME": "xpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode != 0
    assert "Cannot register privateuse1 backend with in-tree device name: xpu" in answer.stderr


def test_number_in_the_environment_that_is_none_is_named() -> None:
    answer = forked.run(
        [sys.executable, "-c", "from holdfast.testing import device; device.load()"],
        env=os.environ | {"SIMULATED_DEVICE_MEMORY": "16G"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode != 0
    assert "SIMULATED_DEVICE_MEMORY is '16G', and must be a number that is not negative" in answer.stderr
