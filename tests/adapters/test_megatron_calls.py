"""The calls that Megatron Core makes of its strategies, in both forms, with a stand-in for the package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Told:
    """Megatron's own strategies, which note what they are told."""

    def __init__(self, *_: Any) -> None:
        self.told: list[tuple[Any, ...]] = []


class Till016(Told):
    """As in 0.16.1: two arguments."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> str:
        self.told.append((sharded_state_dict, checkpoint_dir))
        return "request"

    load = async_save


class From017(Told):
    """As in 0.17.1: one more, by its place from `save` and `load`, by its name from the strategy's own `save`."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> str:
        self.told.append((sharded_state_dict, checkpoint_dir, async_strategy))
        return "request"

    load = async_save


class Own:
    """holdfast's part of the job, which holds no iteration."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, _: Any, iteration: int) -> None:
        self.saved.append(iteration)

    def load(self, *_: Any) -> bool:
        return False


@pytest.fixture(params=[Till016, From017])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    core = "megatron.core.dist_checkpointing"
    modules = {
        name: ModuleType(name)
        for name in (
            "megatron",
            "megatron.core",
            core,
            f"{core}.mapping",
            f"{core}.strategies",
            f"{core}.strategies.torch",
        )
    }
    vars(modules[f"{core}.mapping"]).update(
        ShardedTensor=type("ShardedTensor", (), {}), ShardedObject=type("O", (), {})
    )
    own = request.param
    vars(modules[f"{core}.strategies.torch"]).update(TorchDistSaveShardedStrategy=own, TorchDistLoadShardedStrategy=own)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "holdfast.adapters.megatron", raising=False)
    yield importlib.import_module("holdfast.adapters.megatron")
    sys.modules.pop("holdfast.adapters.megatron", None)


def test_each_call_reaches_megatrons_own_strategy_as_it_was_made(
    adapter: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = tmp_path / "iter_0000010"
    later = issubclass(adapter.TorchDistSaveShardedStrategy, From017)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {})]
    if later:
        calls += [(("mcore",), {}), ((), {"async_strategy": "mcore"})]
    for more, named in calls:
        told = ({}, place, *(["mcore"] if more or named else ["nvrx"] if later else []))
        own = Own()
        saving, loading = adapter.SaveStrategy(own), adapter.LoadStrategy(own)
        assert saving.async_save({}, str(place), *more, **named) == "request"
        assert own.saved == [10]
        assert saving.told == [told]
        assert loading.load({}, str(place), *more, **named) == "request"
        assert loading.told == [told]
    with pytest.raises(TypeError, match="other"):
        adapter.LoadStrategy(Own()).load({}, place, other=1)
