"""Accelerators behind one interface: torch's generic names for what all have, a class per vendor for the few rest.

Streams, events, generators and the current device have one name in torch for every accelerator (`torch.Stream`,
`torch.Event`, `torch.accelerator`, `torch.get_device_module`). What differs stands here and nowhere else: how host
memory is registered with a driver, how a broken group is aborted, which settings its library needs before the first
group, which files tell that a node has such devices. A device that nobody here knows, of any backend that
`torch.accelerator` knows, gets the generic class: it registers nothing, so its copies are made in the call (`checkpoint.capture.bounce_buffers`), and all else works.

`torch.cuda` must not be named anywhere else. No function here makes a context on a device that the process does not
use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.base.handler_errors import forgive, pass_on

logger = logging.getLogger(__name__)

# Between two looks at an event that is waited for.
POLL_S = 1e-3
# cuMemHostRegister and hipHostRegister: for all contexts of the process.
_PORTABLE = 1
# Of CUDA and HIP: a thread may ask for events while another one captures a graph in whatever mode.
_RELAXED = 2


class Device:
    """One kind of accelerator, by torch's generic names.

    Args:
        kind: as in `tensor.device.type`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    # Streams and events.

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Returns the stream of `device` that this thread queues to."""
        if _accelerator() == self.kind:
            return torch.accelerator.current_stream(device)
        return self._module().current_stream(device)  # type: ignore[no-any-return]

    def new_stream(self, device: torch.device, *, priority: int = 0) -> torch.Stream:
        """Returns another stream of `device`; its kernels go first if `priority` is below zero."""
        with self.guard(device):
            return torch.Stream(device=device, priority=priority)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Returns an event with a time, recorded behind all that `stream` holds now."""
        with self.guard(stream.device):
            event = torch.Event(stream.device, enable_timing=True)
            event.record(stream)
        return event

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        """Makes `device` the current one of this thread inside the block."""
        before = torch.accelerator.current_device_index() if _accelerator() == self.kind else None
        if before is None or device.index in (None, before):
            yield
            return
        torch.accelerator.set_device_index(device.index)
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    def capturing(self) -> bool:
        """Returns whether this thread's stream is recording a graph, so that what is queued runs later, and often."""
        asked = getattr(self._module(), "is_current_stream_capturing", None)
        return bool(asked()) if asked is not None else False

    def leave_captures_alone(self) -> None:
        """Nothing this thread asks breaks a capture of another thread from now on; where it would, is the vendor's."""

    # The process.

    def in_use(self) -> bool:
        """Returns whether this process uses the accelerator already; asking does not begin it."""
        module = self._module()
        asked = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
        return bool(asked()) if asked is not None else False

    def current(self) -> torch.device:
        """Returns the current device of this thread."""
        if _accelerator() == self.kind:
            return torch.device(self.kind, torch.accelerator.current_device_index())
        return torch.device(self.kind, self._module().current_device())

    def used(self) -> list[torch.device]:
        """Returns the devices on which this process has memory, or whose generator has drawn; begins none."""
        found = {device.index for device in self._with_memory(range(self.count()))}
        drawn = {index for index in range(self.count()) if index not in found and self._has_drawn(index)}
        return [torch.device(self.kind, index) for index in sorted(found | drawn)]

    def begin(self) -> None:
        """Begins to use the accelerator, so that nothing that was asked of it before comes later, as a seed on CUDA does."""
        init = getattr(self._module(), "init", None)
        if init is not None:
            init()

    def with_memory(self) -> list[torch.device]:
        """Returns the devices on which this process has memory; begins none. The current one where torch cannot tell."""
        if getattr(self._module(), "memory_allocated", None) is None:
            return [self.current()]
        return self._with_memory(range(self.count()))

    def _with_memory(self, indices: Iterable[int]) -> list[torch.device]:
        """Those of the devices on which this process has memory. Torch counts for long: those without a context are not asked."""
        has_memory = getattr(self._module(), "memory_allocated", None)
        devices = [torch.device(self.kind, index) for index in indices if self._has_context(index)]
        return [device for device in devices if has_memory is not None and has_memory(device)]

    def begun(self) -> list[torch.device]:
        """Returns the devices that this process has begun to use: those with its memory, or where it has none the current one."""
        return self.with_memory() or [self.current()]

    def reset(self) -> None:
        """Makes the current device and stream what a new process has, and gives a share of memory back that was limited."""
        before = self.current()
        default = getattr(self._module(), "default_stream", None)
        if default is not None:
            torch.accelerator.set_stream(default(before))
        unlimited = getattr(self._module(), "set_per_process_memory_fraction", None)
        if unlimited is not None:
            unlimited(1.0)
        if before.index != 0 and self._has_context(0):
            torch.accelerator.set_device_index(0)

    def _has_context(self, index: int) -> bool:
        """Return whether making a device the current one begins nothing on it."""
        return index < self.count()

    def release(self) -> None:
        """Gives the memory that torch keeps for later back to the device."""
        if _accelerator() == self.kind:
            torch.accelerator.empty_cache()

    # Memory of the host.

    def register(self, device: torch.device, address: int, num_bytes: int) -> bool:
        """Makes host memory known to the driver, so that copies into it can be queued; False: they cannot, and nothing is wrong.

        Torch has no name for it. A device's module that can is asked by ours: `register_host_memory(address, num_bytes)`,
        which returns True if it did, and `unregister_host_memory(address)`.
        """
        offered = getattr(self._module(), "register_host_memory", None)
        if offered is None:
            return False
        try:
            with self.guard(device):
                return offered(address, num_bytes) is True
        except (RuntimeError, OSError) as error:
            pass_on(error)
            logger.info("%s registers no host memory: %s", self.kind, error)
            return False

    def unregister(self, device: torch.device, address: int) -> None:
        """Takes a registration back. Nothing may be copied there meanwhile."""
        offered = getattr(self._module(), "unregister_host_memory", None)
        try:
            if offered is not None:
                with self.guard(device):
                    offered(address)
        except (RuntimeError, OSError) as error:
            pass_on(error)
            logger.info("%s did not unregister host memory: %s", self.kind, error)

    # Random numbers.

    def random_state(self, index: int | None = None) -> torch.Tensor | None:
        """Returns the state of a device's generator, of the current one without an index; None if torch cannot tell it."""
        tell = getattr(self._module(), "get_rng_state", None)
        return tell(self.current() if index is None else torch.device(self.kind, index)) if tell is not None else None

    def set_random_state(self, words: torch.Tensor, index: int | None = None) -> None:
        """Continues the sequence of a device; of the current one without an index."""
        take = getattr(self._module(), "set_rng_state", None)
        if take is not None:
            take(words, self.current() if index is None else torch.device(self.kind, index))

    def _has_drawn(self, index: int) -> bool:
        """Return whether a device's generator is not where its seed began. What torch cannot tell has not."""
        generators = getattr(self._module(), "default_generators", ())
        if index >= len(generators) or not self._has_context(index):
            return False
        fresh = torch.Generator(device=generators[index].device)
        fresh.manual_seed(generators[index].initial_seed())
        return not torch.equal(fresh.get_state(), generators[index].get_state())

    def count(self) -> int:
        """Returns how many devices this process sees."""
        return int(self._module().device_count())

    def _module(self) -> Any:
        return torch.get_device_module(self.kind)


class _Cuda(Device):
    """NVIDIA's, and AMD's under the same names. Registration goes to the driver: the runtime would keep the error of one
    that fails, and the next launch of the user's would raise it.
    """

    def register(self, device: torch.device, address: int, num_bytes: int) -> bool:
        call = _symbol("hipHostRegister", "cuMemHostRegister_v2")
        if call is None:
            return False
        with self.guard(device):
            self.current_stream(device).query()  # the driver asks for a context of this thread
            code = call(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE))
        if code:
            _forget_error()
            logger.info("the driver does not register %d bytes of host memory: code %d", num_bytes, code)
        return not code

    def begun(self) -> list[torch.device]:
        devices = [torch.device(self.kind, index) for index in range(self.count())]
        return [device for device in devices if self._has_context(device.index)] or super().begun()

    def leave_captures_alone(self) -> None:
        call = _symbol("hipThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode")
        if call is not None:
            call(ctypes.byref(ctypes.c_int(_RELAXED)))

    def _has_context(self, index: int) -> bool:
        asked = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        return asked is not None and bool(asked(index))  # a context costs half a gigabyte of the card of another rank

    def unregister(self, device: torch.device, address: int) -> None:
        call = _symbol("hipHostUnregister", "cuMemHostUnregister")
        if call is not None:
            with self.guard(device):
                code = call(ctypes.c_void_p(address))
            if code:
                _forget_error()
                logger.info("the driver does not unregister host memory: code %d", code)


def _symbol(hip: str, cuda: str) -> Callable[..., int] | None:
    """A function of the driver that is loaded, by its name there; None: there is no such driver."""
    library = "libamdhip64.so" if torch.version.hip else "libcuda.so.1"
    try:
        return getattr(ctypes.CDLL(library), hip if torch.version.hip else cuda)  # type: ignore[no-any-return]
    except (OSError, AttributeError) as error:
        pass_on(error)
        logger.info("host memory is not registered: %s", error)
        return None


def _forget_error() -> None:
    """HIP has no driver below its runtime: the error is taken off, or the next launch would raise it."""
    take = _symbol("hipGetLastError", "cuMemHostUnregister") if torch.version.hip else None
    if take is not None:
        take()


@functools.cache
def device_of(kind: str) -> Device:
    """Returns the interface to accelerators of one `tensor.device.type`."""
    return _Cuda(kind) if kind == "cuda" else Device(kind)


def _accelerator() -> str:
    """The kind of torch's accelerator in this process; empty if it has none. Asking does not begin it."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else ""


def offered(kind: str) -> Device | None:
    """Returns the accelerator of this name, used or not; None if the process has no such one."""
    return device_of(kind) if kind and _accelerator() == kind else None


def name_of(device: torch.device) -> str:
    """Returns what to call the device of a tensor in a version: the current one without its number, for a rank may come back on another."""
    interface = offered(device.type)
    is_current = interface is not None and interface.current() == device
    return device.type if is_current else str(device)


def in_use() -> Device | None:
    """Returns the accelerator that this process uses, or None."""
    kind = _accelerator()
    device = device_of(kind) if kind else None
    return device if device is not None and device.in_use() else None


def capturing() -> bool:
    """Returns whether what this thread queues is recorded into a graph, to run later and often."""
    device = in_use()
    return device is not None and device.capturing()


def leave_captures_alone() -> None:
    """Looks of this thread at events break no capture of another thread from now on. Once per thread."""
    device = in_use()
    if device is not None:
        device.leave_captures_alone()


def passed(event: torch.Event) -> bool:
    """Returns whether a device has passed the event. Does not wait, and raises nothing: a device in error has not."""
    with forgive(RuntimeError):
        return bool(event.query())
    return False


def wait(events: tuple[torch.Event, ...], deadline_s: float) -> bool:
    """Waits at most so many seconds until all events have passed; returns whether they have. A device in error never has."""
    until = time.monotonic() + deadline_s
    try:
        while not all(event.query() for event in events):
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
    except RuntimeError as error:
        pass_on(error)
        return False
    return True


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Return where tensors lie that are not in host memory."""
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def record(devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
    """Return events behind all that this thread has queued for the devices until now."""
    return {d: device_of(d.type).record(device_of(d.type).current_stream(d)) for d in devices}


def caught_up(tensors: Iterable[torch.Tensor], deadline_s: float) -> bool:
    """Waits at most so many seconds until the devices of `tensors` have done all that this thread queued for them.

    MUST come before the host reads a device's memory: that read would wait as well, for a device that hangs without an end,
    and hear no signal. A device in error never catches up. True if all tensors are in host memory.
    """
    return all_done(devices_of(tensors), deadline_s)


def all_done(devices: Iterable[torch.device], deadline_s: float) -> bool:
    """Waits at most so many seconds until the devices have done all that this thread queued for them; else as `caught_up`."""
    try:
        events = tuple(record(devices).values())
    except RuntimeError as error:
        pass_on(error)
        logger.info("a device does not work any more: %s", error)
        return False
    return wait(events, deadline_s)


class Behind:
    """Tells whether devices of this process have not done yet what this thread had queued when it was first asked."""

    def __init__(self) -> None:
        self._events: tuple[torch.Event, ...] | None = None

    def __call__(self) -> bool:
        """Returns whether one has not. Does not wait. A device in error will not, so it is not behind."""
        try:
            if self._events is None:
                interface = in_use()
                devices = interface.with_memory() if interface is not None else []
                self._events = tuple(record(devices).values())
            return not all(event.query() for event in self._events)
        except RuntimeError as error:
            pass_on(error)
            logger.info("a device does not work any more: %s", error)
            return False


def healthy(deadline_s: float) -> bool:
    """Returns whether each device that this process uses runs one more kernel within so many seconds. True without a device.

    The kernel is queued where the thread queues, so it comes behind all that is there: a device that is that far behind
    does not count as healthy either.
    """
    interface, until = in_use(), time.monotonic() + deadline_s
    if interface is None:
        return True
    try:
        streams = [interface.current_stream(device) for device in interface.begun()]
    except RuntimeError as error:
        pass_on(error)
        logger.warning("a device does not work any more: %s", error)
        return False
    found: list[torch.Event] = []
    # A driver that hangs may not come back from queueing: that costs this thread, not its caller.
    asking = threading.Thread(target=_ask, args=(interface, streams, found), name="holdfast-probe", daemon=True)
    asking.start()
    asking.join(deadline_s)
    return len(found) == len(streams) and wait(tuple(found), max(0.0, until - time.monotonic()))


def _ask(interface: Device, streams: list[torch.Stream], found: list[torch.Event]) -> None:
    for stream in streams:
        try:
            with interface.guard(stream.device), stream:
                with contextlib.suppress(torch.OutOfMemoryError):  # a full device is not a broken one
                    torch.ones(1, device=stream.device)  # a kernel that fills
                found.append(interface.record(stream))
        except RuntimeError as error:
            pass_on(error)
            logger.warning("%s does not work any more: %s", stream.device, error)


# What a node has, told without a context: by files.

# Files of drivers -> what must be in the environment before a worker's first group, so that a group that was aborted
# raises instead of ending the process.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_PRESETS: Mapping[str, Mapping[str, str]] = {
    "/dev/nvidiactl": _NCCL,
    "/dev/dxg": _NCCL,  # under Windows' Linux
    "/dev/kfd": _NCCL,  # AMD's; RCCL has NCCL's names in torch
    "/dev/davinci[0-9]*": {"HCCL_ASYNC_ERROR_HANDLING": "0"},
}


def presets(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what a worker's environment needs for the devices of this node; never over a value that is set there.

    Torch reads the names of NCCL's settings without `TORCH_` too, and prefers the longer ones.
    Torch then ends no process whose collective fails or lasts, so only who watches its workers may set this.
    """
    wanted: dict[str, str] = {}
    for path, values in _PRESETS.items():
        if glob.glob(path):
            wanted |= {
                name: value for name, value in values.items() if not {name, name.removeprefix("TORCH_")} & set(environ)
            }
    return wanted


def names() -> str:
    """Returns what this node's accelerators and torch's libraries for them are, for what is compiled for them."""
    versions = [f"{name} {getattr(torch.version, name, None)}" for name in ("cuda", "hip", "xpu")]
    return ",".join([*versions, *sorted(set(_models()) | set(_cards()))])


def _models() -> Iterator[str]:
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        yield from (line for line in _read(path).splitlines() if line.startswith("Model"))
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        yield from (line for line in _read(path).splitlines() if line.startswith("gfx_target_version"))


def _cards() -> Iterator[str]:
    """Vendor and model of every display controller and accelerator on the bus: their classes begin with 03 and 12."""
    for path in Path("/sys/bus/pci/devices").glob("*/class"):
        if _read(path).startswith(("0x03", "0x12")):
            yield f"{_read(path.with_name('vendor')).strip()}:{_read(path.with_name('device')).strip()}"


def _read(path: Path) -> str:
    with forgive(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""
