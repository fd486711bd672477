"""DeepSpeed's own files, which are pickles, are loaded where that was asked for, and nothing is begun anew in silence.

A stand-in takes the place of DeepSpeed's engine: it saves and loads by the calls that DeepSpeed makes. The package is not needed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters import deepspeed, native_tree
from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached, UsageError
from sample_kit import sampled

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

    def load_universal_checkpoint(self) -> bool:
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
        assert len(names) > 0  # as DeepSpeed does
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


@pytest.mark.parametrize("tag", sampled([None, "global_step7", "best"], "best"))
def test_files_of_deepspeeds_own_are_not_loaded_unasked_and_nothing_begins_anew(
    make: Make, tmp_path: Path, tag: str | None
) -> None:
    own(tmp_path / "job", tag or "global_step7", 7)
    engine = make()
    with pytest.raises(UsageError, match=r"own files were not asked for.*own_files=True"):
        engine.load_checkpoint(str(tmp_path / "job"), tag=tag)
    assert (engine.global_steps, engine.default.loaded) == (0, [])


@pytest.mark.parametrize("tag", sampled([None, "global_step7", "best"], "best"))
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


@pytest.mark.parametrize("asked", sampled([True, False], False))
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


def tagged(engine: Engine, root: Path, *tags: str) -> None:
    """A step for each tag, saved under it; the last is durable."""
    for tag in tags:
        engine.train()
        engine.save_checkpoint(str(root), tag=tag)
    engine.checkpoint_engine.close()


@pytest.mark.parametrize(
    ("tags", "native"),
    sampled(
        product([("last", "last", "last"), ("best", "step3", "epoch 1")], [True, False]),
        (("last", "last", "last"), True),
        (("best", "step3", "epoch 1"), False),
    ),
)
def test_the_newest_save_is_found_by_its_tag_whatever_that_is(
    make: Make, tmp_path: Path, tags: tuple[str, ...], native: bool
) -> None:
    root = tmp_path / "job"
    first = make(native=native)
    first.load_checkpoint(str(root))
    tagged(first, root, *tags)
    again = make(native=native)
    path, _ = again.load_checkpoint(str(root), tag=tags[-1])
    assert path == str(root / tags[-1] / NAME)
    assert (again.global_steps, again.weight.tolist(), again.default.loaded) == (3, [3.0] * 4, [])


def test_what_only_memory_holds_is_found_by_its_tag(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "job"
    first = make(durable_every=100)
    first.load_checkpoint(str(root))
    for _ in range(2):
        first.train()
        first.save_checkpoint(str(root))
    first.checkpoint_engine._checkpointer.flush()
    assert not (root / "holdfast" / "latest").exists(), "nothing is durable"
    again = make()
    again.load_checkpoint(str(root), tag="global_step2")
    assert again.global_steps == 2


@pytest.mark.parametrize(
    ("tag", "own_files"),
    sampled(product(["best", "global_step7"], [True, False]), ("global_step7", False)),
)
def test_a_tag_of_an_older_save_without_files_is_an_error_that_says_so(
    make: Make, tmp_path: Path, tag: str, own_files: bool
) -> None:
    """DeepSpeed itself ends with a bare AssertionError."""
    root = tmp_path / "job"
    first = make(native=False)
    first.load_checkpoint(str(root))
    tagged(first, root, tag, "global_step2")
    engine = make(native=False, own_files=own_files)
    with pytest.raises(UsageError, match=f"neither holdfast nor DeepSpeed has what was saved under the tag '{tag}'"):
        engine.load_checkpoint(str(root), tag=tag)
    assert engine.global_steps == 0
    engine.load_checkpoint(str(root))
    assert engine.global_steps == 2


@pytest.mark.parametrize("save_latest", [True, False])
def test_latest_names_no_files_of_two_saves_where_a_tag_is_used_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_latest: bool
) -> None:
    """What stands at each write: `latest` never beside a file that is about to be replaced, and again behind the last one."""
    root, seen = tmp_path / "job", []
    write = native_tree.durably

    def looks(path: Path, content: Callable[[Any], object]) -> None:
        if path.name == NAME:
            seen.append(((root / "latest").exists(), path.exists()))
        write(path, content)

    monkeypatch.setattr(native_tree, "durably", looks)
    engine = make()
    engine.load_checkpoint(str(root))
    for save in range(3):
        engine.train()
        engine.save_checkpoint(str(root), tag="last", save_latest=save == 0 or save_latest)
    engine.checkpoint_engine.close()
    assert seen == [(False, False)] * 3
    assert (root / "latest").read_text() == "last"
    assert torch.load(root / "last" / NAME, weights_only=True)["steps"] == 3


def test_files_that_cannot_be_taken_away_are_left_and_training_goes_on(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "job"
    engine = make()
    engine.load_checkpoint(str(root))
    (root / "last" / NAME).mkdir(parents=True)  # nothing that can be unlinked
    engine.train()
    engine.save_checkpoint(str(root), tag="last")
    assert "those of an earlier save under the tag 'last' cannot be taken away" in caplog.text
    assert not (root / "latest").exists()
    with pytest.raises(LevelNotReached, match="own files are not complete"):
        engine.checkpoint_engine.close()
    again = make()
    again.load_checkpoint(str(root))
    assert again.global_steps == 1


def test_what_latest_named_at_the_look_is_loaded_though_it_changes_meanwhile(make: Make, tmp_path: Path) -> None:
    """Every rank loads what rank 0 saw: the last write of a job that ends just now may come in between."""
    root = tmp_path / "job"
    own(root, "global_step7", 7)
    engine = make(own_files=True)
    look = engine.checkpoint_engine._latest

    def then_changed() -> str:
        tag = look()
        own(root, "global_step9", 9)
        return str(tag)

    engine.checkpoint_engine._latest = then_changed
    engine.load_checkpoint(str(root))
    assert engine.global_steps == 7
