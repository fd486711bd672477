"""Names in a version of DeepSpeed's files are looked at before files are made under them. Needs no DeepSpeed."""

from __future__ import annotations

import pytest

from holdfast.adapters.deepspeed import _Files
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
