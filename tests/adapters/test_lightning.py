"""Lightning with DDP, FSDP2 (ModelParallelStrategy) and the first FSDP (FSDPStrategy) through the contract of doors, with the
real package, on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doors_kit import SOURCE, folds_end_as_in_plain_python, launching, starter, untouched, workshops
from holdfast.adapters.lightning.checkpoint_io import checkpoint_io
from holdfast.base.config import Config
from holdfast.base.errors import VersionNotFound
from holdfast.base.events import Events
from holdfast.checkpoint.state.dataloader import OwnPlace, draws_itself
from holdfast.testing.contracts.adapter import CHECKS, Check, Door, Task, Workshop
from holdfast.tiers.storage.version_store import open_storage

WORKER = Path(__file__).with_name("lightning_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("lightning"), pytest.mark.timeout(600)]


# Batches of the worker's data.
EPOCH = 7
DOORS = {
    "ddp": Door(starter(WORKER, "--way", "ddp"), twins=2),
    "fsdp": Door(starter(WORKER, "--way", "fsdp"), twins=1),
    "flat": Door(starter(WORKER, "--way", "flat"), twins=1),
    # Rank 0 alone is given Lightning's checkpoint.
    "io": Door(starter(WORKER, "--way", "io"), refuses="size mismatch", root=lambda path: path / "holdfast"),
}


workshop = workshops(DOORS)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_the_contract_of_doors(check: Check, workshop: tuple[Door, Workshop]) -> None:
    check(*workshop)


def test_from_the_end_of_an_epoch_the_next_one_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    """The version is exactly between two epochs: shuffling and dropout of the next draw the same numbers."""
    with Workshop(tmp_path) as made:
        undisturbed = made.run(DOORS["ddp"], Task(made.directory("whole"), 2, 2 * EPOCH, plain=True))
        made.run(DOORS["ddp"], Task(made.directory("broken"), 2, EPOCH))
        after = made.run(DOORS["ddp"], Task(made.directory("broken"), 2, 2 * EPOCH))
    assert set(after.starts.values()) == {EPOCH}
    assert after.steps == {place: told for place, told in undisturbed.steps.items() if place[1] >= EPOCH}


def test_a_path_that_fit_is_given_is_that_path_and_lightnings_own_saves_go_on(tmp_path: Path) -> None:
    """holdfast has step 3 then, and nothing of it is mixed in; the new lineage is what the next run goes on with."""
    own = tmp_path / "own"
    saving = Door(starter(WORKER, "--way", "ddp", "--own", str(own)))
    told = Door(starter(WORKER, "--way", "ddp", "--resume", str(own / "step=2.ckpt")))
    with Workshop(tmp_path) as made:
        root = made.directory("both")
        first = made.run(saving, Task(root, 2, 2))
        assert {path.name for path in own.iterdir()} == {"step=2.ckpt"}
        assert set(made.run(DOORS["ddp"], Task(root, 2, 4)).starts.values()) == {2}
        again = made.run(told, Task(root, 2, 5))
        assert sorted(again.steps) == [(rank, step) for rank in (0, 1) for step in (2, 3, 4)]
        assert again.wholes[2] == first.wholes[2]
        last = made.run(DOORS["ddp"], Task(root, 2, 6))
        assert set(last.starts.values()) == {5}


@pytest.mark.parametrize("words", [(), ("--plain",)], ids=["stateful", "plain"])
def test_a_trainer_that_knows_nothing_of_holdfast_is_kept(words: tuple[str, ...], tmp_path: Path) -> None:
    door = Door(untouched(WORKER.with_name("lightning_zero_script.py"), *words), steps=6)
    with Workshop(tmp_path) as made:
        CHECKS["killed_in_the_middle_it_goes_on_bit_for_bit"](door, made)


def test_folds_that_know_nothing_of_holdfast_each_train(tmp_path: Path) -> None:
    folds_end_as_in_plain_python(WORKER.with_name("lightning_folds.py"), tmp_path)


def test_of_several_trainings_with_one_path_the_first_is_kept_and_each_trains_as_ever(tmp_path: Path) -> None:
    """Also when the script is started again. What trains nothing leaves no handler of signals."""
    script, single = WORKER.with_name("lightning_stages.py"), dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    ended = []
    with Workshop(tmp_path):
        for name, disabled in (("alone", "1"), ("kept", ""), ("again", "")):
            variables = {**os.environ, **SOURCE, **single, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "runtime")}
            variables |= {"HOLDFAST_DISABLE": disabled} if disabled else {}
            command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "root"), str(tmp_path / name)]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250, check=False)
            assert done.returncode == 0, done.stderr
            ended.append(json.loads((tmp_path / name).read_text()))
            assert done.stderr.count("has trained before") == (0 if disabled else 2)
    assert ended[0]["let go"]
    assert ended[0] == ended[1] == ended[2]


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (1, 2), (1, 5)])
def test_a_stateful_loader_with_a_generator_of_its_own_keeps_the_order_of_later_epochs(
    workers: int, epoch: int, batch: int
) -> None:
    """Beside the plain Checkpointer. Epochs have six batches; without workers torchdata begins the epoch again for its place."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> tuple[Any, OwnPlace]:
        own = torch.Generator().manual_seed(1)
        loader = StatefulDataLoader(range(12), batch_size=2, shuffle=True, generator=own, num_workers=workers)
        assert draws_itself(loader)
        return loader, OwnPlace(loader)

    loader, place = made()
    rows: list[Any] = []
    state: dict[str, Any] = {}
    for number in range(3):
        for index, rows_of_one in enumerate(loader):
            rows.append(rows_of_one.tolist())
            if (number, index) == (epoch, batch):
                state, had = place.state_dict(), len(rows)
    again, place = made()
    place.load_state_dict(state)
    told: list[Any] = []
    while len(told) < len(rows) - had:
        told += [rows_of_one.tolist() for rows_of_one in again]
    assert told == rows[had:]


def checkpoint(step: int, fill: float) -> dict[str, Any]:
    """As Lightning hands it over: nested, keys that are numbers, tensors, None, an object of torch."""
    return {
        "global_step": step,
        "state_dict": OrderedDict(weight=torch.full((4, 3), fill)),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1}]}],
        "callbacks": {"shape": torch.Size((2, 3)), "none": None, "best": float("inf")},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.fixture
def plugin(tmp_path: Path, runtime_dir: Path) -> Iterator[Any]:
    made = checkpoint_io(tmp_path / "versions", config=Config(runtime_dir=str(runtime_dir), linger_s=1.0))
    yield made
    made.teardown()


def pins(tmp_path: Path) -> set[str]:
    return {str(version) for version in open_storage(tmp_path / "versions", Events()).marks.pins()}


def test_a_checkpoint_of_lightnings_own_comes_back_as_it_was_and_draws_no_number(plugin: Any, tmp_path: Path) -> None:
    path = tmp_path / "epoch=0.ckpt"
    plugin.save_checkpoint(checkpoint(3, 1.5), path)
    assert path.stat().st_size < 200
    assert not zipfile.is_zipfile(path)
    before = torch.get_rng_state()
    torch.rand(1)
    drawn = torch.get_rng_state()
    assert same(plugin.load_checkpoint(path), checkpoint(3, 1.5))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.equal(before, drawn)


def test_a_name_keeps_its_versions_as_long_as_it_stands(plugin: Any, tmp_path: Path) -> None:
    """More names than retention keeps: each is pinned; with the name the pin goes."""
    for step in range(5):
        plugin.save_checkpoint(checkpoint(step, step), tmp_path / f"{step}.ckpt")
        plugin.save_checkpoint(checkpoint(step, -step), tmp_path / "last.ckpt")
    for step in (1, 3):
        plugin.remove_checkpoint(tmp_path / f"{step}.ckpt")
        assert not (tmp_path / f"{step}.ckpt").exists()
    plugin.teardown()
    named = {path.stem: json.loads(path.read_text())["versions"] for path in tmp_path.glob("*.ckpt")}
    assert named.keys() == {"0", "2", "4", "last"}
    assert pins(tmp_path) == {name for names in named.values() for name in names}
    assert len(named["last"]) == 2, "the one before stays until this one is followed by another"
    for name in ("0", "2", "4"):
        assert same(plugin.load_checkpoint(tmp_path / f"{name}.ckpt"), checkpoint(int(name), int(name)))
    assert same(plugin.load_checkpoint(tmp_path / "last.ckpt"), checkpoint(4, -4))


def test_where_only_memory_had_it_the_one_before_of_the_same_name_comes_back(plugin: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    plugin.save_checkpoint(checkpoint(1, 1.0), path)
    plugin.teardown()
    (held,) = json.loads(path.read_text())["versions"]
    lost = {"holdfast": str(tmp_path / "versions"), "versions": ["i000009-s0000000009", held]}
    path.write_text(json.dumps(lost))
    assert same(plugin.load_checkpoint(path), checkpoint(1, 1.0))
    path.write_text(json.dumps({**lost, "versions": lost["versions"][:1]}))
    with pytest.raises(VersionNotFound, match="neither in memory nor in storage"):
        plugin.load_checkpoint(path)


def test_files_of_lightnings_own_are_loaded_and_switched_off_they_are_written(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.ckpt"
    monkeypatch.setenv("HOLDFAST_DISABLE", "1")
    plugin.save_checkpoint(checkpoint(2, 2.0), path)
    assert zipfile.is_zipfile(path)
    monkeypatch.delenv("HOLDFAST_DISABLE")
    assert same(plugin.load_checkpoint(path, weights_only=False), checkpoint(2, 2.0))
    plugin.remove_checkpoint(path)
    assert not path.exists()
    assert not (tmp_path / "versions").exists()


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_find_unused_parameters_true"])
def test_a_gan_of_one_process_trains_under_the_launcher_as_in_plain_python(tmp_path: Path, strategy: str) -> None:
    """Lightning makes no DDP of one process by itself; where the script asks for it, it stops in plain python too."""
    script, ends = str(WORKER.with_name("lightning_gan.py")), []
    environment = {**os.environ, **SOURCE, "OMP_NUM_THREADS": "1", "HOLDFAST_RUNTIME_DIR": str(tmp_path / "rt")}
    for number, start in enumerate(([sys.executable], [*launching(1), "--max-restarts", "0"])):
        facts = tmp_path / str(number)
        done = subprocess.run(
            [*start, script, str(facts), strategy],
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert facts.exists() == (done.returncode == 0), done.stderr
        ends.append(json.loads(facts.read_text()) if facts.exists() else "parameters that were not used" in done.stderr)
    assert ends[0] == ends[1]
    kind = {"auto": "SingleDeviceStrategy", "ddp_find_unused_parameters_true": "DDPStrategy"}.get(strategy)
    assert ends[0] is True if kind is None else ends[0]["strategy"] == kind
