"""Lightning: one callback, for DDP, `ModelParallelStrategy` (FSDP2, tensor parallel), `FSDPStrategy`, and one process.

    trainer = Trainer(..., callbacks=[keeper("ckpts/run1")])

Restores in `on_fit_start`, when the strategy has wrapped model and optimizers and no loop has begun, and saves in
`on_train_batch_end` after every optimizer step. What is kept: model, optimizers, schedulers, the loops' progress with the
position of resumable data loaders (`torchdata.stateful_dataloader.StatefulDataLoader`), states of other callbacks, random
numbers. With a data loader that cannot tell its position, an epoch that was broken off begins its data anew, as Lightning
itself warns.

Lightning calls a `CheckpointIO` on rank 0 only, with everything gathered there; who stays with it: `adapters.lightning_io`.
Lightning's own checkpoints go on as they are set; holdfast needs none of them, so
`enable_checkpointing=False` is enough, and `fit(ckpt_path=...)` means that path. Nothing happens under HOLDFAST_DISABLE. Tested with lightning 2.6.6; imported when it is there.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.utils.data

from holdfast.adapters.door import Checkpointer
from holdfast.base import config as settings
from holdfast.base.errors import UsageError
from holdfast.train.randomness import ProcessRandomness

logger = logging.getLogger(__name__)


def keeper(root: str | os.PathLike[str], **options: Any) -> Any:
    """The callback for a Trainer of `lightning` or `pytorch_lightning`.

    Args:
        root: directory or URL of the checkpoints, the same on every rank.
        options: more arguments of `holdfast.Checkpointer`: `every`, `durable_every`, objects with `state_dict` by name.

    Raises:
        UsageError: Lightning is not installed.
    """
    callbacks = _callbacks()
    keeping = Keeping(root, options)

    class HoldfastKeeper(callbacks.Callback):  # type: ignore[name-defined, misc]
        """Begins, counts, ends."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            keeping.begin(trainer, self)

        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            keeping.first_batch()

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            keeping.step(trainer)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            keeping.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
            keeping.failed(exception)

    return HoldfastKeeper()


def _callbacks() -> Any:
    """The module of Lightning's callbacks, of the package that is installed."""
    try:
        from lightning.pytorch import callbacks  # noqa: PLC0415 - not there without the extra
    except ImportError:
        try:
            from pytorch_lightning import callbacks  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(
                f"Lightning cannot be imported: {error}", remedy="pip install 'holdfast[lightning]'"
            ) from error
    return callbacks


class Keeping:
    """What the callback does; knows the trainer only by what it is asked with."""

    def __init__(self, root: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._root = root
        self._options = options
        self._random: dict[str, Any] | None = None
        self._iterators: _Iterators | None = None
        self._last = -1
        self.checkpointer: Checkpointer | None = None

    def begin(self, trainer: Any, own: Any) -> None:
        """Everything is wrapped and no loop has begun: fills it with the newest version.

        Raises:
            HoldfastError: as `Checkpointer.restore`.
        """
        if settings.disabled():
            logger.warning("%s is set: nothing is restored and nothing is saved", settings.DISABLE_VARIABLE)
            return
        self.failed(None)
        objects = {
            "model": trainer.strategy.model,
            "optimizer": _one(trainer.optimizers),
            "scheduler": _one([config.scheduler for config in trainer.lr_scheduler_configs]),
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "loops": _Loops(trainer.fit_loop),
            "callbacks": _Callbacks([callback for callback in trainer.callbacks if callback is not own]),
            **self._options,
        }
        self.checkpointer = Checkpointer(self._root, **objects)
        asked_for = getattr(trainer, "ckpt_path", None)
        start = self.checkpointer.restore(fresh=asked_for is not None)
        self._last = start - 1
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if start > 0:
            random = ProcessRandomness().state_dict()
            # Between epochs the data loader draws random numbers first; within one it has drawn them before the save.
            self._random = None if progress.is_last_batch else random
            if progress.is_last_batch:
                self._iterators = _Iterators(random)

    def first_batch(self) -> None:
        """The data is where it was; random numbers go on where they were."""
        if self._iterators is not None:
            self._iterators.leave()
            self._iterators = None
        if self._random is not None:
            ProcessRandomness().load_state_dict(self._random)
            self._random = None

    def step(self, trainer: Any) -> None:
        """A batch is over; if the optimizer stepped, a step is."""
        step = trainer.global_step - 1
        if self.checkpointer is not None and step > self._last:
            self._last = step
            self.checkpointer.step(step)

    def end(self) -> None:
        """The training is over: its last step is durable."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def failed(self, error: BaseException | None) -> None:
        """Lets go; after an error the last whole version is still sent to storage."""
        self.first_batch()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(error) if error else UsageError, error, None)
            self.checkpointer = None


class _Iterators:
    """Every iterator that a data loader makes begins with the same random numbers, until the first batch.

    Resumed at the end of an epoch, a `StatefulDataLoader` makes two: that of the epoch, which is through, and that of the next,
    where an undisturbed run makes one. Each draws random numbers, so the second would begin with others.

    Args:
        random: the state that an undisturbed run has when it makes its iterator.
    """

    def __init__(self, random: dict[str, Any]) -> None:
        kinds: list[Any] = [torch.utils.data.DataLoader]
        if "torchdata.stateful_dataloader" in sys.modules:
            kinds.append(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader)
        self._made = [(kind, kind._get_iterator) for kind in kinds]
        for kind, make in self._made:
            kind._get_iterator = functools.partialmethod(_made_with, make, random)

    def leave(self) -> None:
        """Loaders make their iterators as ever."""
        for kind, make in self._made:
            kind._get_iterator = make


def _made_with(loader: Any, make: Callable[[Any], Any], random: dict[str, Any]) -> Any:
    ProcessRandomness().load_state_dict(random)
    return make(loader)


class _Loops:
    """Where the loops of a fit are, with the positions of data loaders that know theirs."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        """As Lightning puts it into its own checkpoints."""
        return dict(self._loop.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loops go on from there when they run."""
        self._loop.load_state_dict(state)


class _Callbacks:
    """States of callbacks that have one, by the key that Lightning gives them."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = {callback.state_key: callback for callback in callbacks}

    def state_dict(self) -> dict[str, Any]:
        """Of every callback with a state."""
        states = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """To the callbacks of the same keys; others are new and begin anew."""
        for key, state in states.items():
            if key in self._callbacks:
                self._callbacks[key].load_state_dict(state)


def _one(found: list[Any]) -> Any:
    """A single thing by itself, several as a list, none as None."""
    return found[0] if len(found) == 1 else (list(found) or None)
