"""Trainers of frameworks are kept when they are built: their class is told apart when its module is loaded.

A finder stands before all others and changes nothing about how a module is found; it only adds a few lines behind the
loading of the modules it knows. Frameworks whose scripts decide by themselves when and what they save (DeepSpeed,
Megatron Core) are left alone, and the one line that they need is said. Removed when the script has ended.
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
from holdfast.adapters.zero_lines.doubts import say
from holdfast.adapters.zero_lines.proposed_lines import Proposer
from holdfast.base.errors import UsageError
from holdfast.base.events import Events


class _Turn:
    """Tells which training of a script is kept: the first. Another one is no restart of it, and is not to go on with its version."""

    def __init__(self) -> None:
        self._is_taken = False

    def begin(self) -> None:
        """A script begins."""
        self._is_taken = False

    @property
    def is_taken(self) -> bool:
        """Return whether a training of the script has begun."""
        return self._is_taken

    def take(self) -> bool:
        """Return whether this training is the first."""
        is_taken, self._is_taken = self._is_taken, True
        return not is_taken


_TURN = _Turn()
# Module that defines the class -> how a built trainer is kept.
_KNOWN: dict[str, Callable[[Any, str], None]] = {}


def _keep_hf(trainer: Any, root: str) -> None:
    huggingface.keep(trainer, root).holdfast.turn = _TURN.take


def _keep_lightning(trainer: Any, root: str) -> None:
    trainer.callbacks.append(lightning.keeper(root, turn=_TURN.take))


_KNOWN["transformers.trainer"] = _keep_hf
_KNOWN["lightning.pytorch.trainer.trainer"] = _keep_lightning
_KNOWN["pytorch_lightning.trainer.trainer"] = _keep_lightning


# Module that every script of the framework loads -> what is said; nothing is done.
_TOLD: dict[str, str] = {
    "deepspeed.runtime.engine": "this script uses DeepSpeed and is not kept by itself; its one line is "
    'engine.checkpoint_engine = holdfast.adapters.deepspeed.checkpoint_engine(engine, "{root}")',
    "megatron.core.dist_checkpointing.serialization": "this script uses Megatron Core and is not kept by itself; its lines "
    'begin with save_strategy, load_strategy = holdfast.adapters.megatron.strategies("{root}")',
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself.

    Args:
        root: directory or URL of the checkpoints.
        says: whether this process speaks for the job.
        events: told `script_kept` of a trainer, and `script_refused` of what decides by itself.
    """

    def __init__(self, root: str, *, says: bool = True, events: Events | None = None) -> None:
        self._root = root
        self._says = says
        self._events = events or Events()

    def install(self) -> None:
        """Stands before all other finders; classes that are loaded already are changed at once. A script is about to begin."""
        _TURN.begin()
        sys.meta_path.insert(0, self)
        for name in (*_KNOWN, *_TOLD):
            if name in sys.modules:
                self._loaded(name, sys.modules[name])

    def _loaded(self, name: str, module: ModuleType) -> None:
        if name in _KNOWN:
            _change(module, _KNOWN[name], self._root, self._events)
            return
        told = _TOLD[name].format(root=self._root)
        self._events.emit("script_refused", reason=told)
        if self._says:
            say(told)

    def remove(self) -> None:
        """Stands there no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the others find, with our lines behind its loading."""
        if name not in _KNOWN and name not in _TOLD:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def loaded(module: ModuleType, load: Callable[[ModuleType], None] = load) -> None:
                    load(module)
                    self._loaded(name, module)

                spec.loader.exec_module = loaded  # type: ignore[method-assign]
                return spec
        return None


def _change(module: ModuleType, keep: Callable[[Any, str], None], root: str, events: Events) -> None:
    kind = getattr(module, "Trainer", None)
    if kind is None or hasattr(kind.__init__, "holdfast_root"):
        return
    build = kind.__init__

    @functools.wraps(build)
    def built(trainer: Any, *args: Any, **options: Any) -> None:
        build(trainer, *args, **options)
        if not hasattr(trainer, "holdfast_kept"):
            trainer.holdfast_kept = True
            try:
                keep(trainer, root)
            except UsageError as error:  # it has a door of its own; without us it would train
                events.emit("script_refused", reason=str(error))
                say(f"this {type(trainer).__name__} is not kept: {error}")
                return
            Proposer.end_all()
            if _TURN.is_taken:
                return
            events.emit("script_kept", root=root, objects=type(trainer).__name__)
            say(f"this {type(trainer).__name__} is kept in {root}")

    built.holdfast_root = root  # type: ignore[attr-defined]
    kind.__init__ = built
