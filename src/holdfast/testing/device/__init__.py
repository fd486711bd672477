"""A simulated accelerator for PyTorch: a device made of threads, which works late and fails as it is told.

`load()` makes the device type `sim` known to PyTorch; from then on `torch.device("sim")`, `torch.accelerator`, streams,
events, DDP and FSDP2 work with it. README.md beside this file tells what it does as a real device does, and what not.
Nothing here imports another part of holdfast.
"""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path
from typing import Any

from holdfast.testing.device import build, process_group, torch_sim

BuildFailed = build.BuildFailed
unavailable = build.unavailable

__all__ = [
    "BuildFailed",
    "autoload_directory",
    "build_now",
    "counts",
    "fault",
    "free",
    "hang",
    "holders",
    "is_started",
    "load",
    "name",
    "register",
    "set_abort",
    "set_copy_rate",
    "set_kernel_time",
    "sleep",
    "unavailable",
    "unregister",
]

Device = torch_sim.Device
_loaded: list[torch_sim.DeviceModule] = []


def load() -> torch_sim.DeviceModule:
    """Make the device known to PyTorch, building it first where that was never done, and return `torch.sim`.

    Must come before the first use of any accelerator. Starts no device: forking is allowed until one is used. May be
    called again.

    Raises:
        BuildFailed: `unavailable()` says why, or the compiler refused.
    """
    if not _loaded:
        native = _import(build.build())
        made = torch_sim.make(native)
        process_group.register(native)
        atexit.register(native.stop)
        _loaded.append(made)
    return _loaded[0]


def _import(path: Any) -> Any:
    spec = importlib.util.spec_from_file_location(build.MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def build_now() -> None:
    """Build the device if that was never done, and do not load it: 20 to 60 s."""
    build.build()


def autoload_directory() -> str:
    """Return a folder: with it on PYTHONPATH, `import torch` loads the device, in scripts that know nothing of it."""
    return str(Path(__file__).resolve().parent / "autoload")


def _native() -> Any:
    return load()._native


def _index(device: Device) -> int:
    return load().index(device)


def name() -> str:
    """Return the name of the device type: `sim`, or what SIMULATED_DEVICE_NAME says."""
    return str(_native().name())


def set_copy_rate(bytes_per_s: float) -> None:
    """Let copies between host and device move so many bytes per second; 0: at once."""
    _native().set_copy_rate(bytes_per_s)


def set_kernel_time(seconds: float) -> None:
    """Let every kernel take so long besides its own work; 0: no longer."""
    _native().set_kernel_time(seconds)


def set_abort(how: str) -> None:
    """Say what becomes of the work queued behind a collective that is aborted.

    Args:
        how: `goes on`: it is done, with whatever is in memory, as NCCL's abort leaves it. `error`: it is skipped, and the
            next wait for it raises; the device stays sound. `hangs`: the device goes on, and `abort()` itself does not
            return before this is set to something else.

    Raises:
        RuntimeError: None of these.
    """
    _native().set_abort(how)


def register(address: int, num_bytes: int) -> bool:
    """Register memory of the host for copies that the host does not wait for.

    Belongs to the current device, which it starts. False, and nothing changes, where a part is registered already.
    """
    return bool(_native().register(address, num_bytes))


def unregister(address: int) -> bool:
    """Take back a registration. False where none begins at the address."""
    return bool(_native().unregister(address))


def hang(device: Device = None) -> None:
    """Queue a kernel on the current stream of the device that ends at the next free()."""
    _native().hang(_index(device))


def free(device: Device = None) -> None:
    """End every kernel that hang() has queued on the device."""
    _native().free(_index(device))


def sleep(seconds: float, device: Device = None) -> None:
    """Queue a kernel on the current stream of the device that takes so long."""
    _native().sleep(_index(device), seconds)


def fault(device: Device = None, *, why: str = "device-side assert triggered", now: bool = False) -> None:
    """Let the device fail for good: queued work is skipped, every later call raises torch.AcceleratorError.

    Args:
        device: Which; the current device without it.
        why: A part of what is raised.
        now: At once, even if the device hangs; else when the current stream comes to it.
    """
    _native().fault(_index(device), why, now)


def counts() -> dict[str, int]:
    """Return how often this process did what a test may count.

    Keys: `queued` and `waited` (kernels that the host did not, or did, wait for), `late_copies` and `blocking_copies`
    (between host and device), `collectives`, `replays` (of graphs), `registered` (ranges of host memory, pinned too).
    """
    return dict(_native().counts())


def holders(device: Device = None) -> dict[int, int]:
    """Return the bytes that each process holds of a card, by its id; others only with SIMULATED_DEVICE_CARDS.

    A process that was killed stays as long as a child that it forked lives.
    """
    return dict(_native().holders(_index(device)))


def is_started(device: int) -> bool:
    """Return whether this process uses the device: it has taken memory of the card, and forked children cannot use it."""
    return bool(_native().in_use(device))
