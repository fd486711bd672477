"""The simulated device of a child process, and what each test must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

import device_kit


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """The package, with the device loaded, nothing slowed down, and all work done when the test is over."""
    assert device_kit.is_child(), "tests with this fixture run in a child"
    import torch

    from holdfast.testing import device

    device.load()
    torch.accelerator.set_device_index(0)
    yield device
    device.set_copy_rate(0)
    device.set_kernel_time(0)
    device.set_abort("goes on")
    for index in range(torch.accelerator.device_count()):
        if device.is_started(index):
            device.free(index)
            torch.accelerator.synchronize(index)
