"""Tells where a fit of Lightning is, and how a fit goes on there: loops, data, logged values.

Lightning's own resume begins behind `on_train_batch_end`; so it has rules for what of a step is still to be done, and these
are wrong for some steps: an epoch that a limit ended, a plateau scheduler that looks at a validation of before. A version of
holdfast is taken when nothing of its step, or of its epoch, is left to be done. So there are two places only:

    within an epoch    the loops count as restarted until their data is there, and not one batch longer
    between epochs     nothing is restarted: the next epoch begins as in a run that was never interrupted

Knows the trainer only by what it is asked with.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.data

from holdfast.adapters.lightning.logged import Resumed, metrics_of, put_back, resume_sums, sums_of
from holdfast.adapters.lightning.made_loaders import MadeLoaders
from holdfast.adapters.lightning.orders import Order, generators_of, orders_of, samplers_of
from holdfast.adapters.lightning.plain_loaders import CHANGES, PlainLoaders, doubts_of, draws_anew
from holdfast.adapters.lightning.validation_loaders import STAYING, ValidationLoaders
from holdfast.base import config as settings
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.trained_parameters import Trained
from holdfast.checkpoint.state.dataloader import is_plain

logger = logging.getLogger(__name__)

# Dicts of the logger connector with the last value that was logged under each name.
_LAST_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# Whether DDP sends buffers before its next forward. With manual optimization it does so at the first one only.
_SENDS_BUFFERS = "require_forward_param_sync"
# Callbacks of Lightning that set the trainer up for an epoch when it starts, by its number.
_BY_EPOCH = ("GradientAccumulationScheduler", "StochasticWeightAveraging")


class Place:
    """Tells where the loops of a fit are, as an object with a state.

    Args:
        trainer: a Trainer whose `fit` has begun.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._generators: list[torch.Tensor] = []
        self._loaders: list[Any] = []
        self._reloads: tuple[float, float] | None = None  # epochs in which loaders were made anew
        self._begun_with: Any = None
        self._orders: list[Order] = []
        self._plain = PlainLoaders(tells=trainer.is_global_zero)
        self._places: list[Any] = []  # where they were
        self._workers: list[Any] = []  # what workers that stay had drawn between two epochs
        self._validating = ValidationLoaders(
            self._fit.epoch_loop.val_loop, functools.partial(self._plain.tell, CHANGES)
        )
        validation = self._fit.epoch_loop.val_loop
        self.made = MadeLoaders(self._fit, lambda: self._fit._should_reload_train_dl)
        self.made_to_validate = MadeLoaders(validation, lambda: validation._should_reload_val_dl)
        self._drawn: list[dict[str, Any]] = []
        self._lengths: dict[str, Any] = {}
        self._within = False
        self._stepped = 0  # what the log counts steps by
        self._told = False
        self._trained = Trained(trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """The loops as Lightning has them in its own checkpoints, and what these leave out."""
        loops = dict(self._fit.state_dict())
        fetcher, progress = self._fit._data_fetcher, self._fit.epoch_progress.current
        within = progress.completed != progress.ready
        places: list[Any] = self._plain.state_dict() if within else self._plain.behind()
        if getattr(fetcher, "batches", None) and isinstance(fetcher.iterator, _Noted) and fetcher.iterator.before:
            before, places_before = fetcher.iterator.before
            places = places_before if within else places
            if before and "combined_loader" in loops["state_dict"]:
                loops["state_dict"] = {**loops["state_dict"], "combined_loader": before}
        connector = self._trainer._logger_connector
        return {
            "loops": loops,
            "orders": [order.drawn for order in self._orders],
            "places": places,
            "workers": [] if within else self._plain.workers_behind(),
            "generators": [generator.get_state() for generator in generators_of(self._fit._combined_loader)],
            "validation": self._validating.state_dict(),
            "lengths": self._lengths_now(),
            "made": [self.made.state_dict(), self.made_to_validate.state_dict()],
            "logged": {name: dict(getattr(connector, name, {})) for name in _LAST_LOGGED},
            "sums": sums_of(self._fit.epoch_loop._results),
            "metrics": metrics_of(self._trainer.lightning_module),
            "should_stop": bool(self._trainer.should_stop),
            "reloads": [self._fit._last_train_dl_reload_epoch, self._fit.epoch_loop.val_loop._last_val_dl_reload_epoch],
            "sends_buffers": getattr(self._trainer.strategy.model, _SENDS_BUFFERS, None),
            "launch": settings.launch(),
            "trained": self._trained.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loops are there; their data follows when it exists."""
        self._fit.load_state_dict(state["loops"])
        self._stepped = self._fit.epoch_loop._batches_that_stepped
        self._trained.load_state_dict(state.get("trained") or {"changed": []})
        if state.get("sends_buffers") is not None and hasattr(self._trainer.strategy.model, _SENDS_BUFFERS):
            setattr(self._trainer.strategy.model, _SENDS_BUFFERS, state["sends_buffers"])
        # Of loops that ran before in this process, to find a learning rate: the data begins anew, and so do sums.
        self._fit._combined_loader = None
        self._fit.epoch_loop._results.clear()
        progress = self._fit.epoch_progress.current
        self._within = progress.completed != progress.ready
        self._generators, self._reloads = state["generators"], state.get("reloads")
        self._count_reloads()
        training, validation = state.get("made") or ({}, {})
        self.made.load_state_dict(training)
        self.made_to_validate.load_state_dict(validation)
        self._lengths = state.get("lengths") or {}
        self._drawn, self._places = state.get("orders") or [], state.get("places") or []
        self._workers = state.get("workers") or []
        self._validating.load_state_dict(state.get("validation") or {})
        self._trainer.should_stop = state["should_stop"]
        connector = self._trainer._logger_connector
        for name, logged in state["logged"].items():
            getattr(connector, name).update(logged)
        put_back(self._trainer.lightning_module, state.get("metrics") or {})
        if self._within:
            connector._first_loop_iter = False
            resume_sums(self._fit.epoch_loop._results, state["sums"])
        else:
            self._loaders, self._fit._combined_loader_states_to_load = self._fit._combined_loader_states_to_load, []
            self._restarted(False)
        self._fit.epoch_loop.val_loop._restarting = True  # or a sanity check would reset what was just loaded

    def _restarted(self, value: bool) -> None:
        loop = self._fit.epoch_loop
        for each in (self._fit, loop, loop.val_loop, loop.automatic_optimization, loop.manual_optimization):
            each._restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = value

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left to train: all steps, all epochs, or asked to stop. Lightning's own answer
        prints.
        """
        steps, epochs = self._fit.max_steps, self._fit.max_epochs
        if steps not in (None, -1) and self._fit.epoch_loop.global_step >= steps:
            return True
        if epochs not in (None, -1) and self._fit.epoch_progress.current.processed >= epochs:
            return True
        return bool(self._trainer.should_stop and self._fit._can_stop_early)

    @property
    def is_within(self) -> bool:
        """Return whether what was loaded lies within an epoch."""
        return self._within

    @contextmanager
    def data_begins(self, random: dict[str, Any] | None) -> Iterator[None]:
        """Around the beginning of an epoch's data, in a run that goes on: loaders and random numbers are as they were.

        Args:
            random: the state of the process's random numbers in the version; None if nothing was loaded.
        """
        if random is not None:
            self._tell_of_workers()
        if random is None:
            yield
        elif self._within:
            yield
            self._restarted(False)
            # Lightning counts one more behind an epoch that a hook ended: its batch was begun and never over.
            self._fit.epoch_loop._batches_that_stepped = self._stepped
            self._set_generators()  # iterators have drawn from them, to begin the epoch again
            ProcessRandomness().load_state_dict(random)
        elif self._fit._combined_loader is not self._begun_with:
            yield  # made anew for this epoch, as in a run that was never interrupted
        else:
            now = ProcessRandomness().state_dict()  # hooks of the epoch's beginning have drawn already
            twice = self._position()
            self._set_generators()
            ProcessRandomness().load_state_dict(now)
            with _same_random(now, self._draw_as_ever) if twice else nullcontext():
                yield
            self._draw_as_ever()
        self._note()

    def data_is_made(self) -> None:
        """Loaders are there and have no iterators: those of an epoch that goes on are to be in its order.

        Lightning tells samplers the epoch later, and a loader that finds its place again has asked for the order by then.
        """
        loaders = self._fit._combined_loader.flattened
        self._orders = orders_of(loaders)
        self._plain.count(loaders)
        if self._within and self._begun_with is None:
            self._draw_again()
            for loader in loaders:
                for sampler in samplers_of(loader):
                    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                        set_epoch(self._fit.epoch_progress.current.processed)
            self._plain.load_state_dict(self._places)

    def set_up(self, set_up: Callable[[], None]) -> None:
        """Around the fit loop's `setup_data`: an epoch that goes on is as long as it was when it began.

        Lightning asks loaders how long they are when it makes them, and as an epoch begins. A callback may have set `batch_size` since.
        """
        is_first = self._fit._combined_loader is None
        self.made.set_up(set_up)
        if not is_first or not self._within:
            return
        self._places = self._plain.behind()  # one batch may have been fetched ahead
        saved, now = self._lengths, self._lengths_now()
        if saved.get("limits") != now.get("limits") or saved == now:
            return
        fit, trainer = self._fit, self._trainer
        fit.max_batches, fit._data_fetcher.length = saved["max_batches"], saved["length"]
        if isinstance(trainer.val_check_interval, float) and isinstance(trainer.val_check_batch, int):
            trainer.val_check_batch = max(1, int(fit.max_batches * trainer.val_check_interval))

    def _lengths_now(self) -> dict[str, Any]:
        fit = self._fit
        if fit._combined_loader is None or fit._data_fetcher is None:
            return {}
        limits = list(getattr(fit._combined_loader, "limits", None) or ())
        return {"limits": limits, "max_batches": fit.max_batches, "length": fit._data_fetcher.length}

    def let_go(self) -> None:
        """The training is over: loaders are as they were."""
        self._plain.let_go()
        self._validating.let_go()

    def _tell_of_workers(self) -> None:
        for loader in self._fit._combined_loader.flattened:
            within = self._within and not is_plain(loader)  # a plain one loads again what was had
            if (getattr(loader, "num_workers", 0) and within) or draws_anew(loader):
                logger.warning("workers load the data, and what they draw by themselves (augmentations) they draw anew")

    def _tell_of_places(self) -> None:
        """Warns once of what a restart within an epoch would take otherwise."""
        if self._told or not self._trainer.is_global_zero:
            return
        self._told = True
        combined, fetcher = self._fit._combined_loader, self._fit._data_fetcher
        has_length, takes_itself = getattr(fetcher, "length", None) is not None, hasattr(fetcher, "iterator_wrapper")
        for doubt in doubts_of(combined.flattened, combined._mode, has_length=has_length, takes_itself=takes_itself):
            logger.warning("%s", doubt)

    def _draw_again(self) -> None:
        for order, drawn in zip(self._orders, self._drawn, strict=False):
            order.again = drawn

    def _draw_as_ever(self) -> None:
        for order in self._orders:
            order.again = None

    def _set_generators(self) -> None:
        for generator, state in zip(generators_of(self._fit._combined_loader), self._generators, strict=False):
            generator.set_state(state)

    def validation_begins(self) -> None:
        """Its loaders are there."""
        self._validating.begin(anew=self.made_to_validate.were_due)
        if self._validating.begin_anew:
            self._plain.tell("what %s draw or count by themselves begins anew behind a restart", STAYING)

    def run_starts(self) -> None:
        """Hooks of the beginning are through: an epoch that goes on has what is set up when an epoch starts.

        Lightning starts an epoch once. Two of its callbacks then change the trainer itself, and do so by the count of epochs alone; what
        a new scheduler does to the learning rate was done then.
        """
        self._trained.change()
        # Nothing of the epoch before is left; or, within an epoch, hooks have set anew what steps had changed.
        self._plain.begin_behind(self._places)
        if not self._within:
            self._plain.stay_behind(self._workers)
        trainer, self._begun_with = self._trainer, self._fit._combined_loader
        self._count_reloads()
        for callback in trainer.callbacks if self._within else ():
            if not any(kind.__name__ in _BY_EPOCH for kind in type(callback).__mro__):
                continue
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            before = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def _count_reloads(self) -> None:
        if self._reloads is not None:
            self._fit._last_train_dl_reload_epoch, self._fit.epoch_loop.val_loop._last_val_dl_reload_epoch = (
                self._reloads
            )

    def epoch_ends(self) -> None:
        """No batch of the epoch follows."""
        self._draw_as_ever()
        results = self._fit.epoch_loop._results
        if isinstance(results, Resumed):
            results.finish(self._trainer.strategy)

    def _position(self) -> bool:
        """Puts loaders where they were behind the epoch before, so that the next iterator is that of the next epoch.

        Returns whether a loader still has to make that of the epoch before, which is through, on the way to it.
        """
        loaders, self._loaders = self._loaders, []
        if not loaders:
            return False
        combined = self._fit._combined_loader
        combined._load_state_dicts(loaders)
        self._draw_again()
        if all(state.get("_iterator_finished", False) for state in loaders if isinstance(state, dict)):
            return True
        iter(combined)
        self._draw_as_ever()
        return False

    def _note(self) -> None:
        self._tell_of_places()
        fetcher = self._fit._data_fetcher
        if getattr(fetcher, "batches", None) is not None and fetcher.length is None:
            fetcher.iterator = _Noted(fetcher.iterator, self._plain)


class _Noted:
    """An iterator over data of unknown length, from which Lightning fetches one batch ahead: knows where it was before that one.

    Args:
        combined: Lightning's `CombinedLoader`, which is its own iterator.
        plain: those of its loaders that say no place.
    """

    def __init__(self, combined: Any, plain: PlainLoaders) -> None:
        self._combined, self._plain = combined, plain
        self.before: tuple[list[Any], list[Any]] | None = None

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        self.before = self._combined._state_dicts(), self._plain.state_dict()
        return next(self._combined)


@contextmanager
def _same_random(random: dict[str, Any], goes_on: Callable[[], None]) -> Iterator[None]:
    """Within it every iterator that a data loader makes begins with the same random numbers.

    A `StatefulDataLoader` whose data ended makes two: that of the epoch, which is through, and that of the next. An undisturbed
    run makes one, and each draws a number. Before that of the next, `goes_on` is called.
    """
    kinds: list[Any] = [torch.utils.data.DataLoader]
    if "torchdata.stateful_dataloader" in sys.modules:
        kinds.append(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader)
    made = [(kind, kind._get_iterator) for kind in kinds]
    for kind, make in made:
        kind._get_iterator = functools.partialmethod(_made_with, make, random, goes_on)
    try:
        yield
    finally:
        for kind, make in made:
            kind._get_iterator = make


def _made_with(loader: Any, make: Callable[[Any], Any], random: dict[str, Any], goes_on: Callable[[], None]) -> Any:
    if getattr(loader, "next_iter_state", None) is None:
        goes_on()
    ProcessRandomness().load_state_dict(random)
    return make(loader)
