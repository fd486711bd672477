"""Tells where a fit of Lightning is, and how a fit goes on there: loops, data, logged values.

Lightning's own resume begins behind `on_train_batch_end`; so it has rules for what of a step is still to be done, and these
are wrong for some steps: an epoch that a limit ended, a plateau scheduler that looks at a validation of before. A version of
holdfast is taken when nothing of its step, or of its epoch, is left to be done. So there are two places only:

    within an epoch    the loops count as restarted until their data is there, and not one batch longer
    between epochs     nothing is restarted: the next epoch begins as in a run that was never interrupted

Knows the trainer only by what it is asked with. Called by `adapters.lightning`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.data

from holdfast.base import config as settings
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.trained_parameters import Trained

# Dicts of the logger connector with the last value that was logged under each name.
_LAST_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
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
        self._within = False
        self._stepped = 0  # what the log counts steps by
        self._trained = Trained(trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """The loops as Lightning has them in its own checkpoints, and what these leave out."""
        loops = dict(self._fit.state_dict())
        fetcher = self._fit._data_fetcher
        ahead = getattr(fetcher, "batches", None) and isinstance(fetcher.iterator, _Noted)
        if ahead and fetcher.iterator.before and "combined_loader" in loops["state_dict"]:
            loops["state_dict"] = {**loops["state_dict"], "combined_loader": fetcher.iterator.before}
        connector = self._trainer._logger_connector
        return {
            "loops": loops,
            "generators": [generator.get_state() for generator in _generators(self._fit)],
            "logged": {name: dict(getattr(connector, name, {})) for name in _LAST_LOGGED},
            "sums": _sums(self._fit.epoch_loop._results),
            "should_stop": bool(self._trainer.should_stop),
            "launch": settings.launch(),
            "trained": self._trained.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loops are there; their data follows when it exists."""
        self._fit.load_state_dict(state["loops"])
        self._stepped = self._fit.epoch_loop._batches_that_stepped
        self._trained.load_state_dict(state.get("trained") or {"changed": []})
        # Of loops that ran before in this process, to find a learning rate: the data begins anew, and so do sums.
        self._fit._combined_loader = None
        self._fit.epoch_loop._results.clear()
        progress = self._fit.epoch_progress.current
        self._within = progress.completed != progress.ready
        self._generators = state["generators"]
        self._trainer.should_stop = state["should_stop"]
        connector = self._trainer._logger_connector
        for name, logged in state["logged"].items():
            getattr(connector, name).update(logged)
        if self._within:
            connector._first_loop_iter = False
            _resume_sums(self._fit.epoch_loop._results, state["sums"])
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
        if random is None:
            yield
        elif self._within:
            yield
            self._restarted(False)
            # Lightning counts one more behind an epoch that a hook ended: its batch was begun and never over.
            self._fit.epoch_loop._batches_that_stepped = self._stepped
            self._set_generators()  # iterators have drawn from them, to begin the epoch again
            ProcessRandomness().load_state_dict(random)
        else:
            now = ProcessRandomness().state_dict()  # hooks of the epoch's beginning have drawn already
            twice = self._position()
            self._set_generators()
            ProcessRandomness().load_state_dict(now)
            with _same_random(now) if twice else nullcontext():
                yield
        self._note()

    def _set_generators(self) -> None:
        for generator, state in zip(_generators(self._fit), self._generators, strict=False):
            generator.set_state(state)

    def run_starts(self) -> None:
        """Hooks of the beginning are through: an epoch that goes on has what is set up when an epoch starts.

        Lightning starts an epoch once. Two of its callbacks then change the trainer itself, and do so by the count of epochs alone; what
        a new scheduler does to the learning rate was done then.
        """
        self._trained.change()
        trainer = self._trainer
        for callback in trainer.callbacks if self._within else ():
            if not any(kind.__name__ in _BY_EPOCH for kind in type(callback).__mro__):
                continue
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            before = [dict(group) for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def epoch_ends(self) -> None:
        """No batch of the epoch follows."""
        results = self._fit.epoch_loop._results
        if isinstance(results, _Resumed):
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
        if all(state.get("_iterator_finished", False) for state in loaders if isinstance(state, dict)):
            return True
        iter(combined)
        return False

    def _note(self) -> None:
        fetcher = self._fit._data_fetcher
        if getattr(fetcher, "batches", None) is not None and fetcher.length is None:
            fetcher.iterator = _Noted(fetcher.iterator)


class _Noted:
    """An iterator over data of unknown length, from which Lightning fetches one batch ahead: knows where it was before that one.

    Args:
        combined: Lightning's `CombinedLoader`, which is its own iterator.
    """

    def __init__(self, combined: Any) -> None:
        self._combined = combined
        self.before: list[Any] = []

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        self.before = self._combined._state_dicts()
        return next(self._combined)


def _generators(fit: Any) -> list[torch.Generator]:
    """Returns the generators that the loaders of a fit, or their samplers, have for themselves; each once."""
    found: dict[int, torch.Generator] = {}
    for loader in fit._combined_loader.flattened if fit._combined_loader is not None else ():
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        for owner in (loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


@contextmanager
def _same_random(random: dict[str, Any]) -> Iterator[None]:
    """Within it every iterator that a data loader makes begins with the same random numbers.

    A `StatefulDataLoader` whose data ended makes two: that of the epoch, which is through, and that of the next. An undisturbed
    run makes one, and each draws a number.
    """
    kinds: list[Any] = [torch.utils.data.DataLoader]
    if "torchdata.stateful_dataloader" in sys.modules:
        kinds.append(sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader)
    made = [(kind, kind._get_iterator) for kind in kinds]
    for kind, make in made:
        kind._get_iterator = functools.partialmethod(_made_with, make, random)
    try:
        yield
    finally:
        for kind, make in made:
            kind._get_iterator = make


def _made_with(loader: Any, make: Callable[[Any], Any], random: dict[str, Any]) -> Any:
    ProcessRandomness().load_state_dict(random)
    return make(loader)


# What `log` was told of a value, and would have to be told again.
_TOLD = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "metric_attribute")
# A value of which nothing changes, by the name of the reduction.
_NEUTRAL = {"max": float("-inf"), "min": float("inf")}


def _sums(results: Any) -> dict[str, Any]:
    """Returns what was summed up so far of values that are logged for the whole epoch, by Lightning's key."""
    found = {}
    for key, metric in results.items():
        meta = metric.meta
        if not metric.is_tensor or not meta.on_epoch or metric.has_reset:
            continue
        found[key] = {
            "sums": {
                name: getattr(metric, name) for name in ("value", "cumulated_batch_size") if hasattr(metric, name)
            },
            "reduce_fx": meta.reduce_fx.__name__,
            "sync_dist": bool(meta.sync.should),
            "rank_zero_only": bool(meta.sync.rank_zero_only),
            **{name: getattr(meta, name) for name in _TOLD},
        }
    return found


def _resume_sums(results: Any, sums: dict[str, Any]) -> None:
    """Values that are logged for the first time in this process go on with what was summed up before."""
    kind = type(results)
    if not sums:
        return
    if not hasattr(results, "holdfast_sums"):
        results.__class__ = type(kind.__name__, (_Resumed, kind), {})
    results.holdfast_sums = dict(sums)


class _Resumed:
    """Lightning's collection of logged values, of which some were begun in another process."""

    holdfast_sums: dict[str, Any]

    def __setitem__(self, key: str, metric: Any) -> None:
        for name, value in self.holdfast_sums.pop(key, {}).get("sums", {}).items():
            setattr(metric, name, value)
        super().__setitem__(key, metric)  # type: ignore[misc]

    def finish(self, strategy: Any) -> None:
        """The epoch is over: what was not logged again is logged once more, with a value that changes nothing."""
        for told in list(self.holdfast_sums.values()):
            words = {name: value for name, value in told.items() if name != "sums"}
            neutral = torch.full_like(told["sums"]["value"], _NEUTRAL.get(told["reduce_fx"], 0.0))
            self.log(value=neutral, batch_size=0, sync_dist_fn=strategy.reduce, **words)  # type: ignore[attr-defined]
        self.holdfast_sums = {}
