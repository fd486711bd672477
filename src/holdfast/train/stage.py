"""What a script finds when it starts, also for the second time in the same process, and what is cleared behind it.

`enter` makes the process look like a new interpreter that was started for this script: environment, arguments, search
path, working directory, signal handlers, seeds, torch's global switches. `clear` drops what a run left: frames, the
`__main__` module, the user's own modules, groups. What is expensive stays: imported libraries, device context,
allocator, compiled code.

Used by `train.runner` only.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from holdfast.train import alive, devices, leaving, main_module
from holdfast.train.control import Order

logger = logging.getLogger(__name__)

# torch's own seed of a new process.
DEFAULT_SEED = 67280421310721
# Directories of what was installed, not written by the user.
_INSTALLED = {"site-packages", "dist-packages"}
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(slots=True)
class Stage:
    """How the process was before the script ran for the first time."""

    path: list[str] = field(default_factory=lambda: _without_ours(sys.path))
    directory: str = field(default_factory=os.getcwd)
    handlers: dict[int, Any] = field(default_factory=lambda: {n: signal.getsignal(n) for n in _HANDLED})
    modules: set[str] = field(default_factory=lambda: set(sys.modules))
    main: ModuleType = field(default_factory=lambda: sys.modules["__main__"])
    hook: Any = field(default_factory=lambda: sys.excepthook)
    num_threads: int = field(default_factory=torch.get_num_threads)
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    flags: list[tuple[Any, str, Any]] = field(default_factory=lambda: list(_flags()))
    home: str = ""  # of the script

    def enter(self, order: Order) -> None:
        """Everything is as a new interpreter would have it."""
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(self.directory)
        sys.argv[:] = order.arguments
        first = self.directory if order.is_module else os.path.dirname(os.path.realpath(order.arguments[0]))
        self.home = first
        # As `python` would: the script's directory, then what the environment adds, then the rest.
        added = [part for part in order.environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        sys.path[:] = list(dict.fromkeys([first, *added, *self.path]))
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        sys.excepthook = self.hook
        self._reset_torch(order)

    def _reset_torch(self, order: Order) -> None:
        threads = order.environment.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else self.num_threads)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        self._reset_devices()
        torch.manual_seed(DEFAULT_SEED)
        random.seed()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # a fork would repeat the numbers of its siblings
        tracker = sys.modules.get("torch.distributed.tensor._random")
        if hasattr(tracker, "_rng_tracker"):
            tracker._rng_tracker = None  # type: ignore[union-attr]  # of a mesh that is gone

    def _reset_devices(self) -> None:
        """What a script may have chosen for all that comes: where tensors are made, in which precision, by which kernels."""
        torch.set_default_device(None)
        device = devices.in_use()
        for kind in ("cpu", *([device.kind] if device is not None else [])):
            torch.set_autocast_enabled(kind, False)
        torch.set_autocast_cache_enabled(True)
        torch.clear_autocast_cache()
        torch.autograd.set_detect_anomaly(False)
        if torch.get_float32_matmul_precision() != self.precision:
            torch.set_float32_matmul_precision(self.precision)
        for owner, name, value in self.flags:
            with contextlib.suppress(RuntimeError, AttributeError):  # torch refuses a mixture of its old and new names
                if getattr(owner, name) != value:
                    setattr(owner, name, value)
        if device is not None:
            try:
                device.reset()
            except RuntimeError as error:
                logger.info("%s was not reset: %s", device.kind, error)

    def clear(self, error: BaseException | None) -> None:
        """Frees what the run left behind. The error's frames hold its tensors, so they go first."""
        main_module.clear(self.main)
        alive.abandon_all()
        seen: set[int] = set()
        _clear_frames(error, seen)
        for name in [name for name, module in tuple(sys.modules.items()) if self._is_users(name, module)]:
            del sys.modules[name]
        leaving.destroy_groups()
        sys.last_value = sys.last_traceback = None
        vars(sys).pop("last_exc", None)  # from Python 3.12 on
        gc.collect()
        device = devices.in_use()
        if device is not None:
            try:
                device.release()
            except RuntimeError as error:  # it has no such allocator, or it failed; `is_over` asked whether it is well
                logger.info("%s keeps the memory of the former run: %s", device.kind, error)

    def _is_users(self, name: str, module: ModuleType) -> bool:
        """Whether the script brought this module from its own directory: it is made anew, as its state may matter.

        Libraries stay, wherever they were installed: some cannot be loaded twice in one process.
        """
        file = getattr(module, "__file__", None)
        if name in self.modules or not file or name.partition(".")[0] in ("holdfast", "torch"):
            return False
        place = os.path.abspath(file)
        return place.startswith(self.home + os.sep) and not _INSTALLED & set(place.split(os.sep))


def _without_ours(path: list[str]) -> list[str]:
    """Return the search path without the working directory, which `python -m` puts first for the launcher itself."""
    return path[1:] if path and path[0] in ("", os.getcwd()) else list(path)


def _flags() -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of torch's switches for kernels of devices; asking begins no device."""
    backends: Any = torch.backends
    for owner, names in (
        (backends, ("fp32_precision",)),
        (backends.cudnn, ("enabled", "benchmark", "benchmark_limit", "deterministic", "fp32_precision", "allow_tf32")),
        (backends.cudnn.conv, ("fp32_precision",)),
        (backends.cudnn.rnn, ("fp32_precision",)),
        (backends.cuda.matmul, (
            "fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )),
        (backends.mkldnn, ("enabled", "deterministic")),
    ):  # fmt: skip
        for name in names:
            with contextlib.suppress(RuntimeError, AttributeError):
                yield owner, name, getattr(owner, name)


def _clear_frames(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    _clear_frames(error.__cause__, seen)
    _clear_frames(error.__context__, seen)
    error.__traceback__ = None
