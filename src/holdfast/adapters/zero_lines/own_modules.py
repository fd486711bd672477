"""Finds the training loops of a script in modules of the user's own: `from trainer import Trainer`.

    found = find_in_modules(path, source)     # the loops of the one module that has any, or None
    finder = OwnFinder(found, hook)           # while it is installed, that module is imported with the lines of its loops

Own modules are those that the script imports, at any distance, and that lie in its directory. Where no loop stands in these, so are
those of other directories that modules are imported from: a package on `PYTHONPATH`, or installed with `pip install -e`. What lies
in `site-packages` is nobody's own. Only loops in functions and methods are taken; what runs while a module is imported is not.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeAlias

from holdfast.adapters.zero_lines.nested.nested_script import Nest, facts, find_nested
from holdfast.adapters.zero_lines.script_text import HOOK, imported, scope_of
from holdfast.base.handler_errors import pass_on
from holdfast.base.installed import is_users_own
from holdfast.checkpoint.usage.clock_names import finds_files, names_of_start, of_start

# So many modules are looked at.
_MAX_MODULES = 200
# Name of a module -> its path, text and tree.
_Own: TypeAlias = dict[str, tuple[str, str, ast.Module]]


@dataclass(frozen=True, slots=True)
class OwnLoops:
    """The loops of a script that stand in one of its own modules.

    Attributes:
        name: of that module.
        modules: names of all own modules.
    """

    name: str
    path: str
    nest: Nest
    modules: frozenset[str]


def find_in_modules(script: str, source: str) -> OwnLoops | None:
    """Returns the loops of the one own module that has any; None if none has, if several have, or if one uses holdfast."""
    trees: _Own = {}
    found: list[OwnLoops] = []
    for further in ([], [place for place in sys.path if place]):
        trees = _own_trees([_home_of(script), *further], source)
        if any(each.split(".")[0] == "holdfast" for _, _, tree in trees.values() for each in imported(tree)):
            return None
        nests = {name: find_nested(text) for name, (_, text, _) in trees.items()}
        found = [
            OwnLoops(n, trees[n][0], nest, frozenset(trees)) for n, nest in nests.items() if isinstance(nest, Nest)
        ]
        if found:
            break
    if len(found) != 1 or any(isinstance(_scope(found[0].nest, site.line), ast.Module) for site in found[0].nest.sites):
        return None
    others = [ast.parse(source), *(tree for name, (_, _, tree) in trees.items() if name != found[0].name)]
    nest = find_nested(trees[found[0].name][1], others)
    assert isinstance(nest, Nest)
    nest = _with_own_modules(facts(nest, others), trees, source)
    return replace(found[0], nest=nest)


def find_in_script(script: str, source: str) -> Nest | str:
    """Returns the loops of the script itself, or why there are none that can be kept; its own modules have functions that these may call.

    Raises:
        SyntaxError: it is no Python.
    """
    found = find_nested(source)
    if not isinstance(found, Nest):
        return found
    own = _own_trees([_home_of(script)], source)
    if own:
        found = find_nested(source, [tree for _, _, tree in own.values()])
        assert isinstance(found, Nest)
    return _with_own_modules(found, own, source)


def _with_own_modules(nest: Nest, own: _Own, source: str) -> Nest:
    """Returns the same loops, with what the script and its own modules say together of names that hold the time of the start."""
    trees = [ast.parse(source), *(tree for _, _, tree in own.values())]
    started = names_of_start([trees[0], *(tree for _, text, tree in own.values() if of_start(text))])
    return replace(nest, started=started, reread=finds_files(trees, started))


def _home_of(script: str) -> str:
    return os.path.dirname(os.path.abspath(script))


def _own_trees(places: Sequence[str], source: str) -> _Own:
    """Returns path, text and tree of each own module, by name. `places` are directories, that of the script first."""
    trees: _Own = {}
    waiting = list(_names(ast.parse(source), ""))
    while waiting and len(trees) < _MAX_MODULES:
        name = waiting.pop()
        if name in trees or (file := _file_of(places, name)) is None:
            continue
        try:
            text = decode_source(Path(file).read_bytes())
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            pass_on(error)
            continue  # Python tells what is wrong with it
        trees[name] = (file, text, tree)
        waiting += _names(tree, name if os.path.basename(file) == "__init__.py" else name.rpartition(".")[0])
    return trees


def _scope(nest: Nest, line: int) -> ast.AST:
    loops = [node for node in ast.walk(nest.tree) if isinstance(node, ast.For) and node.lineno == line]
    return scope_of(nest.tree, loops[0])


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields names of modules that a module imports, and of what may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in _with_packages(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            name = ".".join(filter(None, [*above, node.module or ""]))
            yield from _with_packages(name)
            yield from (f"{name}.{alias.name}".lstrip(".") for alias in node.names)


def _with_packages(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[: place + 1]) for place in range(len(parts)))


def _file_of(places: Sequence[str], name: str) -> str | None:
    top = name.partition(".")[0]
    if not top or top in sys.stdlib_module_names or name in sys.modules:
        return None
    stems = [os.path.abspath(os.path.join(place, *name.split("."))) for place in places]
    files = (file for stem in stems for file in (os.path.join(stem, "__init__.py"), f"{stem}.py"))
    found = next(filter(os.path.isfile, files), None)
    return found if found is not None and is_users_own(found, places[0]) else None


class OwnFinder(MetaPathFinder):
    """Imports one module from the tree with the lines.

    Args:
        hook: what its loops go over.
    """

    def __init__(self, found: OwnLoops, hook: Any) -> None:
        self._found, self._hook = found, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the module is loaded; None for all others."""
        del target
        if fullname != self._found.name:
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None or os.path.realpath(found.origin or "") != os.path.realpath(self._found.path):
            return None  # another module of this name comes first
        loader = _Loader(fullname, self._found.path, self._found.nest.tree, self._hook)
        within = [os.path.dirname(self._found.path)] if os.path.basename(self._found.path) == "__init__.py" else None
        return spec_from_file_location(fullname, self._found.path, loader=loader, submodule_search_locations=within)

    def install(self) -> None:
        """Imports it so from here on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Imports as Python does again."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def forget(self) -> None:
        """Has all own modules imported anew."""
        self.remove()
        for name in self._found.modules:
            sys.modules.pop(name, None)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, tree: ast.Module, hook: Any) -> None:
        super().__init__(name, path)
        self._tree, self._hook = tree, hook

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return compile(self._tree, self.path, "exec", dont_inherit=True)  # type: ignore[no-any-return, unused-ignore]

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[HOOK] = self._hook
        super().exec_module(module)
