"""DeepSpeed's own files, which are pickles, are loaded where that was asked for, and nothing is begun anew in silence.

A stand-in takes the place of DeepSpeed's engine: it saves and loads by the calls that DeepSpeed makes. The package is not needed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters import deepspeed
from holdfast.base.config import Config
from holdfast.base.errors import UsageError

NAME = "mp_rank_00_model_states.pt"


class Plain:
    """DeepSpeed's default engine of checkpoints, with a count of what it unpickled."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, path: str, map_location: Any = None) -> Any:
        self.loaded.append(str(path))
        return torch.load(path, weights_only=True)


class Engine:
    """As much of DeepSpeed's engine as saves and loads one file of weights."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = Plain()
        self.default = self.checkpoint_engine
        self.save_non_zero_checkpoint, self.save_zero_checkpoint = True, False
        self.has_moe_layers, self.mp_world_size, self.global_steps = False, 1, 0
        self.weight = torch.zeros(4)

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def zero_optimization(self) -> bool:
        return False

    def zero_optimization_stage(self) -> int:
        return 0

    def _get_ckpt_name(self, directory: str, tag: str) -> str:
        return str(Path(directory, tag, NAME))

    def _get_all_ckpt_names(self, directory: str, tag: str) -> list[str]:
        return [str(path) for path in Path(directory, tag).glob("*model_states.pt")]

    def train(self) -> None:
        self.weight += 1
        self.global_steps += 1

    def save_checkpoint(self, save_dir: str, tag: str | None = None, save_latest: bool = True) -> bool:
        tag = tag or f"global_step{self.global_steps}"
        self.checkpoint_engine.create(SimpleNamespace(tag=tag, save_dir=save_dir))
        self.checkpoint_engine.makedirs(str(Path(save_dir, tag)), exist_ok=True)
        self.checkpoint_engine.save(
            {"module": {"w": self.weight}, "steps": self.global_steps}, Path(save_dir, tag, NAME)
        )
        return bool(self.checkpoint_engine.commit(None))

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        if tag is None:
            if not Path(load_dir, "latest").is_file():
                return None, {}
            tag = Path(load_dir, "latest").read_text().strip()
        names = self._get_all_ckpt_names(load_dir, tag)
        if not names:
            return None, {}
        state = self.checkpoint_engine.load(names[0])
        self.weight, self.global_steps = state["module"]["w"].clone(), state["steps"]
        return names[0], {}


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines of one job, one process after the other, which save below `tmp_path / "job"`."""
    monkeypatch.setattr(deepspeed, "_classes", dict)
    config = Config(runtime_dir=str(runtime_dir), linger_s=1.0)
    made: list[Engine] = []

    def engine(**options: Any) -> Engine:
        for before in made:
            before.checkpoint_engine._checkpointer.abandon()
        one = Engine()
        made.append(one)
        one.checkpoint_engine = deepspeed.checkpoint_engine(one, tmp_path / "job", config=config, **options)
        return one

    yield engine
    for one in made:
        one.checkpoint_engine._checkpointer.abandon()


def trained(engine: Engine, root: Path, steps: int) -> None:
    """So many steps with a save behind each, the last of them durable, with DeepSpeed's own files."""
    for _ in range(steps):
        engine.train()
        engine.save_checkpoint(str(root))
    engine.checkpoint_engine.close()


def own(root: Path, tag: str, steps: int) -> None:
    """Files as DeepSpeed without holdfast leaves them."""
    (root / tag).mkdir(parents=True)
    torch.save({"module": {"w": torch.full((4,), float(steps))}, "steps": steps}, root / tag / NAME)
    (root / "latest").write_text(tag)


def test_a_first_start_finds_nothing_and_a_restart_the_version(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "job"
    first = make()
    assert first.load_checkpoint(str(root)) == (None, {})
    trained(first, root, 2)
    again = make()
    again.load_checkpoint(str(root))
    assert (again.global_steps, again.weight.tolist(), again.default.loaded) == (2, [2.0] * 4, [])


@pytest.mark.parametrize("tag", [None, "global_step7", "best"])
def test_files_of_deepspeeds_own_are_not_loaded_unasked_and_nothing_begins_anew(
    make: Make, tmp_path: Path, tag: str | None
) -> None:
    own(tmp_path / "job", tag or "global_step7", 7)
    engine = make()
    with pytest.raises(UsageError, match=r"own files were not asked for.*own_files=True"):
        engine.load_checkpoint(str(tmp_path / "job"), tag=tag)
    assert (engine.global_steps, engine.default.loaded) == (0, [])


@pytest.mark.parametrize("tag", [None, "global_step7", "best"])
def test_files_of_deepspeeds_own_are_loaded_where_that_is_asked_for(
    make: Make, tmp_path: Path, tag: str | None
) -> None:
    own(tmp_path / "job", tag or "global_step7", 7)
    engine = make(own_files=True)
    engine.load_checkpoint(str(tmp_path / "job"), tag=tag)
    assert (engine.global_steps, len(engine.default.loaded)) == (7, 1)


def test_where_the_versions_are_gone_their_older_files_do_not_take_their_place(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "job"
    first = make()
    first.load_checkpoint(str(root))
    trained(first, root, 2)
    shutil.rmtree(root / "holdfast")
    shutil.rmtree(root / "global_step2")  # `latest` still says that something was there
    with pytest.raises(UsageError, match="holdfast has no version of 'global_step2'"):
        make().load_checkpoint(str(root))


@pytest.mark.parametrize("asked", [True, False])
def test_a_later_step_of_deepspeeds_own_is_taken_or_named(
    make: Make, tmp_path: Path, asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The job was run with holdfast switched off meanwhile, say."""
    root = tmp_path / "job"
    first = make()
    first.load_checkpoint(str(root))
    trained(first, root, 2)
    own(root, "global_step7", 7)
    engine = make(own_files=asked)
    with caplog.at_level(logging.WARNING):
        engine.load_checkpoint(str(root))
    assert engine.global_steps == (7 if asked else 2)
    assert "global_step7" in caplog.text
    assert "later step than holdfast's newest, global_step2" in caplog.text
    assert ("loads the later one" in caplog.text) != asked
    engine.train()
    trained(engine, root, 1)  # it goes on from there
    last = make(own_files=asked)
    last.load_checkpoint(str(root))
    assert last.global_steps == engine.global_steps


def test_another_directory_is_loaded_as_deepspeed_does(make: Make, tmp_path: Path) -> None:
    own(tmp_path / "pretrained", "global_step7", 7)
    engine = make()
    engine.load_checkpoint(str(tmp_path / "pretrained"))
    assert (engine.global_steps, len(engine.default.loaded)) == (7, 1)


def test_a_file_that_appears_behind_the_look_is_not_unpickled(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.load_checkpoint(str(tmp_path / "job"))
    own(tmp_path / "job", "global_step7", 7)
    with pytest.raises(UsageError, match="not asked for"):
        engine.checkpoint_engine.load(str(tmp_path / "job" / "global_step7" / NAME))
    assert engine.default.loaded == []
