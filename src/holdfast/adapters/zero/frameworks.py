"""Trainers of frameworks are kept when they are built: their class is told apart when its module is loaded.

A finder stands before all others and changes nothing about how a module is found; it only adds a few lines behind the
loading of the two modules it knows. Removed when the script has ended.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from holdfast.adapters import huggingface, lightning
from holdfast.adapters.zero.loop import say

# Module that defines the class -> how a built trainer is kept.
_KNOWN: dict[str, Callable[[Any, str], None]] = {}


def _keep_hf(trainer: Any, root: str) -> None:
    huggingface.keep(trainer, root)


def _keep_lightning(trainer: Any, root: str) -> None:
    trainer.callbacks.append(lightning.keeper(root))


_KNOWN["transformers.trainer"] = _keep_hf
_KNOWN["lightning.pytorch.trainer.trainer"] = _keep_lightning
_KNOWN["pytorch_lightning.trainer.trainer"] = _keep_lightning


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself.

    Args:
        root: directory or URL of the checkpoints.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def install(self) -> None:
        """Stands before all other finders; classes that are loaded already are changed at once."""
        sys.meta_path.insert(0, self)
        for name, keep in _KNOWN.items():
            if name in sys.modules:
                _change(sys.modules[name], keep, self._root)

    def remove(self) -> None:
        """Stands there no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the others find, with our lines behind its loading."""
        keep = _KNOWN.get(name)
        if keep is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def loaded(module: ModuleType, load: Callable[[ModuleType], None] = load) -> None:
                    load(module)
                    _change(module, keep, self._root)

                spec.loader.exec_module = loaded  # type: ignore[method-assign]
                return spec
        return None


def _change(module: ModuleType, keep: Callable[[Any, str], None], root: str) -> None:
    kind = getattr(module, "Trainer", None)
    if kind is None or hasattr(kind.__init__, "holdfast_root"):
        return
    build = kind.__init__

    @functools.wraps(build)
    def built(trainer: Any, *args: Any, **options: Any) -> None:
        build(trainer, *args, **options)
        if not hasattr(trainer, "holdfast_kept"):
            trainer.holdfast_kept = True
            keep(trainer, root)
            say(f"this {type(trainer).__name__} is kept in {root}")

    built.holdfast_root = root  # type: ignore[attr-defined]
    kind.__init__ = built
