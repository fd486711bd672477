"""Hugging Face: `keep` for a `transformers.Trainer`, `wrap` for an `accelerate.Accelerator`.

    trainer = keep(Trainer(...), "ckpts/run1")      # the one line; then trainer.train() as ever
    checkpointer = wrap(accelerator, "ckpts/run1")  # after accelerator.prepare(...); then restore, step, close

`keep` puts a callback into the trainer (cadence: `on_step_end`) and answers where the trainer asks for a checkpoint's parts:
the trainer itself skips the batches that were trained, and asks for random numbers when it has done so. What is restored is
model, optimizer, scheduler, scaler, random numbers and the `TrainerState`, in place, after Accelerate has wrapped them, so
that DDP and FSDP2 (`fsdp_version: 2`) are sharded as they train. The trainer's own `save_steps` go on as they are set; with
holdfast `save_strategy="no"` is enough.

`trainer.train(resume_from_checkpoint=...)` with a path means that path: holdfast then starts a new lineage. Nothing happens
under HOLDFAST_DISABLE. Tested with transformers 5.23.0 and accelerate 1.15.0; frameworks are imported when they are there.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.adapters.dcp.peek import newest
from holdfast.adapters.door import Checkpointer
from holdfast.base import config as settings
from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.core.model import Version
from holdfast.train.randomness import ProcessRandomness

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# What the trainer counts beside its state, where this version of it does: else reported losses would begin anew.
_COUNTED = ("_tr_loss", "_globalstep_last_logged", "current_flos")


def keep(trainer: Any, root: str | os.PathLike[str], *, config: Config | None = None, **options: Any) -> Any:
    """The same trainer, kept alive: `train()` goes on with the newest version, and saves as the settings say.

    Args:
        trainer: a `transformers.Trainer`, or one of its subclasses.
        root: directory or URL of the checkpoints, the same on every rank.
        config: the settings; default: file and environment.
        options: more arguments of `holdfast.Checkpointer`: `every`, `durable_every`, objects with `state_dict` by name.

    Raises:
        UsageError: it is no such trainer, or trains with DeepSpeed, which has a door of its own.
    """
    if not all(hasattr(trainer, name) for name in ("callback_handler", "_load_rng_state", "accelerator", "train")):
        raise UsageError(f"{type(trainer).__name__} is no transformers.Trainer", remedy="give the trainer itself")
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
    trainer.add_callback(trainer.holdfast.callback())
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
    objects = dict(options)
    objects.setdefault("model", _one(accelerator._models))
    objects.setdefault("optimizer", _one([_bare(each, "optimizer") for each in accelerator._optimizers]))
    objects.setdefault("scheduler", _one([_bare(each, "scheduler") for each in accelerator._schedulers]))
    objects.setdefault("scaler", accelerator.scaler)
    # Accelerate remembers models as they were before it wrapped them, so that DDP cannot be seen from here.
    by_ddp = str(getattr(accelerator.distributed_type, "value", "")).startswith("MULTI_")
    objects["replicated"] = [*options.get("replicated", ()), *(_parameters(objects["model"]) if by_ddp else ())]
    if accelerator._custom_objects:
        objects.setdefault("custom", list(accelerator._custom_objects))
    return Checkpointer(root, **objects)


def _parameters(model: Any) -> Iterator[str]:
    """Names of parameters that DDP keeps equal, as a Checkpointer names them; models without any are not wrapped."""
    several = isinstance(model, list)
    for index, each in enumerate(model if several else [model]):
        prefix = f"model.{index}" if several else "model"
        if any(parameter.requires_grad for parameter in each.parameters()):
            yield from (f"{prefix}.{glob.escape(name)}" for name, _ in each.named_parameters())


class _Keeping:
    """What holdfast knows of one trainer."""

    def __init__(self, trainer: Any, root: str, config: Config, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._root = root
        self._config = config
        self._options = options
        self._version: Version | None = None
        self._random: dict[str, Any] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self.checkpointer: Checkpointer | None = None

    def place(self) -> str | None:
        """A directory with the state of the trainer in the newest version, as it asks for; None on a first start."""
        self.leave()
        found = newest(self._root, self._config, rank_values)
        self._version = None if found is None else found[0]
        if found is None:
            return None
        self._place = tempfile.TemporaryDirectory(prefix="holdfast-trainer-")
        with open(os.path.join(self._place.name, STATE_FILE), "w", encoding="utf-8") as file:
            file.write(found[1])
        return self._place.name

    def given(self, place: Any) -> Any:
        """The trainer was told where to go on: there, in a new lineage."""
        self.leave()
        self._version = None
        return place

    def owns(self, place: object) -> bool:
        """Whether this is the directory that `place` made."""
        return self._place is not None and place == self._place.name

    def begin(self) -> None:
        """Everything is wrapped and nothing is trained: fills it with the version."""
        trainer = self._trainer
        objects = {
            "model": trainer.model_wrapped,
            "optimizer": _bare(trainer.optimizer, "optimizer"),
            "scheduler": _bare(trainer.lr_scheduler, "scheduler"),
            "scaler": trainer.accelerator.scaler,
            "trainer": _Counts(trainer),
            **self._options,
        }
        self.checkpointer = Checkpointer(self._root, config=self._config, **objects)
        start = self.checkpointer.restore(self._version, fresh=self._version is None)
        if self._version is not None and start != trainer.state.global_step:
            raise UsageError(f"the trainer is at step {trainer.state.global_step}, the version at {start}")
        self._random = ProcessRandomness().state_dict()

    def step(self) -> None:
        """The trainer has counted one more step."""
        if self.checkpointer is not None:
            self.checkpointer.step(self._trainer.state.global_step - 1)

    def random(self) -> None:
        """The batches that were trained are skipped: random numbers go on where they were."""
        if self._random is not None:
            ProcessRandomness().load_state_dict(self._random)

    def end(self) -> None:
        """The training is over: its last step is durable."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.leave()

    def leave(self) -> None:
        """Nothing is left of an earlier call of `train`."""
        if self.checkpointer is not None:
            self.checkpointer.abandon()
            self.checkpointer = None
        if self._place is not None:
            self._place.cleanup()
            self._place = None

    def callback(self) -> Any:
        """The trainer's callback."""
        import transformers  # noqa: PLC0415 - not there without the extra

        keeping = self

        class HoldfastCallback(transformers.TrainerCallback):  # type: ignore[misc]
            """Begins, counts, ends."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                keeping.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                keeping.step()

            def on_train_end(self, *_: Any, **__: Any) -> None:
                keeping.end()

        return HoldfastCallback()


class _Kept:
    """What a kept trainer does instead of its class; every method is the class's own unless the place is ours."""

    holdfast: _Keeping

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        kept = self.holdfast
        place = kept.place() if resume_from_checkpoint is None else kept.given(resume_from_checkpoint)
        return super().train(place, *args, **options)  # type: ignore[misc]

    def _load_from_checkpoint(self, place: Any, *args: Any, **options: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_from_checkpoint(place, *args, **options)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, place: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_optimizer_and_scheduler(place)  # type: ignore[misc]

    def _load_scaler(self, place: Any) -> Any:
        return None if self.holdfast.owns(place) else super()._load_scaler(place)  # type: ignore[misc]

    def _load_rng_state(self, place: Any) -> Any:
        return self.holdfast.random() if self.holdfast.owns(place) else super()._load_rng_state(place)  # type: ignore[misc]


class _Counts:
    """The `TrainerState` and what the trainer counts beside it, as an object with a state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """The state as the text of its own file, and the counts."""
        state = self._trainer.state
        kept = {name: value for name, value in vars(state).items() if _is_plain(value)}
        counted = {name: getattr(self._trainer, name) for name in _COUNTED if hasattr(self._trainer, name)}
        if "_tr_loss" in counted and self._trainer.control.should_log:
            # The loss of this step is reported right after this save; who goes on from it must not report it again.
            counted |= {"_tr_loss": torch.zeros_like(counted["_tr_loss"]), "_globalstep_last_logged": state.global_step}
        return {"state": json.dumps(kept, sort_keys=True), **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The trainer has read its state from the file already; the counts are put back."""
        for name in _COUNTED:
            if name in state and hasattr(self._trainer, name):
                now = getattr(self._trainer, name)
                value = state[name]
                setattr(self._trainer, name, value.to(now.device) if isinstance(now, torch.Tensor) else value)


def rank_values(values: Mapping[str, Any], rank: int) -> str:
    """The text of the trainer's state that a version holds for this rank."""
    for name in (f"rank{rank}/trainer", "trainer", "rank0/trainer"):
        if name in values:
            return str(values[name]["state"])
    raise UsageError(
        "the version was not saved by a transformers.Trainer", remedy="choose another path, or the door that saved it"
    )


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _bare(wrapped: Any, name: str) -> Any:
    """What Accelerate wrapped; the object itself if it did not."""
    return getattr(wrapped, name, wrapped)


def _one(found: list[Any]) -> Any:
    """A single thing by itself, several as a list, none as None."""
    return found[0] if len(found) == 1 else (list(found) or None)
