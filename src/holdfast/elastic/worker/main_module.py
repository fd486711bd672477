"""A script or module as `__main__`, as plain Python has it: made anew for every run, and there until the next one.

`runpy.run_path` takes `__main__` away as soon as the last line is done. Threads and exit handlers that a script leaves
behind would then find the launcher's in its place. So the module stays until `clear`, at the end of the process or before
the script runs again. `__file__` is absolute, as in every Python since 3.9.

Used by `elastic.worker.worker_main` and `adapters.zero.launcher`.
"""

from __future__ import annotations

import ast
import builtins
import os
import runpy
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

# Of an interpreter's own `__main__`; elsewhere `__builtins__` is a dictionary.
_AS_PYTHON: dict[str, Any] = {"__builtins__": builtins, "__annotations__": {}}


class Loader(SourceFileLoader):
    """Loads a script, from a changed tree if there is one; nothing is cached."""

    def __init__(self, path: str, tree: ast.Module | None) -> None:
        super().__init__("__main__", path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        """Return the compiled script."""
        source = self._tree if self._tree is not None else self.get_data(self.path)
        return compile(source, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return, unused-ignore]


def run_path(path: str, *, tree: ast.Module | None = None, names: Mapping[str, Any] | None = None) -> None:
    """Run a script as `__main__`.

    Args:
        path: of a script, or of a directory or archive with a `__main__.py`.
        tree: what is run in place of the script's own text.
        names: globals that the script finds besides its own.
    """
    path = os.path.abspath(path)
    if tree is None and (os.path.isdir(path) or path.endswith((".zip", ".pyz", ".pyc"))):
        runpy.run_path(path, run_name="__main__")
        return
    loader = Loader(path, tree)
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, loader
    module.__dict__.update({"__cached__": None, **_AS_PYTHON, **(names or {})})
    sys.modules["__main__"] = module
    loader.exec_module(module)


def run_module(name: str) -> None:
    """Run a module as `__main__`, as `python -m` does."""
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__dict__.update(_AS_PYTHON)
    as_python_does: Any = vars(runpy)["_run_module_as_main"]  # what `python -m` itself calls
    as_python_does(name)


def clear(before: ModuleType) -> None:
    """Put back the `__main__` of before; what nobody else holds of the script's is freed with the next collection."""
    sys.modules["__main__"] = before
