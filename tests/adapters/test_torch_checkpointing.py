"""torch_checkpointing through the contract of doors: DDP and FSDP2 of two ranks on CPU, with the real package."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doors_kit import HOLDFAST_RUN, SOURCE, TORCHRUN, starter, warm
from holdfast.base.config import Config
from holdfast.base.errors import LevelNotReached, UsageError
from holdfast.testing.contracts.adapter import CHECKS, Door, Task, Workshop
from holdfast.testing.contracts.adapter_processes import Told

WORKER = Path(__file__).with_name("torch_checkpointing_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("torch_checkpointing"), pytest.mark.timeout(600)]

WAYS = {
    "ddp-sync": (),
    "fsdp-async": ("--fsdp", "--async-save"),
    # Without random numbers of each rank another number of ranks may go on.
    "fsdp-resharded": ("--fsdp", "--no-random"),
}


def door(way: str, *words: str, launcher: str = TORCHRUN) -> Door:
    return Door(
        starter(WORKER, *WAYS[way], *words, launcher=launcher),
        steps=6,
        twins=2 if way.startswith("ddp") else 1,
        other_ranks=1 if "--no-random" in WAYS[way] else 0,
        refuses="must match the size",
        root=lambda path: path / "holdfast",
        environment=SOURCE,
    )


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def workshop(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp(way), popen=warm, timeout_s=200.0) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(way: str, workshop: Workshop) -> Told:
    return workshop.run(door(way), Task(workshop.directory("whole"), 2, 6))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check: Any, way: str, workshop: Workshop) -> None:
    check(door(way), workshop)


@pytest.mark.parametrize(("moment", "starts"), [("gradients", {3}), ("save", {3}), ("saved", {3, 4})])
def test_of_two_ranks_one_is_killed(
    moment: str, starts: set[int], way: str, workshop: Workshop, undisturbed: Told
) -> None:
    """Behind its gradients, before its save and behind it; the launcher starts both again."""
    root = workshop.directory(f"one, {moment}")
    told = workshop.run(door(way, "--kill", "3", "--moment", moment, launcher=HOLDFAST_RUN), Task(root, 2, 6))
    assert (root / "killed").exists()
    assert set(told.starts.values()) <= {0, *starts}  # 0: of the first life
    assert undisturbed.steps.items() >= told.steps.items()
    assert {(rank, 5) for rank in (0, 1)} <= told.steps.keys()
    assert _states(told.output) == _states(undisturbed.output) != {}


def test_a_load_comes_from_holdfast_and_without_it_from_the_same_tree(way: str, workshop: Workshop) -> None:
    """The library alone reads what it wrote; the state of every rank is the same bit for bit."""
    root = workshop.directory("native")
    ours = workshop.run(door(way), Task(root, 2, 3))
    again = workshop.run(door(way), Task(root, 2, 3))
    assert re.findall(r"from \d (.*)", again.output) == [f'"{root}/step_3"'] * 2
    shutil.rmtree(root / "holdfast")
    theirs = workshop.run(door(way), Task(root, 2, 3, plain=True))
    assert set(theirs.starts.values()) == {3}
    assert _states(theirs.output) == _states(again.output) == _states(ours.output) != {}


def _states(output: str) -> dict[str, str]:
    return dict(re.findall(r"state (\d+) ([0-9a-f]{16})", output))


class Kit:
    """One rank in this process: managers of one root, which save synchronously."""

    def __init__(self, root: Path, runtime_dir: Path) -> None:
        self.hf: Any = importlib.import_module("holdfast.adapters.torch_checkpointing")
        self.library: Any = importlib.import_module("torch_checkpointing")
        self.storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig(
            use_direct_io=False  # which ext4 refuses
        )
        self.root = root
        self.config = Config(runtime_dir=str(runtime_dir), linger_s=1.0)
        self.made: list[Any] = []

    def settings(self) -> Any:
        config = self.library.CheckpointManager.Config.with_sync_save()
        config.storage_config = self.storage
        return config

    def manager(self) -> Any:
        self.made.append(self.hf.manager(self.root, self.settings(), config=self.config))
        return self.made[-1]

    def alone(self) -> Any:
        """The library's own manager."""
        self.made.append(self.library.CheckpointManager(self.settings()))
        return self.made[-1]

    def saved(self, *steps: int, **more: Any) -> Any:
        """A manager that has saved these steps: a tensor that tells which, and what else is given."""
        manager = self.manager()
        for step in steps:
            manager.save(f"{self.root}/step_{step}", {"model": {"w": torch.full((8,), float(step))}, **more})
        manager._held._checkpointer.flush()
        return manager


@pytest.fixture
def kit(tmp_path: Path, runtime_dir: Path) -> Iterator[Kit]:
    made = Kit(tmp_path / "run", runtime_dir)
    yield made
    for manager in made.made:
        manager.close()


def blank(size: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"model": {"w": torch.zeros(size, dtype=dtype)}}


def test_what_is_held_is_loaded_as_the_library_would(kit: Kit) -> None:
    """Into the tensors that are given, or new ones; the newest version and one before it; containers of the same kinds."""
    more = {"loop": {"seen": [1, (2, 3.5)], "name": b"x", 7: None}, "mixed": torch.arange(6.0).reshape(2, 3).t()}
    manager = kit.saved(3, 4, **more)
    for step in (4, 3):
        into = {**blank(), "loop": None, "mixed": None}
        target = into["model"]["w"]
        found = manager.load(f"{kit.root}/step_{step}", into)
        assert manager.holdfast_loaded == f"{kit.root}/step_{step}"
        assert found["model"]["w"] is target
        assert torch.equal(target, torch.full((8,), float(step)))
        assert found["loop"] == more["loop"]
        assert torch.equal(found["mixed"], more["mixed"])
        plain = kit.alone().load(f"{kit.root}/step_{step}", {**blank(), "loop": None, "mixed": None})
        assert plain["loop"] == found["loop"]


def test_what_is_not_held_as_it_is_asked_for_is_the_librarys_to_load(kit: Kit) -> None:
    manager = kit.saved(3, 4)
    checkpoint = f"{kit.root}/step_4"
    with pytest.raises(FileNotFoundError):
        manager.load(checkpoint, {**blank(), "other": None})
    with pytest.raises(RuntimeError, match="must match the size"):
        manager.load(checkpoint, blank(4))
    half = manager.load(checkpoint, blank(dtype=torch.float16))
    assert manager.holdfast_loaded == ""
    assert half["model"]["w"].tolist() == [4.0] * 8, "the library converts"
    with pytest.raises(FileNotFoundError):
        manager.load(f"{kit.root}/step_9", blank())


def test_what_a_load_does_not_take_leaves_random_numbers_and_the_versions_as_they_were(kit: Kit) -> None:
    manager = kit.saved(3, 4)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    manager.load(f"{kit.root}/step_4", blank(dtype=torch.float16))
    assert torch.equal(torch.get_rng_state(), before)
    manager.close()
    assert kit.hf.newest(kit.root, config=kit.config) == f"{kit.root}/step_4"


def test_the_later_of_what_is_held_and_what_the_script_found_is_the_newest(kit: Kit) -> None:
    assert kit.hf.newest(kit.root, config=kit.config) is None
    assert kit.hf.newest(kit.root, f"{kit.root}/step_2", config=kit.config) == f"{kit.root}/step_2"
    kit.saved(9, 10).close()
    for found, newest in ((None, 10), (9, 10), (11, 11)):
        given = found and f"{kit.root}/step_{found}"
        assert kit.hf.newest(kit.root, given, config=kit.config) == f"{kit.root}/step_{newest}"


def test_a_strict_load_refuses_what_was_not_saved(kit: Kit) -> None:
    manager = kit.saved(3)
    into = {"model": {"w": torch.zeros(8), "v": torch.zeros(2)}}
    with pytest.raises(RuntimeError, match="missing keys"):
        manager.load(f"{kit.root}/step_3", into, strict=True)
    found = manager.load(f"{kit.root}/step_3", into)
    assert found["model"]["w"].tolist() == [3.0] * 8


def test_a_checkpoint_elsewhere_is_the_librarys_alone(kit: Kit, tmp_path: Path) -> None:
    manager = kit.manager()
    manager.save(f"{tmp_path}/elsewhere/final", blank())
    assert kit.hf.newest(kit.root, config=kit.config) is None
    assert manager.load(f"{tmp_path}/elsewhere/final", blank())["model"]["w"].tolist() == [0.0] * 8
    assert manager.holdfast_loaded == ""


def test_bad_input_is_refused_with_a_remedy(kit: Kit) -> None:
    manager = kit.manager()
    with pytest.raises(UsageError, match="end the directory's name with it"):
        manager.save(f"{kit.root}/final", blank())
    with pytest.raises(UsageError, match="model"):
        kit.hf.manager(kit.root, replicated="model")


def test_what_cannot_be_a_value_gives_that_version_up_and_the_librarys_files_stand(kit: Kit) -> None:
    manager = kit.saved(1)
    manager.save(f"{kit.root}/step_2", {**blank(), "kind": TORCHRUN.join, "pair": {1, 2}})
    with pytest.raises(LevelNotReached, match=r"items\.kind"):
        manager.close()
    assert kit.hf.newest(kit.root, config=kit.config) == f"{kit.root}/step_1"
    assert kit.alone().load(f"{kit.root}/step_2", {"pair": None})["pair"] == {1, 2}


def test_switched_off_it_is_the_librarys_own_manager(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DISABLE", "1")
    assert type(kit.manager()) is kit.library.CheckpointManager
    assert kit.hf.newest(kit.root) is None
    assert kit.hf.newest(kit.root, Path("run/step_3")) == "run/step_3"
