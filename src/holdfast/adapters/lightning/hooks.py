"""Keeps what callbacks, hooks and the data module add to a checkpoint of Lightning's, as an object with a state.

Lightning makes a checkpoint as one dict and hands it around: `Callback.on_save_checkpoint` and
`LightningModule.on_save_checkpoint` put into it what they like, or other weights in the place of the weights. They get the same
dict here, without anything being gathered, and what they changed is kept. At a restore they get it back, in Lightning's
order, when model and optimizers are there already.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

WEIGHTS = "state_dict"
# Modules that define the hooks that do nothing.
_EMPTY = ("lightning.pytorch.c", "pytorch_lightning.c")
# By these a ModelCheckpoint tells that it has a step already, or still has one to save; its own state leaves them out.
_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "current_score")


class FitHooks:
    """The additions of a fit.

    Args:
        trainer: a Trainer whose `fit` has begun.
        own: the callback that is holdfast's.
    """

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        self._callbacks = [callback for callback in trainer.callbacks if callback is not own]
        self._trains = False
        self._saves = [one for one in self._callbacks if all(hasattr(one, name) for name in _SAVED)]
        self._follow = [one for one in self._saves if _is_named_by_logger(trainer, one)]

    def begin(self) -> None:
        """Let hooks be called; before they may miss what the training makes."""
        self._trains = True

    def state_dict(self) -> dict[str, Any]:
        """Return what was added to Lightning's checkpoint. Nothing is handed around before the training begins."""
        if not self._trains:
            return {}
        trainer, module = self._trainer, self._trainer.lightning_module
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # kept for itself: to ask for its numbers is to wait
        precision = {} if scaler is not None else dict(trainer.precision_plugin.state_dict())
        state: dict[str, Any] = {"callbacks": self._states(), "precision": precision}
        state["saved"] = {each.state_key: [getattr(each, name) for name in _SAVED] for each in self._saves}
        if trainer.datamodule is not None:
            state["data"] = dict(trainer.datamodule.state_dict())
        if not self._hooked():
            return state
        given = self._checkpoint(state)
        weights = dict(given[WEIGHTS])
        checkpoint = dict(given)
        for callback in self._callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        now = given[WEIGHTS]
        state["weights"] = {name: now[name] for name in now if name not in weights or now[name] is not weights[name]}
        state["same"], state["added"] = {}, {}
        for key, value in checkpoint.items():
            same = [other for other in given if given[other] is value and isinstance(value, dict | list)]
            if same and same[0] != key:
                state["same"][key] = same[0]
            elif not same and (key not in given or given[key] is not value):
                state["added"][key] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hands it back to all that Lightning's own resume asks, in its order."""
        trainer, module = self._trainer, self._trainer.lightning_module
        data = state.get("data") if trainer.datamodule is not None else None
        checkpoint = self._handed(state) if self._hooked() else {}
        if checkpoint:
            module.on_load_checkpoint(checkpoint)
        if data:
            trainer.datamodule.load_state_dict(data)
        for callback in self._callbacks if checkpoint else ():
            callback.on_load_checkpoint(trainer, module, checkpoint)
        for callback in self._callbacks:
            if of_one := state["callbacks"].get(callback.state_key):
                if callback in self._follow and os.path.isdir(of_one.get("dirpath") or ""):
                    callback.dirpath = of_one["dirpath"]  # in another one it would forget what was the best
                callback.load_state_dict(copy.deepcopy(of_one))
        for callback in self._saves:
            for name, value in zip(_SAVED, state.get("saved", {}).get(callback.state_key, ()), strict=False):
                setattr(callback, name, value)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        self._trains = True

    def _hooked(self) -> bool:
        """Returns whether anybody is handed a checkpoint at all."""
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        things = (*self._callbacks, self._trainer.lightning_module)
        return any(overrides(thing, hook) for thing in things for hook in hooks)

    def _handed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint as it was when hooks had been through it."""
        given = self._checkpoint(state)
        checkpoint = {**given, **{key: given[other] for key, other in state.get("same", {}).items()}}
        checkpoint[WEIGHTS].update(state.get("weights", {}))
        checkpoint.update(state.get("added", {}))
        return checkpoint

    def _states(self) -> dict[str, Any]:
        """States of callbacks that have one, by the key that Lightning gives them."""
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def _checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """The parts that Lightning's checkpoint always has, with the tensors of the fit itself."""
        trainer, module = self._trainer, self._trainer.lightning_module
        package = sys.modules.get("lightning.pytorch") or sys.modules.get("pytorch_lightning")
        if any(kind.__name__ == "FSDPStrategy" for kind in type(trainer.strategy).__mro__):  # it would gather
            weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        else:
            weights = dict(module.state_dict())
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": getattr(package, "__version__", ""),
            WEIGHTS: weights,
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": state["callbacks"],
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        if getattr(module, "hparams", None):
            checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
        if state.get("data"):
            checkpoint[type(trainer.datamodule).__qualname__] = state["data"]
        return checkpoint


def _is_named_by_logger(trainer: Any, callback: Any) -> bool:
    """Returns whether a ModelCheckpoint was given no directory, and saves where the first logger writes: a new one at each start. Collective."""
    given, resolve = callback.dirpath, getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)
    if resolve is None:
        return False
    callback.dirpath = None
    try:
        is_that = resolve(trainer) == given
    finally:
        callback.dirpath = given
    return bool(trainer.strategy.broadcast(is_that))


def overrides(thing: Any, method: str) -> bool:
    """Returns whether a callback or a module has a hook of its own."""
    if method in vars(thing):
        return True
    defines = next((kind for kind in type(thing).__mro__ if method in vars(kind)), None)
    return defines is not None and not (
        defines.__module__.startswith(_EMPTY) and defines.__name__ in ("Callback", "CheckpointHooks")
    )
