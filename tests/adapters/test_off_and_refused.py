"""HOLDFAST_DISABLE=1 leaves everything as it was; and what a door refuses before it touches its framework, with stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.adapters import deepspeed, huggingface
from holdfast.adapters.zero_lines.launcher import ScriptLauncher
from holdfast.adapters.zero_lines.script_text import HOOK
from holdfast.base.errors import UsageError
from holdfast.checkpoint.liveness import open_checkpointers
from holdfast.core.model import Level
from holdfast.elastic.worker.agent_channel import RunOrder


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DISABLE", "1")


@pytest.mark.usefixtures("off")
def test_a_checkpointer_restores_nothing_saves_nothing_and_starts_no_keeper(tmp_path: Path, runtime_dir: Path) -> None:
    model = torch.nn.Linear(2, 2)
    told: list[Any] = []
    checkpointer = holdfast.Checkpointer(tmp_path / "job", model=model, on_durable=lambda *of: told.append(of))
    assert checkpointer.off
    assert checkpointer.restore() == 0
    assert checkpointer.last_restore is not None
    assert "HOLDFAST_DISABLE is set" in checkpointer.last_restore.reason
    assert checkpointer.step(0) is None
    handle = checkpointer.save(1, "durable")
    assert handle.given_up
    assert handle.reached < Level.CAPTURED
    checkpointer.flush()
    checkpointer.close()
    assert not list(tmp_path.iterdir())
    assert not list(runtime_dir.iterdir())
    assert not told


SCRIPT = f"""
import sys
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("hook", {HOOK!r} in globals())
"""


def run_unasked(tmp_path: Path) -> None:
    open_checkpointers.abandon_all()  # what earlier tests left open is not the script's
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ScriptLauncher(str(tmp_path / "root"))(RunOrder(1, arguments=(str(script),)))


def test_a_script_that_can_be_kept_is_changed_before_it_runs(
    tmp_path: Path, runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So that the next test shows something."""
    run_unasked(tmp_path)
    told = capfd.readouterr()
    assert "hook True" in told.out
    assert "this script is kept" in told.err


@pytest.mark.usefixtures("off")
def test_switched_off_no_script_is_looked_at_changed_or_kept(
    tmp_path: Path, runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_unasked(tmp_path)
    told = capfd.readouterr()
    assert "hook False" in told.out
    assert "holdfast" not in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert not list(runtime_dir.iterdir())


def trainer(**more: Any) -> Any:
    """As much of a `transformers.Trainer` as `keep` looks at."""
    parts = dict.fromkeys(huggingface._NEEDED)
    return SimpleNamespace(**{**parts, **more})


def engine(**more: Any) -> Any:
    """As much of a DeepSpeed engine."""
    return SimpleNamespace(
        **{
            "has_moe_layers": False,
            "zero_nvme_offload_optimizer": lambda: False,
            "checkpoint_engine": "its own",
            **more,
        }
    )


@pytest.mark.usefixtures("off")
def test_switched_off_a_trainer_and_an_engine_keep_what_they_have(tmp_path: Path) -> None:
    given = trainer()
    before = dict(vars(given))
    assert huggingface.keep(given, tmp_path / "root") is given
    assert type(given) is SimpleNamespace
    assert vars(given) == before
    assert deepspeed.checkpoint_engine(engine(has_moe_layers=True), tmp_path / "root") == "its own"
    assert deepspeed.checkpoint_engine(engine(), tmp_path / "root", native=False) == "its own"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [{"has_moe_layers": True}, {"zero_nvme_offload_optimizer": lambda: True}])
def test_what_deepspeed_writes_past_its_engine_is_refused(what: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MoE layers and of NVMe offload"):
        deepspeed.checkpoint_engine(engine(**what), tmp_path)


def test_a_trainer_that_trains_with_deepspeed_has_another_door(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="DeepSpeed"):
        huggingface.keep(trainer(is_deepspeed_enabled=True), tmp_path)
    with pytest.raises(UsageError, match=r"no transformers\.Trainer"):
        huggingface.keep(object(), tmp_path)
    old = trainer()
    del old._init_training_state
    with pytest.raises(UsageError, match="of release 5: it has no _init_training_state"):
        huggingface.keep(old, tmp_path)


def accelerator(kind: str = "NO", models: tuple[Any, ...] = ()) -> Any:
    """As much of an `accelerate.Accelerator` as `wrap` looks at before it builds anything."""
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), _models=list(models))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_an_accelerator_that_trains_with_another_framework_has_another_door(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=kind):
        huggingface.wrap(accelerator(kind, (torch.nn.Linear(1, 1),)), tmp_path)


def test_an_accelerator_that_has_prepared_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has prepared no model"):
        huggingface.wrap(accelerator(), tmp_path)
