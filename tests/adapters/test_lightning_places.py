"""A loader that says no place: a Lightning Trainer that is kept with it is told what a restart does, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from holdfast.adapters.lightning.loops import Place


class Placed(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(("kind", "told"), [(DataLoader, 1), (Placed, 0)])
def test_a_loader_without_a_place_is_told_of_once(kind: Any, told: int, caplog: pytest.LogCaptureFixture) -> None:
    place: Any = Place.__new__(Place)
    place._told, place._trainer = False, SimpleNamespace(is_global_zero=True)
    place._fit = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[kind([1, 2])]), _data_fetcher=None)
    place._note()
    place._note()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * told
    assert all("a restart within an epoch begins its data anew" in record.message for record in caplog.records)
