"""A script or module as `__main__`, as plain Python has it: made anew for every run, and there until the next one.

`runpy.run_path` takes `__main__` away as soon as the last line is done. Threads and exit handlers that a script leaves
behind would then find the launcher's in its place. So the module stays until `clear`, at the end of the process or before
the script runs again. `__file__` is absolute, as in every Python since 3.9.
"""

from __future__ import annotations

import ast
import builtins
import os
import pkgutil
import runpy
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from types import CodeType, ModuleType
from typing import Any

# The name of a script that is read from the standard input.
STDIN = "-"
# Of an interpreter's own `__main__`; elsewhere `__builtins__` is a dictionary.
_AS_PYTHON: dict[str, Any] = {"__builtins__": builtins, "__annotations__": {}}


class UnreadableScript(SystemExit):
    """Ends a process whose script cannot be opened as Python does: with 2, and one line instead of a traceback."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(2)
        self._text = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {self._text}\n")

    def __str__(self) -> str:
        """Return what the launcher tells as the first error."""
        return self._text


class Loader(SourceFileLoader):
    """Loads a script, from a changed tree or from a text that was read before if there is one; nothing is cached."""

    def __init__(self, path: str, tree: ast.Module | None, text: bytes | None = None) -> None:
        super().__init__("__main__", path)
        self._tree, self._text = tree, text

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        """Return the compiled script."""
        source = self._tree if self._tree is not None else self._text
        if source is None:
            try:
                source = self.get_data(self.path)
            except OSError as error:
                raise UnreadableScript(self.path, error) from error
        return compile(source, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return, unused-ignore]


def run_path(
    path: str, *, tree: ast.Module | None = None, names: Mapping[str, Any] | None = None, text: bytes | None = None
) -> None:
    """Run a script as `__main__`.

    Args:
        path: of a script, or of a directory or archive with a `__main__.py`.
        tree: what is run in place of the script's own text.
        names: globals that the script finds besides its own.
        text: of a script that can be read only once.
    """
    if tree is None and is_bundle(path):
        run_module("__main__", is_bundle=True)
        return
    path = "<stdin>" if path == STDIN else os.path.abspath(path)
    is_compiled = tree is None and text is None and _is_compiled(path)
    loader = SourcelessFileLoader("__main__", path) if is_compiled else Loader(path, tree, text)
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, loader
    module.__dict__.update({"__cached__": None, **_AS_PYTHON, **(names or {})})
    sys.modules["__main__"] = module
    loader.exec_module(module)


def run_module(name: str, *, is_bundle: bool = False) -> None:
    """Run a module as `__main__`, as `python -m` does; or that of the directory or archive that comes first in the path."""
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__dict__.update(_AS_PYTHON)
    as_python_does: Any = vars(runpy)["_run_module_as_main"]  # what `python` itself calls
    as_python_does(name, alter_argv=not is_bundle)


def is_bundle(path: str) -> bool:
    """Return whether a script is a directory or an archive with a `__main__.py`, whatever it is called: as Python finds out."""
    return path != STDIN and pkgutil.get_importer(os.path.abspath(path)) is not None


def home_of(path: str, directory: str, *, is_module: bool) -> str:
    """Return what comes first in the search path: where the script lies, or the bundle itself.

    Args:
        path: of the script, or the name of a module.
        directory: the working one.
        is_module: it is run by `-m`.
    """
    if is_module or path == STDIN:
        return directory
    return os.path.abspath(path) if is_bundle(path) else os.path.dirname(os.path.realpath(path))


def read_once(path: str) -> bytes | None:
    """Return the text of a script that can be read only once: of a pipe, or of the standard input. None: it can be read again."""
    try:
        kind = os.fstat(0).st_mode if path == STDIN else os.stat(path).st_mode
    except OSError:
        return None  # Python tells
    if path == STDIN:
        return None if os.isatty(0) else sys.stdin.buffer.read()
    if not stat.S_ISFIFO(kind) and not stat.S_ISSOCK(kind):
        return None
    with open(path, "rb") as file:
        return file.read()


def _is_compiled(path: str) -> bool:
    """Return whether this is compiled code, by its name or by its first bytes."""
    if path.endswith(".pyc"):
        return True
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(2) == MAGIC_NUMBER[:2]
    except OSError:
        return False  # whoever loads it tells


def clear(before: ModuleType) -> None:
    """Put back the `__main__` of before; what nobody else holds of the script's is freed with the next collection."""
    sys.modules["__main__"] = before
