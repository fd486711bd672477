"""Names in a version of DeepSpeed's files are looked at before files are made under them. Needs no DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters.deepspeed import CheckpointEngine, _Files
from holdfast.base.errors import MismatchError


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("../../step1", "mp_rank_00_model_states.pt"),
        ("/etc", "mp_rank_00_model_states.pt"),
        ("", "mp_rank_00_model_states.pt"),
        ("step1", "../mp_rank_00_model_states.pt"),
        ("step1", "/tmp/mp_rank_00_model_states.pt"),
        ("step1", ""),
    ],
)
def test_a_name_that_leads_out_of_the_checkpoint_is_refused(tag: str, name: str) -> None:
    files = _Files((), (0,), {})
    with pytest.raises(MismatchError, match="leads out of the checkpoint's directory"):
        files.holdfast_accepts({"tag": tag, "files": {name: {}}})


@pytest.mark.parametrize("tag", ["global_step7", "epoch1/step7"])
def test_names_of_deepspeed_are_taken(tag: str) -> None:
    files = _Files((), (0,), {})
    files.holdfast_accepts({"tag": tag, "files": {"mp_rank_00_model_states.pt": {}}})
    files.holdfast_accepts({"tag": "", "files": {}})


def test_a_second_save_in_one_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = CheckpointEngine.__new__(CheckpointEngine)
    handles: dict[int, object] = {}
    engine._files, engine._saves, engine._durable_every, engine._native = _Files((), (0,), {}), 0, 1, None
    engine._kept, engine._engine = (None, ""), SimpleNamespace(global_steps=0)

    def save(_: str, tag: str) -> bool:
        engine._files.tag = tag
        return True

    engine._save = save
    engine._checkpointer = SimpleNamespace(save=lambda step, _: handles.setdefault(step, object()))
    for step in (1, 2):
        engine._engine.global_steps = step
        engine._save_checkpoint("dir", "last")
    assert not caplog.text
    engine._save_checkpoint("dir", "last")
    assert "step 2 was saved under the tag 'last' already" in caplog.text
    assert "is in no version" in caplog.text
    engine._save_checkpoint("dir", "best")
    assert "under the tag 'best' has no version: step 2 was saved under 'last' already" in caplog.text
