"""What is wrong with a door's options is said in the line that gives them, before there is anything to train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters import huggingface
from holdfast.adapters.options import checked
from holdfast.base.errors import HoldfastError, UsageError


def trainer() -> Any:
    """As much of a `transformers.Trainer` as `keep` looks at."""
    return SimpleNamespace(
        callback_handler=None, _load_rng_state=None, _maybe_log_save_evaluate=None, accelerator=None, train=None
    )


def test_a_misspelt_option_is_named_with_the_one_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'evry'.*has no state") as told:
        huggingface.keep(trainer(), tmp_path, evry=3)
    assert "'every'" in str(told.value)


@pytest.mark.parametrize("root", [None, 3, ""])
def test_what_is_no_path_is_refused(root: Any) -> None:
    with pytest.raises(UsageError, match="no directory or URL"):
        huggingface.keep(trainer(), root)


def test_a_cadence_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="every"):
        huggingface.keep(trainer(), tmp_path, every="often")


def test_options_and_objects_of_the_script_pass(tmp_path: Path) -> None:
    checked(
        tmp_path,
        {"every": 3, "durable_every": "30s", "overlap": False, "mine": torch.nn.Linear(1, 1), "table": {"a": 1}},
    )


def test_a_trainer_that_is_kept_is_not_kept_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        _load_rng_state = _maybe_log_save_evaluate = train = accelerator = callback_handler = None
        _init_training_state = _run_epoch = _finalize_training = None

        def add_callback(self, _: Any) -> None: ...

    monkeypatch.setattr(huggingface._Keeping, "_listen", lambda _: None)
    kept = huggingface.keep(Bare(), tmp_path)
    with pytest.raises(UsageError, match="this Bare is kept already"):
        huggingface.keep(kept, tmp_path)
