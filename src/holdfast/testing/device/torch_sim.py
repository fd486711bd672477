"""The Python module of the simulated device: what `torch.sim` answers, by the names that `torch.cuda` has for them.

`make()` fills a module and registers it with PyTorch. It must be called once per process, after the native part was
loaded and before the first use of the device. `torch.accelerator` and the generic classes `torch.Stream` and
`torch.Event` do most of it; what is here is what code looks up by `torch.get_device_module()`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration

Device = Any  # a torch.device, its name, its index, or None: the current one


class DeviceModule(types.ModuleType):
    """A module like `torch.cuda` for the devices of the native part."""

    def __init__(self, native: Any) -> None:
        super().__init__(f"torch.{native.name()}", "A simulated accelerator: threads that work late.")
        self._native = native
        self._type = native.name()
        self.Graph = torch.accelerator.Graph if hasattr(torch.accelerator, "Graph") else None
        # PyTorch asks for these by name; none of them may start a device.
        self._is_in_bad_fork = native.forked
        self.device_count = native.device_count
        self.is_initialized = native.any_in_use

    # What is there.

    def is_available(self) -> bool:
        """Return whether there is a device; no device is started for the answer."""
        return bool(self._native.device_count() > 0)

    def get_device_name(self, device: Device = None) -> str:
        return f"simulated device {self.index(device)}"

    def get_device_properties(self, device: Device = None) -> types.SimpleNamespace:
        total = self.mem_get_info(device)[1]
        return types.SimpleNamespace(name=self.get_device_name(device), total_memory=total, multi_processor_count=1)

    def get_device_capability(self, device: Device = None) -> tuple[int, int]:
        """Return a version; there is one."""
        self.index(device)
        return (1, 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that autocast may choose."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return whether there is a device: the host computes, and it has the type."""
        return including_emulation or self.is_available()

    # The current device.

    def index(self, device: Device = None) -> int:
        """Return the index that a device, a name or a number has; without one, that of the current device."""
        if isinstance(device, int):
            return device
        found = torch.device(self._type if device is None else device)
        if found.type != self._type:
            raise ValueError(f"expected a {self._type} device, got {found}")
        index: int | None = found.index  # PyTorch's types do not say that it may be none
        return self.current_device() if index is None else index

    def init(self) -> None:
        """Refuse in a forked child; start nothing."""
        if self._native.forked():
            self._native.use(0)  # raises
        self._native.initialize()

    def _lazy_init(self) -> None:
        self.init()

    def current_device(self) -> int:
        """Return the index of the device that the calling thread works with."""
        return torch.accelerator.current_device_index()

    def set_device(self, device: Device) -> None:
        """Choose the device of the calling thread."""
        torch.accelerator.set_device_index(self.index(device))

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        """Choose the device of the calling thread for a block."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Device = None) -> None:
        """Wait for all work of the device."""
        torch.accelerator.synchronize(self.index(device))

    # Streams, events, graphs.

    def Stream(self, device: Device = None, priority: int = 0, **given: Any) -> torch.Stream:  # noqa: N802
        """Return one of 32 streams of the device, in turn."""
        if given:
            return torch.Stream(**given)
        return torch.Stream(device=torch.device(self._type, self.index(device)), priority=priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:  # noqa: N802
        return torch.Event(self._type, enable_timing=enable_timing, blocking=blocking)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """Choose the stream of the calling thread for a block."""
        if stream is None:
            yield
        else:
            with stream:
                yield

    def current_stream(self, device: Device = None) -> torch.Stream:
        """Return the stream that the calling thread works with."""
        return torch.accelerator.current_stream(self.index(device))

    def default_stream(self, device: Device = None) -> torch.Stream:
        """Return the stream that every thread begins with."""
        place = torch.device(self._type, self.index(device))
        kind = int(torch._C._autograd.DeviceType.PrivateUse1.value)
        return torch.Stream(stream_id=0, device_index=place.index, device_type=kind)

    def set_stream(self, stream: torch.Stream) -> None:
        """Choose the stream of the calling thread, and its device."""
        torch.accelerator.set_stream(stream)

    def is_current_stream_capturing(self) -> bool:
        """Return whether the work of the current stream becomes a part of a graph instead of being done."""
        return bool(self._native.is_capturing(self.current_device()))

    # Memory.

    def empty_cache(self) -> None:
        """Wait for all devices and give what is cached back to the cards."""
        torch.accelerator.empty_cache()

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Register memory of the host for copies that the host does not wait for; False where a part is registered."""
        return bool(self._native.register(address, num_bytes))

    def unregister_host_memory(self, address: int) -> bool:
        """Take back a registration; False where none begins at the address."""
        return bool(self._native.unregister(address))

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """Return free and total memory of the card, in bytes, with what other processes hold counted."""
        return torch.accelerator.get_memory_info(self.index(device))

    def memory_stats(self, device: Device = None) -> Any:
        """Return the counts of the allocator."""
        return torch.accelerator.memory_stats(self.index(device))

    def memory_allocated(self, device: Device = None) -> int:
        """Return the bytes in tensors."""
        return torch.accelerator.memory_allocated(self.index(device))

    def max_memory_allocated(self, device: Device = None) -> int:
        """Return the most bytes that were in tensors since reset_peak_memory_stats()."""
        return torch.accelerator.max_memory_allocated(self.index(device))

    def memory_reserved(self, device: Device = None) -> int:
        """Return the bytes that this process holds of the card, without its context."""
        return torch.accelerator.memory_reserved(self.index(device))

    def max_memory_reserved(self, device: Device = None) -> int:
        """Return the most bytes that this process held since reset_peak_memory_stats()."""
        return torch.accelerator.max_memory_reserved(self.index(device))

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        """Let the peaks begin with what is held now."""
        torch.accelerator.reset_peak_memory_stats(self.index(device))

    # Random numbers.

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generator of each device; asking for them starts none."""
        return tuple(self._generator(index) for index in range(self._native.device_count()))

    def _generator(self, device: Device) -> torch.Generator:
        generator: torch.Generator = self._native.default_generator(self.index(device))
        return generator

    def manual_seed(self, seed: int) -> None:
        self._generator(None).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def seed_all(self) -> None:
        """Seed the generators of all devices with one number that nobody knows."""
        self.manual_seed_all(self._generator(None).seed())

    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""
        return self._generator(None).initial_seed()

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """Return the generator's state: a uint8 tensor of 16 bytes on the CPU."""
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """Set the generator's state, as get_rng_state() returned it."""
        self._generator(device).set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Set the states of all devices, as get_rng_state_all() returned them."""
        for generator, state in zip(self.default_generators, states, strict=True):
            generator.set_state(state)


def make(native: Any) -> DeviceModule:
    """Name the device type, make it known to PyTorch, and return the module that stands under `torch.NAME`."""
    name = native.name()
    backend_registration.rename_privateuse1_backend(name)
    native.start()
    module = DeviceModule(native)
    torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    return module
