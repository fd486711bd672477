"""Hugging Face: `keep` for a `transformers.Trainer`, `wrap` for an `accelerate.Accelerator`.

    trainer = keep(Trainer(...), "ckpts/run1")      # the one line; then trainer.train() as ever
    checkpointer = wrap(accelerator, "ckpts/run1")  # after accelerator.prepare(...); then restore, step, close

`keep` saves behind everything that the trainer does for a step: callbacks, log, evaluation, its own save; behind the last step of
an epoch also what it does for the epoch. So whoever goes on from a version has nothing to make up for. When the trainer stops,
the version is whole before any other weights are loaded. Where the trainer asks for a checkpoint's parts, `keep` answers:
the trainer itself skips the batches that were trained, and asks for random numbers when it has done so. What is restored is
model, optimizer, scheduler, scaler, random numbers and the `TrainerState`, in place, after Accelerate has wrapped them, so
that DDP and FSDP2 (`fsdp_version: 2`) are sharded as they train. The trainer's own `save_steps` go on as they are set; with
holdfast `save_strategy="no"` is enough.

`trainer.train(resume_from_checkpoint=...)` with a path means that path: holdfast then starts a new lineage. Only where the launcher
starts the same run again, and holdfast has a later step of that run, is this what it goes on with. Nothing happens
under HOLDFAST_DISABLE. Tested with transformers 5.23.0 and accelerate 1.15.0; frameworks are imported when they are there. Trainers
of TRL are such trainers; what they count besides is kept too (`trl_attributes`).
"""

from __future__ import annotations

import copy
import functools
import glob
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.adapters.dcp.peek import newest
from holdfast.adapters.hf_parts.accelerate_loaders import Loaders
from holdfast.adapters.hf_parts.samplers import Samplers
from holdfast.adapters.hf_parts.train_call import PLACE, TrainCall
from holdfast.adapters.hf_parts.trl_attributes import Attributes, is_of_trl, moving_reference, of_transformers
from holdfast.adapters.hf_parts.unkept_attributes import Unkept
from holdfast.adapters.options import AGAIN, checked
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.handler_errors import pass_on
from holdfast.checkpoint.checkpointer.checkpointer import Checkpointer
from holdfast.checkpoint.entries.rng import ProcessRandomness
from holdfast.checkpoint.entries.trained_parameters import Trained
from holdfast.checkpoint.job import collectives
from holdfast.core.model import Version

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# What the trainer counts beside its state, where this version of it does: else reported losses would begin anew.
_COUNTED = ("_tr_loss", "_globalstep_last_logged", "current_flos", "_total_loss_scalar", "_initial_global_step")
_REMEDY = (
    "An ExportableState of transformers is kept, and so is an object with state_dict and load_state_dict that is given by name: "
    "keep(trainer, path, mine=callback); in a module, a buffer"
)
_HAND_ON = f"let it take {PLACE}=None, and hand it on to super().train"
# Modules are many, and what they count changes from the first step on.
_LOOKS_AT_MODULES = 4
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_OF_KEEP = frozenset(("holdfast", "holdfast_kept"))
# What `keep` takes hold of. Trainers without one of these do their work for a step in another way.
_NEEDED = (
    "callback_handler", "_load_rng_state", "_maybe_log_save_evaluate", "accelerator", "train",
    "_init_training_state", "_run_epoch", "_finalize_training",
)  # fmt: skip


def keep(trainer: Any, root: str | os.PathLike[str], *, config: Config | None = None, **options: Any) -> Any:
    """The same trainer, kept alive: `train()` goes on with the newest version, and saves as the settings say.

    Args:
        trainer: a `transformers.Trainer`, or one of its subclasses.
        root: directory or URL of the checkpoints, the same on every rank.
        config: the settings; default: file and environment.
        options: more arguments of `holdfast.Checkpointer`: `every`, `durable_every`, objects with `state_dict` by name.

    Raises:
        UsageError: it is no such trainer, is kept already, or trains with DeepSpeed, which has a door of its own; or there
            is no such option.
    """
    checked(root, options)
    if isinstance(trainer, _Kept):
        raise UsageError(
            f"this {type(trainer).__name__} is kept already, in {trainer.holdfast.root}", remedy="call keep once"
        )
    if missing := [name for name in _NEEDED if not hasattr(trainer, name)]:
        raise UsageError(
            f"{type(trainer).__name__} is no transformers.Trainer of release 5: it has no {', '.join(missing)}",
            remedy="give the trainer itself, of transformers 5",
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise UsageError(
            "this trainer trains with DeepSpeed", remedy="use the checkpoint engine of holdfast for DeepSpeed"
        )
    if settings.disabled():
        logger.warning("%s is set: the trainer is left as it is", settings.DISABLE_VARIABLE)
        return trainer
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Kept, kind), {"__module__": kind.__module__})
    trainer.holdfast = _Keeping(trainer, os.fspath(root), settings.load() if config is None else config, options)
    return trainer


def wrap(accelerator: Any, root: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """A Checkpointer of everything that `accelerator.prepare` and `register_for_checkpointing` were given.

    Args:
        accelerator: after `prepare`.
        root: directory or URL of the checkpoints.
        options: more arguments of `holdfast.Checkpointer`.

    Raises:
        UsageError: nothing was prepared, or it trains with DeepSpeed or Megatron-LM.
    """
    if str(getattr(accelerator.distributed_type, "value", "")) in ("DEEPSPEED", "MEGATRON_LM"):
        raise UsageError(
            f"the accelerator trains with {accelerator.distributed_type.value}, which has a door of its own"
        )
    if not accelerator._models:
        raise UsageError("the accelerator has prepared no model", remedy="call accelerator.prepare(...) before wrap")
    _tell_what_is_late(accelerator)
    objects = dict(options)
    objects.setdefault("model", _one(accelerator._models))
    objects.setdefault("optimizer", _one([_bare(each, "optimizer") for each in accelerator._optimizers]))
    objects.setdefault("scheduler", _one([_bare(each, "scheduler") for each in accelerator._schedulers]))
    objects.setdefault("scaler", accelerator.scaler)
    # Accelerate remembers models as they were before it wrapped them, so that DDP cannot be seen from here.
    by_ddp = str(getattr(accelerator.distributed_type, "value", "")).startswith("MULTI_")
    if by_ddp:
        _refuse_local_sgd(accelerator)
    objects["replicated"] = [*options.get("replicated", ()), *(_parameters(objects["model"]) if by_ddp else ())]
    if accelerator._dataloaders:
        objects.setdefault("loaders", Loaders(accelerator))
    if accelerator._custom_objects:
        objects.setdefault("custom", list(accelerator._custom_objects))
    return Checkpointer(root, **objects)


def _tell_what_is_late(accelerator: Any) -> None:
    """Warn of what is prepared or registered from now on: the Checkpointer that is about to be made does not have it."""
    for name in ("prepare", "register_for_checkpointing"):
        method = functools.partial(getattr(type(accelerator), name), accelerator)
        vars(accelerator)[name] = functools.partial(_late, accelerator, name, method)


def _refuse_local_sgd(accelerator: Any) -> None:
    """Make Accelerate's LocalSGD an error with this accelerator: of parameters that DDP keeps equal one rank's are saved."""
    from accelerate.local_sgd import LocalSGD  # noqa: PLC0415 - there, for its accelerator is

    accelerator.holdfast_has_one_for_all = True
    if hasattr(LocalSGD.__enter__, "__wrapped__"):
        return
    enter = LocalSGD.__enter__

    @functools.wraps(enter)
    def refusing(local: Any) -> Any:
        if local.enabled and getattr(local.accelerator, "holdfast_has_one_for_all", False):
            raise UsageError(
                "LocalSGD lets the parameters of the ranks differ, so one rank cannot be saved for all, as wrap does",
                remedy="give a Checkpointer accelerator.unwrap_model(model) instead: every rank's are then saved as its own",
            )
        return enter(local)

    LocalSGD.__enter__ = refusing


def _late(accelerator: Any, name: str, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
    vars(accelerator).pop(name, None)
    if accelerator._models:  # else everything was given free, and begins anew
        kinds = ", ".join(type(each).__name__ for each in given)
        logger.warning(
            "accelerator.%s(%s) came behind holdfast's wrap, and is not kept: call wrap behind it", name, kinds
        )
    return method(*given, **options)


def _parameters(model: Any) -> Iterator[str]:
    """Names of parameters that DDP keeps equal, as a Checkpointer names them; models without any are not wrapped."""
    several = isinstance(model, list)
    for index, each in enumerate(model if several else [model]):
        prefix = f"model.{index}" if several else "model"
        if any(parameter.requires_grad for parameter in each.parameters()):
            yield from (f"{prefix}.{glob.escape(name)}" for name, _ in each.named_parameters())


# Optimizers that transformers makes of which hooks on parameters, or the backward pass itself, make the steps.
IN_BACKWARD = ("LayerWiseDummyOptimizer", "Lomo", "AdaLomo")


class _Keeping:
    """Holds what holdfast knows of one trainer."""

    def __init__(self, trainer: Any, root: str, config: Config, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self.root = root
        self._config = config
        self._options = options
        self._version: Version | None = None
        self._random: dict[str, Any] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._in_epoch = True  # no epoch has ended since the last step
        self.last_step = _LastStep()
        self._epochs = _Epochs()
        self._trained: Trained | None = None
        self._reported = 0  # the trainer's count of steps when it was reported last
        self._stopped = False  # the version that was found is one behind which the trainer stopped
        self._spent_s = 0.0  # seconds of training in processes before this one
        self._trains = True  # the mode that the model was left in
        self._began_s = 0.0
        self._rests = False  # this call of `train` is not kept
        self._has_set_out = False  # the trainer made the calls that `keep` takes hold of, as far as training begins
        self._unkept = Unkept(_REMEDY)
        self._looks_at_modules = _LOOKS_AT_MODULES
        self.turn: Callable[[], bool] | None = None  # asked at each call of `train` whether it is to be kept
        self.checkpointer: Checkpointer | None = None
        self._listen()

    def rests(self, call: TrainCall) -> bool:
        """Return whether this call of `train` is the trainer's own affair, and say so.

        Trials of a search are trainings of their own: to go on with the version of one in the next would be wrong.
        """
        self.leave()
        self._rests = True
        if call.trial is not None:
            logger.warning("a trial of a hyperparameter search is not kept: a restart begins the search anew")
        elif self.turn is not None and not call.takes_place:
            logger.warning("this training is not kept: %s", self._cannot_go_on())
        elif self.turn is not None and not self.turn():
            logger.warning(AGAIN, type(self._trainer).__name__, self.root, "keep(trainer, path)")
        else:
            self._rests = False
        return self._rests

    def _cannot_go_on(self) -> str:
        return f"the method train of {type(self._trainer).__name__} takes no {PLACE}, so a restart cannot go on with a version"

    def place(self, *, can_go_on: bool = True) -> str | None:
        """A directory with the state of the trainer in the newest version, as it asks for; None on a first start.

        Raises:
            UsageError: there is a version, and the trainer cannot be told to go on with it.
        """
        self.leave()
        found = newest(self.root, self._config, _saved)
        if found is not None and not can_go_on:
            raise UsageError(self._cannot_go_on(), where=self.root, remedy=_HAND_ON)
        if not can_go_on:
            logger.warning("%s: %s", self._cannot_go_on(), _HAND_ON)
        return None if found is None else self._placed(*found)

    def given(self, place: Any) -> Any:
        """The trainer was told where to go on: there, in a new lineage; but see below.

        Every script that asks for the last checkpoint of its output directory gives a path at each restart. In a process that
        the launcher started again, the same or a later step that this run has saved here is what its path would have become.
        """
        self.leave()
        if not place:
            return place
        ranks = collectives.ranks()
        path = _last_of(self._trainer.args.output_dir) if place is True else place
        told = int.from_bytes(collectives.share(ranks, lambda: _step_of(path).to_bytes(8, "big")), "big")
        try:
            found = newest(self.root, self._config, _saved)
        except HoldfastError as error:
            logger.warning("%s: what is there is not looked at, for a path is given: %s", self.root, error)
            return place
        if found is None:
            return place
        version, saved = found
        is_ours = settings.is_restart() and saved.run == settings.launch()
        # Ours of the same step was saved behind the trainer's own, and behind what callbacks did after that.
        if version.step + 1 < told or (version.step + 1 == told and not is_ours):
            return place
        if is_ours:
            logger.warning(
                "%s is of step %d; this run goes on with step %d, which holdfast has", path, told, version.step + 1
            )
            return self._placed(version, saved)
        logger.warning(
            "%s is of step %d, and %s holds step %d: the path is what was asked for; without it the later step is taken",
            path, told, self.root, version.step + 1,
        )  # fmt: skip
        return place

    def _placed(self, version: Version, saved: _Saved) -> str:
        self._version, self._stopped = version, saved.stopped
        self._epochs = _Epochs(saved.epochs)
        self._place = self._place or tempfile.TemporaryDirectory(prefix="holdfast-trainer-")
        with open(os.path.join(self._place.name, STATE_FILE), "w", encoding="utf-8") as file:
            file.write(saved.state)
        return self._place.name

    def owns(self, place: object) -> bool:
        """Return whether this is the directory that `place` made."""
        return self._place is not None and place == self._place.name

    def begin(self) -> None:
        """Everything is wrapped and nothing is trained: fills it with the version.

        Raises:
            UsageError: the trainer makes its steps in a loop of another kind, in which what is restored would not be bit for bit.
        """
        if self._rests:
            return
        trainer = self._trainer
        if (error := self._why_not()) is not None:
            if self.turn is None or self.goes_on:
                raise error
            logger.warning("this training is not kept: %s", error)
            self._rests = True
            return
        objects = {
            "model": trainer.model_wrapped,
            "optimizer": _bare(trainer.optimizer, "optimizer"),
            "scheduler": _bare(trainer.lr_scheduler, "scheduler"),
            "scaler": trainer.accelerator.scaler,
            "trainer": _Counts(trainer, self),
            **(_of_trl(trainer) if is_of_trl(trainer) else {}),
            **self._options,
        }
        self._spent_s, self._began_s = 0.0, time.monotonic()
        self._trained = Trained(trainer.model)
        self.checkpointer = Checkpointer(self.root, config=self._config, **objects)
        start = self.checkpointer.restore(self._version, fresh=self._version is None)
        if self._version is not None and start != trainer.state.global_step:
            raise UsageError(f"the trainer is at step {trainer.state.global_step}, the version at {start}")
        self._reported = trainer.state.global_step
        if self.is_over:  # as it was when the training ended
            trainer.control.should_training_stop = True
            if trainer.model.training is not self._trains:  # an evaluation may have been the last thing that it did
                trainer.model_wrapped.train(self._trains)
        self._random = ProcessRandomness().state_dict()

    def _why_not(self) -> UsageError | None:
        """Return why this training cannot be kept; None if it can."""
        if not self._has_set_out:
            return UsageError(
                f"{type(self._trainer).__name__} has a training loop of its own, which does not call _init_training_state: "
                "a restart within an epoch would not go on as an undisturbed training",
                remedy="let its _inner_training_loop call that of transformers 5, or keep the loop with a holdfast.Checkpointer",
            )
        optimizer = _bare(self._trainer.optimizer, "optimizer")
        if any(kind.__name__ in IN_BACKWARD for kind in type(optimizer).__mro__):
            return UsageError(
                f"{type(optimizer).__name__} steps within the backward pass, with state that no version would have",
                remedy="choose an `optim` that is neither layerwise nor (ada)lomo",
            )
        return None

    def counted(self) -> dict[str, Any]:
        """Return what a version says of the run besides the trainer's state: seconds of training, whether it stopped
        there, and whether the model was left as for training.
        """
        spent_s = self._spent_s + time.monotonic() - self._began_s
        return {
            "run": settings.launch(),
            "spent_s": spent_s,
            "stopped": bool(self._trainer.control.should_training_stop),
            "trains": bool(self._trainer.model.training),
            "epochs": self._epochs.state(self._trainer, ended=not self._in_epoch),
            "trained": self._trained.state_dict() if self._trained is not None else {},
            "last_step": dict(self.last_step.known),
        }

    def count_on(self, state: Mapping[str, Any]) -> None:
        """The other way; versions of before do not say it."""
        self._spent_s = float(state.get("spent_s", 0.0))
        self._trains = bool(state.get("trains", True))
        self._epochs.count_on(state.get("epochs", {}))
        self.last_step = _LastStep(state.get("last_step", {}) if self._epochs.skips else {})
        if self._trained is not None:
            self._trained.load_state_dict(state.get("trained") or {"changed": []})

    @property
    def spent_s(self) -> float:
        """Seconds that were trained in the processes before this one."""
        return self._spent_s

    @property
    def goes_on(self) -> bool:
        """Return whether this training began in an earlier process."""
        return self._version is not None

    @property
    def is_over(self) -> bool:
        """Return whether the version that was found is the last of the training: nothing is left to train."""
        state = self._trainer.state
        if self._version is None or state.global_step != self._version.step + 1:
            return False
        return state.global_step >= state.max_steps or (self._stopped and settings.is_restart())

    def done(self) -> None:
        """The trainer did all that it does for a step, or for an epoch.

        Behind the last step of an epoch the trainer does more, for the epoch: that step is reported with the epoch.
        """
        control, count = self._trainer.control, self._trainer.state.global_step
        stops = control.should_training_stop
        if self.checkpointer is None or count <= self._reported:
            # Data that tells no length: its last step was reported before anybody knew that the epoch ends, or the training.
            if self.checkpointer is not None and stops and not self._in_epoch:
                self._stop(count)
            return
        ends = float(self._trainer.state.epoch or 0.0).is_integer() or control.should_epoch_stop or stops
        if ends and self._in_epoch:
            return
        self._reported = count
        if stops:
            self._stop(count)
        self.checkpointer.step(count - 1)

    def _stop(self, count: int) -> None:
        """Keeps the last step: what is loaded from now on is another state."""
        assert self.checkpointer is not None
        self.checkpointer.save_last(count - 1)

    def epoch(self, *, ended: bool) -> None:
        """The trainer is about to do what it does for an epoch; or for a step."""
        self._in_epoch = not ended

    def step_begins(self) -> None:
        """All that the script does before the first step is done."""
        if self._trained is not None:
            self._trained.change()
        self._look()

    def _look(self) -> None:
        """Attributes of the script's own objects that change, and that no version has, are named."""
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 - not there without the extra

        trainer, given = self._trainer, {id(each) for each in self._options.values()}
        callbacks = [each for each in trainer.callback_handler.callbacks if not isinstance(each, ExportableState)]
        data = [trainer.train_dataset, trainer.data_collator]
        self._unkept.look(each for each in [*callbacks, *data] if id(each) not in given)
        if not is_of_trl(trainer):
            self._unkept.look([trainer], of_transformers() | _OF_KEEP)
        if (left := self._looks_at_modules) > 0:
            self._looks_at_modules = left - 1
            self._unkept.look(trainer.model.modules(), _OF_MODULES)

    def _go_on_here(self) -> None:
        """Random numbers go on where they were: the next thing is what followed the version."""
        if self._random is not None and self.goes_on:
            ProcessRandomness().load_state_dict(self._random)
        self._random = None

    def skipped(self) -> None:
        """The batches that were trained are skipped. Where there are none, callbacks may have drawn numbers for the epoch."""
        if self._epochs.skips:
            self._go_on_here()

    def nothing_is_skipped(self) -> None:
        """An epoch begins, or the training ends; no callback has drawn random numbers for that yet."""
        if not self._epochs.skips:
            self._go_on_here()

    def end(self) -> None:
        """The training is over: its last step is durable."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.leave()

    def attempt(self) -> None:
        """The trainer sets out to train, for a second time where it looks for a batch that fits: then from the newest version.

        Callbacks that were added behind `keep` begin before it too: what they begin with would stand in the place of what is restored.
        """
        self._has_set_out = True
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.sort(key=lambda each: each is self._callback)
        if self.checkpointer is None:
            return
        self.checkpointer.abandon()
        self.checkpointer, self._epochs, self._in_epoch, self.last_step = None, _Epochs(), True, _LastStep()
        found = None if self._place is None else newest(self.root, self._config, _saved)
        if found is not None:
            self._placed(*found)

    def leave(self) -> None:
        """Nothing is left of an earlier call of `train`."""
        if self.checkpointer is not None:
            self.checkpointer.abandon()
            self.checkpointer = None
        if self._place is not None:
            self._place.cleanup()
            self._place = None
        self._version, self._stopped, self._trained, self._has_set_out = None, False, None, False
        self._epochs, self._in_epoch, self.last_step = _Epochs(), True, _LastStep()

    def epochs(self, began: tuple[int, int], steps_in_epoch: Any) -> tuple[int, int]:
        """Return whole epochs and batches of the one behind them that are trained; the trainer's answer is `began`."""
        return self._epochs.begin(self._trainer, began, steps_in_epoch)

    def epoch_begins(self, epoch: Any, loader: Any) -> None:
        """The trainer is about to ask for the data of an epoch."""
        if self.checkpointer is not None:
            self._epochs.data_begins(self._trainer, epoch, loader)

    def _listen(self) -> None:
        """Hears of what the trainer does: behind the callbacks that it has, and of an epoch's beginning before them."""
        import transformers  # noqa: PLC0415 - not there without the extra

        keeping = self

        class HoldfastFirst(transformers.TrainerCallback):  # type: ignore[misc]
            """Speaks before a callback of the script may draw random numbers."""

            def on_epoch_begin(self, *_: Any, **__: Any) -> None:
                keeping.nothing_is_skipped()

        class HoldfastCallback(transformers.TrainerCallback):  # type: ignore[misc]
            """Begins, tells steps from epochs, ends."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                keeping.begin()

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                keeping.step_begins()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                keeping.epoch(ended=False)

            def on_epoch_end(self, *_: Any, **__: Any) -> None:
                keeping.epoch(ended=True)

            def on_train_end(self, *_: Any, **__: Any) -> None:
                keeping.end()

        self._trainer.callback_handler.callbacks.insert(0, HoldfastFirst())
        self._callback = HoldfastCallback()
        self._trainer.add_callback(self._callback)


class _Kept:
    """Holds what a kept trainer does instead of its class; every method is the class's own unless the place is ours."""

    holdfast: _Keeping

    def train(self, *args: Any, **options: Any) -> Any:
        kept, call = self.holdfast, TrainCall(super().train, args, options)  # type: ignore[misc]
        if kept.rests(call):
            return call()
        return call(kept.place(can_go_on=call.takes_place) if call.place is None else kept.given(call.place))

    def _load_from_checkpoint(self, place: Any, *args: Any, **options: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_from_checkpoint(place, *args, **options)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, place: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_optimizer_and_scheduler(place)  # type: ignore[misc]

    def _load_scaler(self, place: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_scaler(place)  # type: ignore[misc]

    def _load_rng_state(self, place: Any) -> Any:
        return self.holdfast.skipped() if self.holdfast.owns(place) else super()._load_rng_state(place)  # type: ignore[misc]

    def _init_training_state(self, steps: Any, steps_in_epoch: Any, epochs: Any, *args: Any, **options: Any) -> Any:
        self.holdfast.attempt()
        began = super()._init_training_state(steps, steps_in_epoch, epochs, *args, **options)  # type: ignore[misc]
        if not self.holdfast.is_over:
            return self.holdfast.epochs(began, steps_in_epoch)
        logger.warning(
            "the training in %s ended with step %d: nothing is trained",
            self.holdfast.root,
            self.state.global_step,  # type: ignore[attr-defined]
        )
        return epochs, 0  # none of them is begun

    def _run_epoch(self, *args: Any, **options: Any) -> Any:
        self.holdfast.epoch_begins(options.get("epoch"), options.get("train_dataloader"))
        return super()._run_epoch(*args, **options)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **options: Any) -> None:
        grad_norm, options = self.holdfast.last_step.told(grad_norm, options)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)  # type: ignore[misc]
        self.holdfast.done()

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        # That of `eval_on_start` alone leaves the scheduler out; who goes on made it when the training began.
        if options.get("skip_scheduler") and self.holdfast.goes_on:
            return None
        return super()._evaluate(*args, **options)  # type: ignore[misc]

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self.holdfast.is_over:
            self.holdfast.nothing_is_skipped()
        # Reported losses and speeds are those of all steps, so the time is that of all processes.
        return super()._finalize_training(trial, num_train_samples, start_time - self.holdfast.spent_s)  # type: ignore[misc]


class _LastStep:
    """Knows what the trainer logs of its last step, learning rate and norm of the gradients: who goes on behind it has not made it.

    Args:
        saved: what the version says, where batches of an epoch are skipped.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self.known = dict(saved or {})
        self._is_saved = bool(saved)

    def told(self, grad_norm: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the trainer's norm and options of its call; where it made no step since the restart, those of the version."""
        if options.get("learning_rate") is None:
            is_saved, self._is_saved = self._is_saved, False
            if not is_saved or "learning_rate" not in options:
                return grad_norm, options
            return self.known.get("grad_norm"), {**options, "learning_rate": self.known["learning_rate"]}
        self.known, self._is_saved = {"learning_rate": options["learning_rate"]}, False
        if isinstance(grad_norm, float) or type(grad_norm) is torch.Tensor:
            self.known["grad_norm"] = grad_norm
        return grad_norm, options


class _Epochs:
    """Tells where the trainer is in its epochs, which its count of steps alone does not say.

    An epoch may end before its data does (`should_epoch_stop`), and data that tells no length ends where it ends. So the epoch is
    kept, the batches of it that were trained, and the random numbers that it began with, those of the process and of samplers,
    from which a loader of the script's own draws its order.

    Args:
        saved: what the version says; empty if there is none, or one of before.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._saved = dict(saved or {})
        self._epoch, self._first, self._length = 0, 0, 0
        self._random: dict[str, Any] = {}
        self._samplers: Samplers | None = None
        self._drawn: dict[str, Any] = {}  # what the samplers began the epoch with
        self._goes_on = self._is_same = False
        self._is_told = False  # the trainer says which epoch begins
        self.skips = False  # batches of the first epoch are trained already

    def begin(self, trainer: Any, began: tuple[int, int], length: Any) -> tuple[int, int]:
        """Return whole epochs and batches of the one behind them that are trained.

        The trainer's own answer stands where the script has other data or another batch than the run that saved.
        """
        saved, self._length = self._saved, int(length)
        epochs, batches = began
        goes_on = bool(saved) and not trainer.args.ignore_data_skip
        if goes_on and saved.get("of") == self._of(trainer):
            epochs, batches = saved["epoch"], saved["steps"] * trainer.args.gradient_accumulation_steps
            self._goes_on, self._is_same = batches > 0, True
        self._epoch, self.skips = epochs, batches > 0
        self._first = trainer.state.global_step - batches // trainer.args.gradient_accumulation_steps
        return epochs, batches

    def count_on(self, state: Mapping[str, Any]) -> None:
        """Everything is restored, tensors too."""
        self._saved["random"], self._saved["samplers"] = state.get("random") or {}, state.get("samplers") or {}

    def data_begins(self, trainer: Any, epoch: Any, loader: Any) -> None:
        """An epoch's data is about to be asked for; that of one which was broken off begins as it did then."""
        self._is_told = epoch is not None
        if self._goes_on and self._saved["random"]:
            self._random = self._saved["random"]
            ProcessRandomness().load_state_dict(self._random)
        else:
            if epoch != self._epoch:
                self._epoch, self._first = epoch, trainer.state.global_step
            self._random = ProcessRandomness().state_dict()
        self._samplers = self._samplers or Samplers(loader)
        if self._is_same:
            self._samplers.load_state_dict(self._saved["samplers"])
        self._drawn = self._samplers.state_dict()
        self._goes_on = self._is_same = False

    def state(self, trainer: Any, *, ended: bool) -> dict[str, Any]:
        """Return the place behind the last step; nothing of a trainer that does not say which epoch begins."""
        if not self._is_told:
            return {}
        steps = trainer.state.global_step - self._first
        if ended and self._is_whole(trainer, steps):
            drawn = self._samplers.state_dict() if self._samplers is not None else {}
            return {"epoch": self._epoch + 1, "steps": 0, "random": {}, "samplers": drawn, "of": self._of(trainer)}
        place = {"epoch": self._epoch, "steps": steps, "of": self._of(trainer)}
        return {**place, "random": self._random if steps else {}, "samplers": self._drawn}

    def _is_whole(self, trainer: Any, steps: int) -> bool:
        """Return whether an epoch that the trainer calls ended is: it says so of one, too, in which the whole training stops."""
        control = trainer.control
        if not control.should_training_stop or control.should_epoch_stop:
            return True
        return self._is_sized(trainer) and steps >= self._length

    def _is_sized(self, trainer: Any) -> bool:
        return bool(self._length != trainer.state.max_steps)

    def _of(self, trainer: Any) -> list[int]:
        """Return what the numbers count: data without a length has as many steps in an epoch as there are at most."""
        return [
            self._length if self._is_sized(trainer) else 0,
            trainer.args.gradient_accumulation_steps,
            trainer._train_batch_size,
        ]


def _of_trl(trainer: Any) -> dict[str, Any]:
    """Return what a trainer of TRL has besides; nothing of it is part of versions of other trainers."""
    reference = moving_reference(trainer)
    return {"trl": Attributes(trainer), **({} if reference is None else {"reference": reference})}


class _Counts:
    """The `TrainerState` and what the trainer counts beside it, as an object with a state."""

    def __init__(self, trainer: Any, keeping: _Keeping) -> None:
        self._trainer = trainer
        self._keeping = keeping
        self._told = {"stateful_callbacks"}  # objects, of which the states are kept
        self._log = _Log()

    def _tell(self, names: set[str]) -> None:
        if left := sorted(names - self._told):
            logger.warning(
                "the trainer's state has %s, which cannot be written as JSON: a restart has it not", ", ".join(left)
            )
        self._told |= names

    def state_dict(self) -> dict[str, Any]:
        """The state as the text of its own file, and the counts."""
        state = dict(vars(self._trainer.state))
        history = self._log.text(state.pop("log_history", []))
        kept = {name: value for name, value in state.items() if _is_plain(value)}
        self._tell(state.keys() - kept.keys() | ({"log_history"} if history is None else set()))
        states = _states(self._exportable())
        if _is_plain(states):
            kept["stateful_callbacks"] = states
        counted = {name: getattr(self._trainer, name) for name in _COUNTED if hasattr(self._trainer, name)}
        text = f'{{"log_history": {history or "[]"}, {_text(kept)[1:]}'
        return {"state": text, **counted, **self._keeping.counted()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The trainer has read its state from the file already; callbacks and counts are put back."""
        for name in _COUNTED:
            if name in state and hasattr(self._trainer, name):
                now = getattr(self._trainer, name)
                value = state[name]
                setattr(self._trainer, name, value.to(now.device) if isinstance(now, torch.Tensor) else value)
        self._keeping.count_on(state)
        if not getattr(self._trainer.args, "restore_callback_states_from_checkpoint", False):
            _put_back(self._exportable(), json.loads(str(state["state"])).get("stateful_callbacks") or {})

    def _exportable(self) -> list[Any]:
        """The callbacks that hand out a state, and the control, as the trainer's own save looks for them."""
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 - not there without the extra

        parts = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [part for part in parts if isinstance(part, ExportableState)]


def _states(parts: list[Any]) -> dict[str, Any]:
    """The states by the name of the class, several of one class as a list: the form that the trainer reads."""
    by_name: dict[str, list[Any]] = {}
    for part in parts:
        by_name.setdefault(type(part).__name__, []).append(part.state())
    return {name: states[0] if len(states) == 1 else states for name, states in by_name.items()}


def _put_back(parts: list[Any], states: Mapping[str, Any]) -> None:
    """Gives each callback the attributes that it had; arguments stay those of the script.

    The trainer's own resume does this only if it is asked to, and then makes new callbacks. A restart that nobody asked for must
    not make early stopping forget its patience.
    """
    left = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    for part in parts:
        of_class = left.get(type(part).__name__)
        for name, value in (of_class.pop(0).get("attributes") or {}).items() if of_class else ():
            setattr(part, name, value)


def _last_of(directory: str) -> str:
    """The trainer's own last checkpoint there; empty if there is none."""
    from transformers.trainer_utils import get_last_checkpoint  # noqa: PLC0415 - not there without the extra

    return (get_last_checkpoint(directory) if os.path.isdir(directory) else None) or ""


def _step_of(path: Any) -> int:
    """The trainer's count of steps in a checkpoint of its own; 0 if that cannot be read."""
    try:
        with open(os.path.join(str(path), STATE_FILE), encoding="utf-8") as file:
            return max(0, int(json.load(file)["global_step"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        pass_on(error)
        return 0


@dataclass(frozen=True, slots=True)
class _Saved:
    """Holds what a version says of the trainer before anything is loaded.

    Attributes:
        state: the text of the trainer's state.
        run: the launch that saved it; empty if it does not say.
        stopped: whether the trainer stopped behind this step.
        epochs: where it was in its epochs; empty if it does not say.
    """

    state: str
    run: str
    stopped: bool
    epochs: Mapping[str, Any]


def _saved(values: Mapping[str, Any], rank: int) -> _Saved:
    """Reads what a version says for this rank."""
    for name in (f"rank{rank}/trainer", "trainer", "rank0/trainer"):
        if name in values:
            of = values[name]
            epochs = of.get("epochs", {})
            return _Saved(str(of["state"]), str(of.get("run", "")), bool(of.get("stopped", False)), epochs)
    raise UsageError(
        "the version was not saved by a transformers.Trainer", remedy="choose another path, or the door that saved it"
    )


class _Log:
    """Writes a list of entries that grows, each of them once: that of a long training would take longer than its steps."""

    def __init__(self) -> None:
        self._written: list[tuple[Any, str]] = []

    def text(self, entries: list[Any]) -> str | None:
        """Return the text of all; None if one cannot be written as JSON."""
        del self._written[len(entries) :]
        for place, entry in enumerate(entries):
            is_new = place == len(self._written)
            if is_new or self._written[place][0] != entry:
                if not _is_plain(entry):
                    return None
                self._written[place : place + 1] = [(copy.deepcopy(entry), _text(entry))]
        return f"[{', '.join(text for _, text in self._written)}]"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_number)


def _is_plain(value: Any) -> bool:
    try:
        _text(value)
    except (TypeError, ValueError) as error:
        pass_on(error)
        return False
    return True


def _number(value: Any) -> Any:
    """A number of NumPy or torch, as a script logs it, as the plain one."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number")


def _bare(wrapped: Any, name: str) -> Any:
    """Return what Accelerate wrapped; the object itself if it did not."""
    return getattr(wrapped, name, wrapped)


def _one(found: list[Any]) -> Any:
    """A single thing by itself, several as a list, none as None."""
    return found[0] if len(found) == 1 else (list(found) or None)
