"""A script may train more than once: folds, trials of a search, a trial run. No training goes on with the version of another one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapters import huggingface, lightning
from holdfast.adapters.hf_parts.accelerate_loaders import Loaders
from holdfast.adapters.zero_lines.frameworks import Finder
from holdfast.base.config import Config
from holdfast.base.errors import UsageError
from holdfast.checkpoint.entries import carried_tensors
from holdfast.checkpoint.entries.trained_parameters import Trained

MODULE = """
class Trainer:
    _load_rng_state = _maybe_log_save_evaluate = accelerator = callback_handler = None
    _init_training_state = _run_epoch = _finalize_training = None

    def __init__(self, is_deepspeed_enabled=False):
        self.is_deepspeed_enabled = is_deepspeed_enabled

    def add_callback(self, callback):
        pass

    def train(self, resume_from_checkpoint=None, trial=None):
        return resume_from_checkpoint
"""


@pytest.fixture
def trainer_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of Trainers that zero lines keep; each call of `train` that is kept is given the path "kept"."""
    for loaded in [each for each in sys.modules if each.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, loaded)
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "trainer.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(huggingface._Keeping, "_listen", lambda _: None)
    monkeypatch.setattr(huggingface._Keeping, "place", lambda _, **__: "kept")
    finder = Finder("ckpts/run1")
    finder.install()
    try:
        yield importlib.import_module("transformers.trainer").Trainer
    finally:
        finder.remove()
        for loaded in [each for each in sys.modules if each.split(".")[0] == "transformers"]:
            del sys.modules[loaded]


def test_of_several_trainings_of_a_script_the_first_is_kept(
    trainer_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Folds: each builds its Trainer. What is given goes to the trainer itself then."""
    first, second = trainer_class(), trainer_class()
    assert first.train() == "kept"
    assert second.train() is None
    assert first.train("path") == "path"
    assert caplog.text.count("this training is not kept: a Trainer of this script has trained before") == 2
    again = Finder("ckpts/run1")  # the script is run again in this process
    again.install()
    again.remove()
    assert trainer_class().train() == "kept"


def test_a_trial_of_a_search_is_not_kept(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_class()
    assert trainer.train(None, {"learning_rate": 0.1}) is None
    assert trainer.train(trial={"learning_rate": 0.2}) is None
    assert "a trial of a hyperparameter search is not kept" in caplog.text


def test_what_has_a_door_of_its_own_trains_unkept(trainer_class: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """An error in the line that builds it would stop a script that is well."""
    assert trainer_class(is_deepspeed_enabled=True).train() is None
    assert "this Trainer is not kept: this trainer trains with DeepSpeed" in capsys.readouterr().err


def _kept(trainer: Any, monkeypatch: pytest.MonkeyPatch, place: Any = None) -> Any:
    """The trainer under `keep`, with what is found at its path."""
    monkeypatch.setattr(huggingface, "newest", lambda *_: place)
    monkeypatch.setattr(huggingface._Keeping, "_placed", lambda *_: "kept")
    return huggingface.keep(trainer, "ckpts/run1")


def _unlistened(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of Trainers that are not kept yet."""
    monkeypatch.setattr(huggingface._Keeping, "_listen", lambda _: None)
    names: dict[str, Any] = {}
    exec(MODULE, names)
    return names["Trainer"]  # type: ignore[no-any-return]


def test_a_train_of_a_subclass_is_called_as_the_script_calls_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare(_unlistened(monkeypatch)):  # type: ignore[misc]
        def train(self) -> Any:
            return super().train() or "trained"

    class Named(_unlistened(monkeypatch)):  # type: ignore[misc]
        def train(self, epochs: int = 1, **options: Any) -> Any:
            return epochs, options

    class Handed(_unlistened(monkeypatch)):  # type: ignore[misc]
        def train(self, *args: Any, **options: Any) -> Any:
            return super().train(*args, **options)

    assert _kept(Bare(), monkeypatch).train() == "trained"
    assert "the method train of Bare takes no resume_from_checkpoint" in caplog.text
    assert _kept(Named(), monkeypatch).train(epochs=3) == (3, {})
    assert _kept(Handed(), monkeypatch).train(None) is None
    found = (SimpleNamespace(), SimpleNamespace())
    assert _kept(Named(), monkeypatch, found).train(3) == (3, {"resume_from_checkpoint": "kept"})
    assert _kept(Handed(), monkeypatch, found).train() == "kept"
    assert _kept(Handed(), monkeypatch, found).train(None) == "kept"
    with pytest.raises(UsageError, match="the method train of Bare takes no resume_from_checkpoint"):
        _kept(Bare(), monkeypatch, found).train()


def test_zero_lines_keep_no_train_that_cannot_go_on(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Bare(trainer_class):  # type: ignore[misc]
        def train(self) -> Any:
            return super().train() or "trained"

    class Deaf(trainer_class):  # type: ignore[misc]
        def train(self, *args: Any, **options: Any) -> Any:
            return super().train() or "trained"

    assert Bare().train() == "trained"
    assert "this training is not kept: the method train of Bare takes no resume_from_checkpoint" in caplog.text
    assert Deaf().train(1, epochs=2) == "trained"
    assert "this training is not kept: the method train of Deaf takes no resume_from_checkpoint" in caplog.text
    assert trainer_class().train() == "kept", "a training that cannot be kept is not the one of the script that is"


LOOP = """
from types import SimpleNamespace

class TrainerCallback:
    on_train_begin = None

class Trainer:
    _load_rng_state = _maybe_log_save_evaluate = accelerator = _run_epoch = _finalize_training = None
    model = model_wrapped = optimizer = lr_scheduler = None

    def __init__(self):
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.state = SimpleNamespace(global_step=0, max_steps=2)

    def add_callback(self, callback):
        self.callback_handler.callbacks.append(callback)

    def train(self, resume_from_checkpoint=None):
        return self._inner_training_loop()

    def _init_training_state(self, steps, steps_in_epoch, epochs):
        return 0, 0

    def _inner_training_loop(self):
        self._init_training_state(2, 2, 1)
        self.begin()

    def begin(self):
        for each in self.callback_handler.callbacks:
            if each.on_train_begin is not None:
                each.on_train_begin()
"""


@pytest.fixture
def looping(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of Trainers that come as far as `on_train_begin`."""
    module = ModuleType("transformers")
    exec(LOOP, vars(module))
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr(huggingface._Keeping, "epochs", lambda _, began, __: began)
    return module.Trainer  # type: ignore[no-any-return]


def test_what_is_restored_stands_behind_what_later_callbacks_begin_with(
    looping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(huggingface._Keeping, "begin", lambda _: told.append("restored"))
    trainer = _kept(looping(), monkeypatch)
    trainer.add_callback(SimpleNamespace(on_train_begin=lambda: told.append("average")))
    trainer.train()
    assert told == ["average", "restored"]


def test_a_training_loop_that_makes_other_calls_is_refused_or_not_kept(
    looping: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of transformers 4, which some subclasses have copied."""

    class Copied(looping):  # type: ignore[misc]
        def _inner_training_loop(self) -> None:
            self.begin()

    with pytest.raises(UsageError, match="Copied has a training loop of its own"):
        _kept(Copied(), monkeypatch).train()
    unasked = _kept(Copied(), monkeypatch)
    unasked.holdfast.turn = lambda: True
    unasked.train()
    assert "this training is not kept: Copied has a training loop of its own" in caplog.text
    assert unasked.holdfast.checkpointer is None


@pytest.mark.parametrize("name", ["LayerWiseDummyOptimizer", "AdaLomo"])
def test_an_optimizer_whose_steps_are_made_in_the_backward_pass_is_refused(
    looping: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As transformers makes one for `galore_adamw_layerwise` and `adalomo`."""
    trainer, kind = looping(), type(name, (torch.optim.SGD,), {})
    trainer.optimizer = SimpleNamespace(optimizer=kind([torch.ones(1)], lr=1.0))
    with pytest.raises(UsageError, match=f"{name} steps within the backward pass"):
        _kept(trainer, monkeypatch).train()


class _Begins(Exception):
    """Raised where a fit begins to be kept."""


def test_of_several_fits_of_a_script_the_first_is_kept_and_no_trial_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begins(_: Any) -> None:
        raise _Begins

    monkeypatch.setattr(lightning, "Place", begins)
    turns = iter((True, False))
    keeping = lightning.Keeping("root", {}, lambda: next(turns))
    keeping.begin(SimpleNamespace(fast_dev_run=1), None)
    assert "fast_dev_run: nothing is restored and nothing is saved" in caplog.text
    with pytest.raises(_Begins):
        keeping.begin(SimpleNamespace(fast_dev_run=0), None)
    keeping.begin(SimpleNamespace(fast_dev_run=0), None)
    assert "has trained before" in caplog.text


def test_what_is_trained_since_a_step_is_trained_behind_it() -> None:
    """Where the script begins as it did. Where it begins otherwise, it knows of the restart."""

    def model(*, is_frozen: bool) -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        return made if not is_frozen else made.requires_grad_(False)

    saving = model(is_frozen=True)
    trained = Trained(saving)
    saving[1].requires_grad_(True)
    state = trained.state_dict()
    for is_frozen, expected in ((True, [False, False, True, True]), (False, [True] * 4)):
        other = model(is_frozen=is_frozen)
        going_on = Trained(other)
        going_on.load_state_dict(state)
        going_on.change()
        assert [parameter.requires_grad for parameter in other.parameters()] == expected
    assert Trained(saving).state_dict()["changed"] == []


class _Epochs:
    """As much of a `transformers.Trainer` as its epochs are told by."""

    def __init__(self, step: int = 0, batch: int = 4, most: int = 13) -> None:
        self.args = SimpleNamespace(gradient_accumulation_steps=2, ignore_data_skip=False)
        self.state = SimpleNamespace(global_step=step, max_steps=most)
        self.control = SimpleNamespace(should_training_stop=False, should_epoch_stop=False)
        self._train_batch_size = batch


def test_an_epoch_that_ended_early_is_over_and_other_data_counts_anew() -> None:
    """Five steps are an epoch; the first ended behind three. Step 6 is the third of the second, of which six batches are had."""
    epochs, trainer = huggingface._Epochs(), _Epochs()
    assert epochs.begin(trainer, (0, 0), 5) == (0, 0)
    assert epochs.state(trainer, ended=False) == {}, "the trainer has not said which epoch begins"
    for epoch, steps in ((0, 3), (1, 3)):
        epochs.data_begins(trainer, epoch, None)
        trainer.state.global_step += steps
    saved = epochs.state(trainer, ended=False)
    assert (saved["epoch"], saved["steps"]) == (1, 3)
    assert huggingface._Epochs(saved).begin(_Epochs(6), (1, 2), 5) == (1, 6)
    assert huggingface._Epochs(saved).begin(_Epochs(6), (1, 2), 4) == (1, 2), "another length"
    assert huggingface._Epochs(saved).begin(_Epochs(6, batch=8), (1, 2), 5) == (1, 2)
    assert huggingface._Epochs(epochs.state(trainer, ended=True)).begin(_Epochs(6), (1, 2), 5) == (2, 0)


@pytest.mark.parametrize(
    ("length", "steps", "stops_epoch", "place"),
    [
        pytest.param(5, 3, False, (0, 3), id="behind the last step that was asked for"),
        pytest.param(5, 5, False, (1, 0), id="where the data ends"),
        pytest.param(5, 3, True, (1, 0), id="where a callback ends the epoch too"),
        pytest.param(13, 3, False, (0, 3), id="of a stream"),
    ],
)
def test_an_epoch_in_which_the_training_stops_goes_on_where_more_steps_are_asked_for(
    length: int, steps: int, stops_epoch: bool, place: tuple[int, int]
) -> None:
    """The trainer says that an epoch ended also where the training did."""
    epochs, trainer = huggingface._Epochs(), _Epochs()
    epochs.begin(trainer, (0, 0), length)
    epochs.data_begins(trainer, 0, None)
    trainer.state.global_step = steps
    trainer.control = SimpleNamespace(should_training_stop=True, should_epoch_stop=stops_epoch)
    saved = epochs.state(trainer, ended=True)
    assert (saved["epoch"], saved["steps"]) == place


def test_numbers_of_numpy_and_torch_in_a_log_are_kept_as_plain_ones() -> None:
    assert huggingface._is_plain([{"mine": np.float32(1.5), "other": torch.tensor(2)}])
    assert not huggingface._is_plain([{"mine": torch.ones(2)}])
    assert huggingface._number(np.float32(1.5)) == 1.5


def test_each_entry_of_a_log_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log = huggingface._Log()
    entries: list[Any] = [{"loss": 0.5, "step": step} for step in range(5)]
    assert json.loads(log.text(entries) or "") == entries
    monkeypatch.setattr(huggingface, "_text", lambda _: "1")
    entries.append({"loss": float("nan")})
    entries[2]["mine"] = [1]
    assert [type(entry) for entry in json.loads(log.text(entries) or "")] == [dict, dict, int, dict, dict, int]
    monkeypatch.undo()
    entries[2]["mine"].append(2)
    assert json.loads(log.text(entries[:3]) or "") == entries[:3], "entries that changed, or are gone"
    assert log.text([{"mine": torch.ones(2)}]) is None
    assert log.text([]) == "[]"


class _Accelerator:
    """As much of an Accelerator as what is late is told by."""

    _models: tuple[int, ...] = (1,)

    def prepare(self, *things: Any) -> tuple[Any, ...]:
        return things

    def register_for_checkpointing(self, *things: Any) -> None:
        """Nothing."""


def test_what_is_prepared_or_registered_behind_wrap_is_named(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = _Accelerator()
    huggingface._tell_what_is_late(accelerator)
    assert accelerator.prepare(torch.nn.Linear(1, 1), {}) is not None
    accelerator.register_for_checkpointing([])
    assert "accelerator.prepare(Linear, dict) came behind holdfast's wrap" in caplog.text
    assert "accelerator.register_for_checkpointing(list) came behind" in caplog.text
    huggingface._tell_what_is_late(accelerator)
    accelerator._models, caplog_before = (), caplog.text
    accelerator.prepare([])
    assert caplog.text == caplog_before, "all was given free"


def _accumulating(batches: int) -> Any:
    """As much of an Accelerator as `wrap` looks at, behind so many batches that are added up without `accumulate`."""
    torch.manual_seed(1)
    made: Any = _Accelerator()
    model = torch.nn.Linear(2, 1)
    made._models, made._schedulers, made._custom_objects, made.scaler = [model], [], [], None
    made._optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    made._dataloaders = [torch.utils.data.DataLoader(torch.ones(4, 2))]  # type: ignore[arg-type]
    made.distributed_type, made.sync_gradients, made.step = SimpleNamespace(value="NO"), True, 0
    made.gradient_state = SimpleNamespace(dataloader_references=[None])
    made.project_configuration = SimpleNamespace(automatic_checkpoint_naming=False)
    for number in range(batches):
        model(torch.full((1, 2), number + 1.0)).sum().backward()
    return made


def test_gradients_that_are_added_up_by_hand_come_back(tmp_path: Path, runtime_dir: Path) -> None:
    config = Config(runtime_dir=str(runtime_dir), linger_s=1.0)
    saving = _accumulating(0)
    first = huggingface.wrap(saving, tmp_path / "job", config=config)
    first.restore()
    for number in range(2):
        saving._models[0](torch.full((1, 2), number + 1.0)).sum().backward()
        first.step(number)
    first.save(1, "durable").wait("durable")
    first.abandon()
    going_on = _accumulating(0)
    again = huggingface.wrap(going_on, tmp_path / "job", config=config)
    assert again.restore() == 2
    assert going_on._models[0].weight.grad.tolist() == [[3.0, 3.0]]
    again.abandon()


def test_gradients_that_no_version_can_have_are_an_error_within_an_accumulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving = _accumulating(1)
    loaders = Loaders(saving)
    saving.sync_gradients = False
    assert "gradients" not in loaders.state_dict()
    monkeypatch.setattr(carried_tensors, "MAX_BYTES", 4)
    with pytest.raises(UsageError, match=r"report steps where accelerator\.sync_gradients is true"):
        loaders.state_dict()
