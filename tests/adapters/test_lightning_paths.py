"""Which goes first at a restart: the path that `fit` is given, or a version of holdfast. Nothing of Lightning is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapters import lightning
from holdfast.core.model import Version


@pytest.mark.parametrize(
    ("steps", "told", "is_ours", "is_taken"),
    [
        (12, 10, True, True),
        (10, 10, True, True),
        (9, 10, True, True),  # the step of the kill: Lightning's own was written, ours was not whole
        (8, 10, True, True),
        (7, 10, True, False),
        (12, 10, False, False),
        (10, 10, False, False),
        (9, 10, False, False),
    ],
)
def test_a_version_of_the_same_launch_goes_before_a_path_that_is_hardly_newer(
    steps: int, told: int, is_ours: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = Version(incarnation=1, step=steps - 1)
    monkeypatch.setattr(lightning, "newest", lambda *_: (version, "this" if is_ours else "another"))
    monkeypatch.setattr(lightning.settings, "is_restart", lambda: True)
    monkeypatch.setattr(lightning.settings, "launch", lambda: "this")
    connector = SimpleNamespace(_loaded_checkpoint={"global_step": told})
    keeping: Any = lightning.Keeping("root", {})
    later = keeping._later_than(SimpleNamespace(_checkpoint_connector=connector), "last.ckpt")
    assert later == (version if is_taken else None)
    assert connector._loaded_checkpoint == ({} if is_taken else {"global_step": told})
