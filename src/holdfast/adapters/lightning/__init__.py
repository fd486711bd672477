"""Lightning: one callback, for DDP, `ModelParallelStrategy` (FSDP2, tensor parallel), `FSDPStrategy`, and one process.

    trainer = Trainer(..., callbacks=[keeper("ckpts/run1")])

Restores in `on_fit_start`, when the strategy has wrapped model and optimizers and no loop has begun. Saves behind everything
that Lightning does for an optimizer step, wherever the callback stands in the list: hooks, other callbacks, validation,
schedulers; behind the last batch of an epoch also what is done for the epoch. What is kept: model, optimizers, schedulers,
where the loops are (`adapters.lightning.loops`) with the position of resumable data loaders
(`torchdata.stateful_dataloader.StatefulDataLoader`), what callbacks, hooks and data module put into Lightning's own checkpoints
(`adapters.lightning.hooks`), random numbers. Plain data loaders are counted (`adapters.lightning.plain_loaders`). Where a loader has
no position at all, an epoch that was broken off begins its data anew, which is said when the training begins.

Lightning calls a `CheckpointIO` on rank 0 only, with everything gathered there; who stays with it: `adapters.lightning.checkpoint_io`.
Lightning's own checkpoints go on as they are set; holdfast needs none of them, so
`enable_checkpointing=False` is enough, and `fit(ckpt_path=...)` means that path. Nothing happens under HOLDFAST_DISABLE. Tested with lightning 2.6.6; imported when it is there.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.adapters.dcp.peek import newest
from holdfast.adapters.lightning.hooks import FitHooks
from holdfast.adapters.lightning.loops import Place
from holdfast.adapters.lightning.unsaved_attributes import check_of
from holdfast.adapters.options import AGAIN, checked
from holdfast.base import config as settings
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.checkpoint.state.unsaved_state import UnsavedStateCheck
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

# By how many steps a version may be behind a checkpoint that Lightning wrote at last, in the step of a kill.
_BEHIND = 2


def keeper(root: str | os.PathLike[str], *, turn: Callable[[], bool] | None = None, **options: Any) -> Any:
    """The callback for a Trainer of `lightning` or `pytorch_lightning`.

    Args:
        root: directory or URL of the checkpoints, the same on every rank.
        turn: asked at the beginning of each `fit` whether it is to be kept; default: each is.
        options: more arguments of `holdfast.Checkpointer`: `every`, `durable_every`, objects with `state_dict` by name.

    Raises:
        UsageError: Lightning is not installed, or there is no such option.
    """
    checked(root, options)
    callbacks = _callbacks()
    keeping = Keeping(root, options, turn)

    class HoldfastKeeper(callbacks.Callback):  # type: ignore[name-defined, misc]
        """Begins and ends; steps are told by the loops, behind all callbacks."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            keeping.begin(trainer, self)

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
            raise UsageError(f"Lightning cannot be imported: {error}", remedy="pip install lightning") from error
    return callbacks


class Keeping:
    """Does the callback's work; knows the trainer only by what it is asked with."""

    def __init__(
        self, root: str | os.PathLike[str], options: dict[str, Any], turn: Callable[[], bool] | None = None
    ) -> None:
        self._root = root
        self._options = options
        self._turn = turn
        self._random: dict[str, Any] | None = None
        self._place: Place | None = None
        self._fit: Any = None
        self._unsaved: UnsavedStateCheck | None = None
        self._unsaved_by_epoch: UnsavedStateCheck | None = None  # what changes with epochs only: the best value so far
        self._wrapped: list[str] = []
        self._last = -1
        self._sigterm: Any = None
        self._connector: Any = None
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
        if getattr(trainer, "fast_dev_run", False):
            logger.warning(
                "fast_dev_run: nothing is restored and nothing is saved, as with Lightning's own checkpoints"
            )
            return
        if 0 in [getattr(trainer, limit, None) for limit in ("max_epochs", "max_steps", "limit_train_batches")]:
            return  # it trains nothing, and is to leave everything as it is
        if os.fspath(self._root) in open_checkpointers.ended or (self._turn is not None and not self._turn()):
            logger.warning(AGAIN, type(trainer).__name__, self._root, "keeper(path)")
            return
        self._place = place = Place(trainer)
        handed = FitHooks(trainer, own)
        objects = {
            "model": trainer.strategy.model,
            "optimizer": _one(trainer.optimizers),
            "scheduler": _one([config.scheduler for config in trainer.lr_scheduler_configs]),
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "place": place,
            "handed": handed,
            **self._options,
        }
        asked_for = getattr(trainer, "ckpt_path", None)
        later = None if asked_for is None else self._later_than(trainer, asked_for)
        if asked_for is None or later is not None:
            self._put_groups_back(trainer)
        self.checkpointer = Checkpointer(self._root, **objects)
        now = ProcessRandomness().state_dict()
        start = self.checkpointer.restore(later, fresh=asked_for is not None and later is None)
        self._sigterm = signal.getsignal(signal.SIGTERM)
        self._last = start - 1
        if start > 0:  # until the loops begin, hooks draw what they drew then
            self._random = ProcessRandomness().state_dict()
            ProcessRandomness().load_state_dict(now)
        if start > 0 and trainer.should_stop and place.is_over and not settings.is_restart():
            trainer.should_stop = False  # a new launch of a run that stopped early is to train
        handed.begin()
        if trainer.is_global_zero:
            self._unsaved, self._unsaved_by_epoch = check_of(trainer, own), check_of(trainer, own)
            self._unsaved_by_epoch.told = self._unsaved.told
            self._unsaved_by_epoch.look(trainer.lightning_module.parameters())
        self._take_hold(trainer.fit_loop)

    def _later_than(self, trainer: Any, path: Any) -> Version | None:
        """Returns what goes before a path that `fit` was given: the same or a later step that this run has saved here itself, or one hardly
        earlier.

        A script gives the same path at each restart. Where nobody started the run anew, only the launcher its workers, it is what
        the path would have become. Then Lightning loads nothing behind us.
        """
        connector = trainer._checkpoint_connector
        told = int(connector._loaded_checkpoint.get("global_step", 0))
        try:
            found = newest(os.fspath(self._root), self._options.get("config") or settings.load(), launch_of)
        except HoldfastError as error:
            logger.warning("%s: what is there is not looked at, for a path is given: %s", self._root, error)
            return None
        if found is None:
            return None
        version, launch = found
        is_ours = settings.is_restart() and launch == settings.launch()
        # Ours of the same step was saved behind Lightning's own, and behind what callbacks did after that. It may not be whole when
        # Lightning's own is; one of ours of before goes on bit for bit.
        if version.step + 1 < told - _BEHIND * is_ours or (version.step + 1 == told and not is_ours):
            return None
        if not is_ours:
            logger.warning(
                "%s holds step %d: the path %s is what was asked for; without it the later step is taken",
                self._root, version.step + 1, path,
            )  # fmt: skip
            return None
        logger.warning("%s is not taken: this run goes on with step %d, which holdfast has", path, version.step + 1)
        connector._loaded_checkpoint = {}
        connector._restore_modules_and_callbacks = _nothing
        self._connector = connector
        return version

    def _put_groups_back(self, trainer: Any) -> None:
        """Let callbacks that add groups to the optimizers on the way (`BaseFinetuning`) add those that the newest version has."""
        adds = [
            each for each in trainer.callbacks if any(kind.__name__ == "BaseFinetuning" for kind in type(each).__mro__)
        ]
        if not adds:
            return
        found = newest(os.fspath(self._root), self._options.get("config") or settings.load(), _states_of_callbacks)
        for callback in adds if found is not None else ():
            state = found[1].get(callback.state_key) if found is not None else None
            if state:
                callback.load_state_dict(dict(state))
                callback.on_fit_start(trainer, trainer.lightning_module)

    def _take_hold(self, fit: Any) -> None:
        """Stands behind what the loops do for a batch and for an epoch, and around the beginning of their data."""
        self._fit = fit
        self._wrap("run", self._run)
        if self._place is not None:
            self._wrap("setup_data", self._place.set_up)
            self._wrap("epoch_loop.val_loop.setup_data", self._place.made_to_validate.set_up)
        self._wrap("_load_combined_loader_states", self._data_is_made)
        self._wrap("on_run_start", self._run_starts)
        self._wrap("on_advance_end", self._epoch_ends)
        self._wrap("epoch_loop.reset", self._resets)
        self._wrap("epoch_loop.on_run_start", self._data_begins)
        self._wrap("epoch_loop.on_advance_end", self._batch_ends)
        self._wrap("epoch_loop.val_loop.reset", self._validation_begins)

    def _wrap(self, name: str, does: Callable[..., Any]) -> None:
        owner = operator.attrgetter(name.rpartition(".")[0])(self._fit) if "." in name else self._fit
        method = name.rpartition(".")[2]
        setattr(owner, method, functools.partial(does, getattr(owner, method)))
        self._wrapped.append(name)

    def _let_go(self) -> None:
        for name in self._wrapped:
            owner = operator.attrgetter(name.rpartition(".")[0])(self._fit) if "." in name else self._fit
            delattr(owner, name.rpartition(".")[2])
        if self._place is not None:
            self._place.let_go()
        if self._connector is not None:
            del self._connector._restore_modules_and_callbacks
        self._wrapped, self._fit, self._place, self._connector = [], None, None, None
        self._unsaved = self._unsaved_by_epoch = None

    def _run(self, run: Callable[[], None]) -> None:
        """The fit loop; of a training that ended already only the end, which Lightning's own resume leaves out."""
        place, fit = self._place, self._fit
        self._keep_sigterm(fit.trainer)
        if self._random is None or place is None or not place.is_over:
            run()
            if self.checkpointer is not None:  # nothing was to be trained, and nobody was told of an end
                self.end()
            return
        logger.warning("the training in %s ended with step %d: nothing is trained", self._root, self._last + 1)
        fit.setup_data()
        fit.reset()
        fit.on_run_start()
        if place.is_within:  # the epoch was broken off, and its end is still to be told
            fit.on_advance_start()
            fit.advance()
            fit.on_advance_end()
        fit.on_run_end()

    def _data_is_made(self, load: Callable[[], None]) -> None:
        if self._place is not None:
            self._place.data_is_made()
        load()

    def _keep_sigterm(self, trainer: Any) -> None:
        """SIGTERM is the checkpointer's: it ends all ranks at one step, behind all that is done for that.

        Lightning's handler, which calls ours, makes a collective wherever the signal finds the process, and breaks a validation off.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)
            trainer._signal_connector._original_handlers.pop(signal.SIGTERM, None)

    def _run_starts(self, start: Callable[[], None]) -> None:
        start()
        if self._random is not None:
            if self._place is not None:
                self._place.run_starts()
            ProcessRandomness().load_state_dict(self._random)

    def _resets(self, reset: Callable[[], None]) -> None:
        """Lightning warns here of loaders that say no place; what is true of that we have told."""
        with warnings.catch_warnings():
            if self._place is not None and self._place.is_within:
                warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")
            reset()

    def _data_begins(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        random, self._random = self._random, None
        if self._place is None:
            begin(fetcher)
            return
        with self._place.data_begins(random):
            begin(fetcher)

    def _validation_begins(self, reset: Callable[[], None]) -> None:
        if self._place is not None:
            self._place.validation_begins()
        reset()

    def _batch_ends(self, end: Callable[..., None], *args: Any) -> None:
        """Validation and schedulers are through. What ends an epoch's data is told with the epoch."""
        end(*args)
        if not self._fit.epoch_loop._num_ready_batches_reached():
            self._step()

    def _epoch_ends(self, end: Callable[[], None]) -> None:
        if self._place is not None:
            self._place.epoch_ends()
        end()
        self._step()
        if self._unsaved_by_epoch is not None:
            self._unsaved_by_epoch.look(self._fit.trainer.lightning_module.parameters())

    def _step(self) -> None:
        """Count a step as over if the optimizer stepped since. Behind the last one others may write weights."""
        step = self._fit.epoch_loop.global_step - 1
        if self.checkpointer is None or self._place is None or step <= self._last:
            return
        self._last = step
        if self._unsaved is not None:
            self._unsaved.look(self._fit.trainer.lightning_module.parameters())
        if self._place.is_over:
            self.checkpointer.save_last(step)
        self.checkpointer.step(step)

    def end(self) -> None:
        """The training is over: its last step is durable. Another one of this script is not to go on with it."""
        self._let_go()
        if self._last >= 0:
            open_checkpointers.ended.add(os.fspath(self._root))
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def failed(self, error: BaseException | None) -> None:
        """Lets go; after an error the last whole version is still sent to storage."""
        self._let_go()
        if self.checkpointer is not None:
            self.checkpointer.__exit__(type(error) if error else UsageError, error, None)
            self.checkpointer = None


def launch_of(values: Mapping[str, Any], rank: int) -> str:
    """The launch that saved a version; empty if it does not say."""
    for name in (f"rank{rank}/place", "place", "rank0/place"):
        if name in values:
            return str(values[name].get("launch", ""))
    return ""


def _states_of_callbacks(values: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Return what callbacks handed out for a version, by their keys; empty if it does not say."""
    for name in (f"rank{rank}/handed", "handed", "rank0/handed"):
        if name in values:
            states: Mapping[str, Any] = values[name].get("callbacks", {})
            return states
    return {}


def _nothing(*_: Any, **__: Any) -> None:
    """Lightning would load its own file over the version."""


def _one(found: list[Any]) -> Any:
    """A single thing by itself, several as a list, none as None."""
    return found[0] if len(found) == 1 else (list(found) or None)
