"""Looks for what a run of a script left in its process: threads, children, hooks, redirected files, its own old modules.

`ProcessBaseline` is made when a script is about to run for the first time and remembers what was there. `left` is asked when a
run is over and everything that can be put back has been (`elastic.worker.script_sandbox`). It finds what cannot be put back: whoever
holds it would meet the next run. What decides is `core.elastic.rerun`.

Libraries may leave what they need once per process and what does not know the script: torch's compile workers, the
resource tracker of multiprocessing, the clock of a progress bar.

Must never import anything: a library that is not loaded has left nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from holdfast.core.elastic.rerun import Leftover
from holdfast.tiers.memory.proc_stat import stat_fields

# Threads, pin-memory loops and workers of loaders that were just freed need a moment to end.
SETTLE_S = 1.0
POLL_S = 0.05
# Modules whose threads know nothing of the script.
_HARMLESS_THREADS = ("holdfast", "tqdm", "torch._inductor", "torch._dynamo")
_HARMLESS_CHILDREN = (b"torch/_inductor/compile_worker", b"multiprocessing.resource_tracker")
_OWN_HOOKS = ("holdfast.", "torch.")

# Further kinds, of libraries that are loaded: called without arguments.
Look = Callable[[], Iterable[Leftover]]


class ProcessBaseline:
    """Remembers how the process was before the script ran for the first time."""

    def __init__(self) -> None:
        self._threads = weakref.WeakSet(threading.enumerate())
        self._children = set(_children())
        self._hooks = {id(hook) for _, hook in _hooks()}
        self._files = _standard_files()
        self._affinity, self._nice = os.sched_getaffinity(0), os.nice(0)
        self._interop = torch.get_num_interop_threads()
        self._locks = set(_locks())
        self._orphans = _orphans()
        self._loaders: list[tuple[str, weakref.ref[Any]]] = []
        self._compiled: list[str] = []

    def note(self, modules: Mapping[str, ModuleType]) -> None:
        """Remember modules of the script that are about to be dropped. Whoever keeps their globals keeps their loader."""
        for name, module in modules.items():
            loader = getattr(module, "__loader__", None)
            if isinstance(loader, ExtensionFileLoader):  # its memory outlives the module, and few can be loaded twice
                self._compiled.append(name)
            with contextlib.suppress(TypeError):  # none, or one that many modules share and nobody can watch
                self._loaders.append((name, weakref.ref(loader)))

    def left(self, *looks: Look) -> list[Leftover]:
        """Return what the run left, after everything that can be put back was. May take `SETTLE_S` seconds."""
        for_good = [*self._changed(), *(one for look in looks for one in look())]
        deadline = time.monotonic() + (0.0 if for_good else SETTLE_S)
        while (found := [*self._running(), *self._held()]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            gc.collect()
        self._loaders.clear()
        self._compiled.clear()
        return [*found, *for_good]

    def _running(self) -> Iterator[Leftover]:
        threads = [thread.name for thread in threading.enumerate() if self._is_left(thread)]
        children = [name for pid, name in _children().items() if pid not in self._children]
        yield from (Leftover("threads", threads),) if threads else ()
        yield from (Leftover("child processes", children),) if children else ()

    def _held(self) -> Iterator[Leftover]:
        alive = [name for name, loader in self._loaders if loader() is not None]
        if alive:
            yield Leftover("old modules that something still holds", alive)

    def _changed(self) -> Iterator[Leftover]:
        hooks = [where for where, hook in _hooks() if id(hook) not in self._hooks]
        modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
        process = [
            name
            for name, changed in (
                ("the processors it may use", os.sched_getaffinity(0) != self._affinity),
                ("its priority", os.nice(0) != self._nice),
                ("torch's threads between operations", torch.get_num_interop_threads() != self._interop),
                ("modes of torch", modes > 0),
            )
            if changed
        ]
        locks = [name for fd, name in _locks() if (fd, name) not in self._locks]
        files = [name for name, file in _standard_files().items() if file != self._files[name]]
        yield from (Leftover(kind, names) for kind, names in (
            ("global hooks of torch", hooks), ("changes of the process", process), ("redirected files", files),
            ("locks on files", locks), ("imports that were interrupted", sorted(_orphans() - self._orphans)),
            ("compiled modules of its own", list(self._compiled)),
        ) if names)  # fmt: skip

    def _is_left(self, thread: threading.Thread) -> bool:
        if thread in self._threads or not thread.is_alive() or isinstance(thread, threading._DummyThread):
            return False
        if thread.name.startswith(("holdfast", "hf ")):
            return False
        target = getattr(thread, "_target", None)
        places = {type(thread).__module__, getattr(target, "__module__", None) or ""}
        return not any(place.startswith(_HARMLESS_THREADS) for place in places)


def _orphans() -> set[str]:
    """Return names of packages that are not loaded though parts of them are.

    An import that was interrupted takes the package away and leaves its parts, and the next import does not hang them in again.
    """
    parents = {name.rpartition(".")[0] for name in tuple(sys.modules)}
    return {parent for parent in parents if parent and parent not in sys.modules}


def _children() -> dict[int, str]:
    """Return process ids and names of the children that live, but for those that know nothing of the script."""
    found: dict[int, str] = {}
    known = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for pid in map(int, _read(f"/proc/self/task/{task}/children").split()):
                state = stat_fields(pid)[0]
                command = _read(f"/proc/{pid}/cmdline")
                harmless = pid == getattr(known, "_pid", None) or any(word in command for word in _HARMLESS_CHILDREN)
                if state not in (b"Z", b"X") and not harmless:
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()[:80] or str(pid)
    return found


def _hooks() -> Iterator[tuple[str, Any]]:
    """Yield every hook that torch calls for all modules or optimizers, with where it hangs; ours and torch's own left out."""
    for owner in (torch.nn.modules.module, torch_optimizer):
        for name, hooks in vars(owner).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                for hook in tuple(hooks.values()):
                    function = getattr(hook, "func", hook)
                    if not str(getattr(function, "__module__", "")).startswith(_OWN_HOOKS):
                        yield name.strip("_"), hook


def _locks() -> Iterator[tuple[int, str]]:
    """Yield descriptor and path of each file that is locked through a descriptor: the next run would wait for this one."""
    for entry in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(OSError):
            told = _read(f"/proc/self/fdinfo/{entry}")
            if b"FLOCK" in told or b"OFDLCK" in told:
                yield int(entry), os.readlink(f"/proc/self/fd/{entry}")


def _standard_files() -> dict[str, tuple[int, int] | None]:
    """Return what the three standard descriptors are: device and inode, None if closed."""
    found: dict[str, tuple[int, int] | None] = {}
    for fd, name in enumerate(("standard input", "standard output", "standard error")):
        try:
            stat = os.fstat(fd)
        except OSError:
            found[name] = None
        else:
            found[name] = (stat.st_dev, stat.st_ino)
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
