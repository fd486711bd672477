"""Knows what a script finds when it starts, also for the second time in the same process, and what is cleared behind
it.

`enter` makes the process look like a new interpreter that was started for this script: environment, arguments, search
path, working directory, signal handlers, standard files, seeds, torch's global switches. `clear` drops what a run left:
timers, frames, the `__main__` module, the user's own modules, exit handlers, groups, and tells what it could not drop
(`elastic.worker.run_leftovers`). What is expensive stays: imported libraries, device context, allocator.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib.machinery
import linecache
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from holdfast.base.installed import is_users_own
from holdfast.checkpoint.device import accelerator
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.core.elastic.rerun import Leftover
from holdfast.elastic.worker import group_teardown, main_module
from holdfast.elastic.worker.agent_channel import RunOrder
from holdfast.elastic.worker.library_settings import LibrarySettings
from holdfast.elastic.worker.run_leftovers import Look, ProcessBaseline
from holdfast.elastic.worker.signal_mask import deaf
from holdfast.elastic.worker.torch_environment import TorchImport

logger = logging.getLogger(__name__)

# What torch gives the generators of devices in a new process. Rank 0 begins with it on the processor too.
DEFAULT_SEED = 67280421310721
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SUFFIXES = tuple(importlib.machinery.all_suffixes())
# Modules that are there before the directory of a script is looked into; and torch, which is not imported twice.
_NEVER_SHADOWED = {
    *sys.builtin_module_names, "__main__", "_collections_abc", "_distutils_hack", "_sitebuiltins", "abc", "codecs",
    "encodings", "genericpath", "io", "os", "posixpath", "site", "stat", "zipimport", "holdfast", "numpy", "torch",
}  # fmt: skip
# Attributes of modules that scripts replace: a value for each as it was.
_GLOBALS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (sys, ("excepthook", "displayhook", "unraisablehook", "stdin", "stdout", "stderr")),
    (threading, ("excepthook",)),
    (warnings, ("showwarning", "formatwarning")),
)


def _rank(environment: Mapping[str, str]) -> int:
    """Return the rank that an environment names; 0 if it names none.

    In a new process the processor's generator begins anywhere, so ranks of a script that seeds nothing draw different numbers.
    Those of one rank are the same in every run, for what is kept without a line rests on it.
    """
    told = environment.get("RANK", "")
    return int(told) if told.isdecimal() else 0


def _handlers() -> dict[int, Any]:
    """Return how Python handles each signal; real-time signals, which are ours, are left out."""
    known = {number: signal.getsignal(number) for number in signal.valid_signals() if number < signal.SIGRTMIN}
    return {number: handler for number, handler in known.items() if handler is not None}


def _globals() -> list[tuple[Any, str, Any]]:
    return [(owner, name, getattr(owner, name)) for owner, names in _GLOBALS for name in names]


def _is_in(directory: str) -> bool:
    """Return whether this is the working directory."""
    try:
        return os.getcwd() == directory
    except OSError:
        return False  # it was removed


def _loggers() -> dict[str, logging.Logger]:
    found = {name: it for name, it in logging.root.manager.loggerDict.items() if isinstance(it, logging.Logger)}
    return {"": logging.root, **found}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _limits() -> dict[int, int]:
    """Return the soft limits of the process by kind; not that of core files, which are off where a secret is held."""
    kinds = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")} - {resource.RLIMIT_CORE}
    return {kind: resource.getrlimit(kind)[0] for kind in kinds}


def _reset_limits(limits: Mapping[int, int]) -> None:
    for kind, soft in limits.items():
        now, hard = resource.getrlimit(kind)
        if now != soft:
            with contextlib.suppress(ValueError, OSError):  # whoever lowered the hard one cannot raise it again
                resource.setrlimit(kind, (soft, hard))


def leave_logging_to_the_script() -> None:
    """Takes the launcher's handlers off the root: with any, a script's `logging.basicConfig` would do nothing."""
    if not logging.root.handlers:
        return
    ours = logging.StreamHandler()
    ours.addFilter(lambda _: not logging.root.handlers)  # the script's own show what we log, once there are any
    ours.setFormatter(logging.root.handlers[0].formatter)
    logging.root.handlers.clear()
    logging.getLogger("holdfast").addHandler(ours)


@dataclass(slots=True)
class ScriptSandbox:
    """Remembers how the process was before the script ran for the first time."""

    path: list[str] = field(default_factory=lambda: _without_ours(sys.path))
    directory: str = field(default_factory=os.getcwd)
    handlers: dict[int, Any] = field(default_factory=_handlers)
    mask: set[Any] = field(default_factory=lambda: set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    modules: set[str] = field(default_factory=lambda: set(sys.modules))
    main: ModuleType = field(default_factory=lambda: sys.modules["__main__"])
    globals: list[tuple[Any, str, Any]] = field(default_factory=_globals)
    builtins: dict[str, Any] = field(default_factory=lambda: dict(vars(builtins)))
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    loggers: dict[str, tuple[list[logging.Handler], int, bool, bool]] = field(
        default_factory=lambda: {
            name: (list(it.handlers), it.level, it.propagate, it.disabled) for name, it in _loggers().items()
        }
    )
    umask: int = field(default_factory=_umask)
    limits: dict[int, int] = field(default_factory=_limits)
    tracing: tuple[Any, Any] = field(default_factory=lambda: (sys.gettrace(), sys.getprofile()))
    recursion: int = field(default_factory=sys.getrecursionlimit)
    settings: LibrarySettings = field(default_factory=LibrarySettings)
    torch_import: TorchImport = field(default_factory=lambda: TorchImport(os.environ))
    precision: str = field(default_factory=torch.get_float32_matmul_precision)
    flags: list[tuple[Any, str, Any]] = field(default_factory=lambda: list(_flags()))
    home: str = ""  # of the script
    package: str = ""  # of a module that is run by `-m`
    # Modules of the launcher in whose place the script has its own.
    shadowed: dict[str, ModuleType] = field(default_factory=dict)
    traces: ProcessBaseline | None = None  # what was there before its first line
    at_exit: list[Callable[..., Any]] = field(default_factory=list)  # exit handlers that the script registered

    def enter(self, order: RunOrder) -> None:
        """Everything is as a new interpreter would have it."""
        os.environ.clear()
        os.environ.update(order.environment)
        if not _is_in(self.directory):  # a directory that may be kept and not entered again, as of root, is stayed in
            os.chdir(self.directory)
        sys.argv[:] = order.arguments
        # As torchrun would start it: a script that starts itself anew is no launcher.
        sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if order.is_module else []), *order.arguments]
        self.home = main_module.home_of(order.arguments[0], self.directory, is_module=order.is_module)
        self.package = order.arguments[0].partition(".")[0] if order.is_module else ""
        # As `python` would: the script's directory, then what the environment adds (an empty part is the working
        # directory), then the rest.
        is_bundle = not order.is_module and main_module.is_bundle(order.arguments[0])
        first = [self.home] if is_bundle or not order.environment.get("PYTHONSAFEPATH") else []
        for home in first:
            self._uncover(home)
        told = order.environment.get("PYTHONPATH", "")
        added = [os.path.abspath(part) for part in told.split(os.pathsep)] if told else []
        sys.path[:] = list(dict.fromkeys([*first, *added, *self.path]))
        self._reset_python()
        with deaf():  # torch begins a pool of threads
            self._reset_torch()
            torch.default_generator.manual_seed(DEFAULT_SEED + _rank(order.environment))
            self.torch_import.begin(order.environment)
        if self.traces is None:
            self.traces = ProcessBaseline()
            atexit.register = self._registering(atexit.register)

    def _uncover(self, home: str) -> None:
        """Modules that the script has in its own directory are not those of the same name that the launcher has imported.

        As in plain Python, where the directory of the script comes first; torch and what an interpreter begins with stay.
        """
        loaded = {name.partition(".")[0] for name in self.modules} - _NEVER_SHADOWED
        own = {name for name in _modules_in(home, loaded) if not self._is_from(home, name)}
        for name in self.modules:
            if name.partition(".")[0] in own and name in sys.modules:
                self.shadowed[name] = sys.modules.pop(name)

    def _is_from(self, home: str, name: str) -> bool:
        """Return whether the module of this name that is loaded is the one in this directory."""
        file = getattr(sys.modules.get(name), "__file__", None)
        return file is not None and os.path.realpath(file).startswith(home + os.sep)

    def _reset_python(self) -> None:
        for number, handler in self.handlers.items():
            if signal.getsignal(number) != handler and signal.getsignal(number) is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        signal.set_wakeup_fd(-1)
        for owner, name, value in self.globals:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        vars(builtins).update(self.builtins)
        warnings.filters[:] = self.filters  # type: ignore[index]
        sys.setrecursionlimit(self.recursion)
        os.umask(self.umask)
        _reset_limits(self.limits)
        tempfile.tempdir = None
        self.settings.put_back()
        sys.settrace(self.tracing[0])
        sys.setprofile(self.tracing[1])
        gc.enable()
        socket.setdefaulttimeout(None)
        multiprocessing.set_start_method(None, force=True)

    def _reset_torch(self) -> None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        _reset_determinism()
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
        """Reset what a script may have chosen for all that comes: where tensors are made, in which precision, by which
        kernels.
        """
        torch.set_default_device(None)
        device = accelerator.in_use()
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

    def clear(self, error: BaseException | None, *looks: Look) -> list[Leftover]:
        """Free what the run left behind and return what cannot be freed. The error's frames hold its tensors, so they go first."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        open_checkpointers.abandon_all()
        _end_loaders()
        told = [one for look in looks for one in look()]  # of libraries, before their modules are dropped
        seen: set[int] = set()
        _clear_frames(error, seen)
        self._reset_python()
        self.torch_import.end()
        torch.set_default_device(None)
        self._drop_modules()
        while self.at_exit:
            atexit.unregister(self.at_exit.pop())
        self._reset_loggers()
        group_teardown.destroy_groups()
        sys.last_value = sys.last_traceback = None
        vars(sys).pop("last_exc", None)  # from Python 3.12 on
        _forget_in_caches()
        gc.collect()
        device = accelerator.in_use()
        if device is not None:
            try:
                device.release()
            except RuntimeError as error:  # it has no such allocator, or it failed; `is_over` asked whether it is well
                logger.info("%s keeps the memory of the former run: %s", device.kind, error)
        return self.traces.left(lambda: told) if self.traces is not None else []

    def _drop_modules(self) -> None:
        """Drop the script and the modules that it brought. No local name may hold them when this returns."""
        users = {name: module for name, module in tuple(sys.modules.items()) if self._is_users(name, module)}
        main = sys.modules["__main__"]
        if self.traces is not None:
            self.traces.note({**users, **({"__main__": main} if main is not self.main else {})})
        main_module.clear(self.main)
        for name in users:
            del sys.modules[name]
        sys.modules.update(self.shadowed)
        self.shadowed.clear()

    def _reset_loggers(self) -> None:
        """Put back the handlers of the root and of loggers that the script made. Libraries set up their own once."""
        for name, logger in _loggers().items():
            known = self.loggers.get(name)
            if known is None and name.partition(".")[0] not in (*sys.modules, "__main__"):
                known = ([], logging.NOTSET, True, False)
            if known is not None and name.partition(".")[0] not in ("torch", "holdfast"):
                logger.handlers[:], logger.propagate, logger.disabled = known[0], known[2], known[3]
                logger.setLevel(known[1])
        logging.disable(logging.NOTSET)

    def _registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        """Return `atexit.register`, which notes what the script registers: what libraries do stays, for they stay too."""

        def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals
            name, module = caller.get("__name__", ""), sys.modules.get(caller.get("__name__", ""))
            if name == "__main__" or (module is not None and self._is_users(name, module)):
                self.at_exit.append(function)
            return register(function, *args, **kwargs)

        return noting

    def _is_users(self, name: str, module: ModuleType) -> bool:
        """Return whether the script brought this module, and it is no installed library: it is made anew, as its state
        may matter.

        It may lie beside the script, on the search path, or where `pip install -e` found it. Of an installed package
        everything stays, for some cannot be loaded twice in one process; but for the one that is run by `-m`.
        """
        first = name.partition(".")[0]
        if (name in self.modules and name not in self.shadowed) or first in ("holdfast", "torch"):
            return False
        if first == self.package and first not in sys.stdlib_module_names:
            return True
        file = getattr(module, "__file__", None)
        places = [file] if file else list(getattr(module, "__path__", None) or ())  # a namespace has directories only
        return bool(places) and all(is_users_own(os.path.abspath(place), self.home) for place in places)


def _end_loaders() -> None:
    """Kill the workers of loaders: the run is void, and an iterator that the collector frees waits 5 s for each of them."""
    loaders = sys.modules.get("torch.utils.data.dataloader")
    if loaders is None:
        return
    for thing in gc.get_objects():
        if not issubclass(type(thing), loaders._MultiProcessingDataLoaderIter):
            continue
        with contextlib.suppress(AttributeError, ValueError):  # of another torch, half made, or closed already
            if thing._worker_pids_set:  # or torch's handler of SIGCHLD would raise
                thing._worker_pids_set = False
                loaders._utils.signal_handling._remove_worker_pids(id(thing))
            for worker in thing._workers:
                worker.kill()


def _reset_determinism() -> None:
    """Put the switch back. Only if it was touched: torch imports its compiler for that, 2.5 s of a processor."""
    compiler = sys.modules.get("torch._inductor.config")
    if (
        torch.are_deterministic_algorithms_enabled()
        or torch.is_deterministic_algorithms_warn_only_enabled()
        or getattr(compiler, "deterministic", False)
    ):
        torch.use_deterministic_algorithms(False)


def _modules_in(directory: str, names: set[str]) -> set[str]:
    """Return which of these modules and packages are in a directory; none, if it cannot be read.

    No other entry is looked at: one may be a mount whose server says nothing.
    """
    try:
        with os.scandir(directory) as entries:
            return {
                entry.name.partition(".")[0]
                for entry in entries
                if entry.name.partition(".")[0] in names
                and (entry.name.endswith(_SUFFIXES) or os.path.isfile(os.path.join(entry.path, "__init__.py")))
            }
    except OSError:
        return set()


def _without_ours(path: list[str]) -> list[str]:
    """Return the search path without the working directory, which `python -m` puts first for the launcher itself."""
    return path[1:] if path and path[0] in ("", os.getcwd()) else list(path)


def _forget_in_caches() -> None:
    """Empty caches of Python and torch that hold classes of the script only because they saw them once."""
    linecache.clearcache()
    for clean in getattr(typing, "_cleanups", ()):
        clean()
    made = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard"), "cls_to_fsdp_cls", {})
    made.clear()


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
