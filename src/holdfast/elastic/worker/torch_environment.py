"""Applies the variables that torch reads at its import also where torch is imported already: in a fork.

A script may set `OMP_NUM_THREADS`, `TORCH_DISTRIBUTED_DEBUG` or `TORCH_LOGS` in its first lines, before `import torch`.
So `begin` takes torch out of `sys.modules`: the script's own `import torch` asks `TorchImport`, which hands out the module
that is loaded and lets torch read its variables again. Modules that hold torch already notice nothing.

Must never: load torch a second time, or change what the environment does not ask for.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.distributed as dist

from holdfast.elastic.worker.signal_mask import deaf

# Variables of torch's logging, which is set up at the import.
_OF_LOGS = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT", "TORCH_TRACE", "TORCH_DTRACE")


class TorchImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder and loader of torch for the script's first `import torch`.

    Args:
        environment: what torch has read when it was imported.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._num_threads = torch.get_num_threads()
        self._read = dict(environment)
        self._spec = torch.__spec__

    def begin(self, environment: Mapping[str, str]) -> None:
        """The script begins with this environment, and has not imported torch."""
        self._read_again(environment, anew=True)
        if sys.modules.pop("torch", None) is not None:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """The script is over."""
        sys.modules["torch"] = torch
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - as importlib calls it
        target: ModuleType | None = None,  # noqa: ARG002 - as importlib calls it
    ) -> ModuleSpec | None:
        """Return where torch lies, with this object as its loader."""
        if name != "torch":
            return None
        return importlib.util.spec_from_file_location(
            name, torch.__file__, loader=self, submodule_search_locations=list(torch.__path__)
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - as importlib calls it
        """Return the module that is loaded."""
        return torch

    def exec_module(self, module: ModuleType) -> None:
        """Let torch read its variables.

        Raises:
            RuntimeError, ValueError: torch's own, of a value that it does not know, as at any import.
        """
        module.__spec__ = self._spec  # importlib has put that of `find_spec` there
        with deaf():
            self._read_again(os.environ)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _read_again(self, environment: Mapping[str, str], *, anew: bool = False) -> None:
        """Apply what differs from what torch has read; `anew`: also what a former run may have chosen by a call."""

        def differs(*names: str) -> bool:
            return any(self._read.get(name) != environment.get(name) for name in names)

        if anew or differs("OMP_NUM_THREADS"):
            number = environment.get("OMP_NUM_THREADS", "")
            torch.set_num_threads(int(number) if number.isdigit() and int(number) else self._num_threads)
        if dist.is_available() and (anew or differs("TORCH_DISTRIBUTED_DEBUG")):
            dist.set_debug_level_from_env()  # type: ignore[attr-defined, unused-ignore]
        if differs(*_OF_LOGS):
            logs = torch._logging._internal
            logs.log_state.clear()  # torch adds to it only
            logs._init_logs()
        self._read = dict(environment)
