"""Libraries that are set up once per process are found where they are loaded, and never imported."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import prometheus_client
import pytest

from holdfast.adapters import singletons
from holdfast.core.elastic.rerun import why_not

SET_UP = {
    "torch.distributed.rpc": {"_init_counter": 1},
    "accelerate.state": {"PartialState": SimpleNamespace(_shared_state={"backend": "gloo"})},
    "megatron.core.parallel_state": {"_TENSOR_MODEL_PARALLEL_GROUP": object()},
    "deepspeed.comm.comm": {"cdb": object()},
    "absl.flags": {"FLAGS": SimpleNamespace(is_parsed=lambda: True)},
    "wandb": {"run": object()},
    "ray": {"is_initialized": lambda: True},
}
NOT_SET_UP = {
    "torch.distributed.rpc": {"_init_counter": 0},
    "accelerate.state": {"PartialState": SimpleNamespace(_shared_state={})},
    "megatron.core.parallel_state": {"_TENSOR_MODEL_PARALLEL_GROUP": None},
    "deepspeed.comm.comm": {"cdb": None},
    "absl.flags": {"FLAGS": SimpleNamespace(is_parsed=lambda: False)},
    "wandb": {"run": None},
    "ray": {"is_initialized": lambda: False},
}


def put(monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, object]) -> None:
    module = ModuleType(name)
    vars(module).update(values)
    for known in singletons.KNOWN:
        monkeypatch.delitem(sys.modules, known, raising=False)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", SET_UP)
def test_a_library_that_is_set_up_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By stand-ins with the names that the libraries have."""
    put(monkeypatch, name, SET_UP[name])
    assert singletons.KNOWN[name][0] in why_not(singletons.left())
    put(monkeypatch, name, NOT_SET_UP[name])
    assert why_not(singletons.left()) == ""


def test_a_library_that_is_unlike_what_we_know_is_not_proven_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "wandb", {})
    assert "cannot be asked" in why_not(singletons.left())


def test_metrics_of_the_script_are_told_from_those_of_every_process() -> None:
    assert "metrics of Prometheus" not in why_not(singletons.left())
    mine = prometheus_client.Counter("steps_of_a_test", "how many")
    try:
        assert "metrics of Prometheus" in why_not(singletons.left())
    finally:
        prometheus_client.REGISTRY.unregister(mine)
