"""Megatron Core through the contract of doors: two ranks on CPU with the real package and its distributed optimizer."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from doors_kit import HOLDFAST_RUN, SOURCE, TORCHRUN, starter
from holdfast.base.events import Events
from holdfast.testing.contracts.adapter import CHECKS, Door, Task, Workshop
from holdfast.testing.contracts.adapter_processes import Told
from holdfast.tiers.storage.version_store import open_storage

WORKER = Path(__file__).with_name("megatron_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("megatron"), pytest.mark.timeout(900)]


# Context parallelism with an attention of the worker: that of Megatron is Transformer Engine's, which needs a GPU.
WAYS = {
    "dp2": (),
    "tp2": ("--tp", "2"),
    "pp2": ("--pp", "2"),
    "cp2": ("--cp", "2"),
    "ep2": ("--ep", "2"),
    "async": ("--async-save",),
}


def door(way: str, *words: str, launcher: str = TORCHRUN) -> Door:
    return Door(
        starter(WORKER, *WAYS[way], *words, launcher=launcher, wide="--width 48"),
        steps=6,
        # The parts of the distributed optimizer are each rank's own and outweigh the model.
        twins=1,
        refuses="does not match|mismatch|[Ss]hape|size",
        root=lambda path: path / "holdfast",
        environment=SOURCE,
    )


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def workshop(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp(way), timeout_s=300.0) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(way: str, workshop: Workshop) -> Told:
    return workshop.run(door(way), Task(workshop.directory("whole"), 2, 6))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check: object, way: str, workshop: Workshop) -> None:
    check(door(way), workshop)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")  # what Megatron does when it is imported
def test_only_the_iteration_and_the_layout_that_are_held_are_loaded(tmp_path: Path, runtime_dir: Path) -> None:
    """One rank, without training: all else is Megatron's own to load."""
    megatron = importlib.import_module("holdfast.adapters.megatron")
    kind = importlib.import_module("megatron.core.dist_checkpointing.mapping").ShardedTensor

    def parts(data: torch.Tensor, name: str = "w") -> dict[str, Any]:
        return dict(megatron._parts([{name: kind.from_rank_offsets(name, data)}]))

    own = megatron.Own(tmp_path, None)
    for iteration in (3, 4):
        own.save(parts(torch.full((8,), float(iteration))), iteration)
    own._checkpointer.flush()
    blank = parts(torch.zeros(8))
    (name,) = blank
    for iteration in (4, 3):
        assert own.load(blank, iteration)
        assert torch.equal(own.of(name), torch.full((8,), float(iteration)))
    assert not own.load(blank, 9), "nobody saved it"
    for other in (parts(torch.zeros(4)), parts(torch.zeros(8).half()), blank | parts(torch.zeros(8), "v")):
        assert not own.load(other, 4)
    own.close()


@pytest.mark.parametrize(("moment", "starts"), [("gradients", {3}), ("save", {3}), ("saved", {3, 4})])
def test_of_two_ranks_one_is_killed(
    moment: str, starts: set[int], way: str, workshop: Workshop, undisturbed: Told
) -> None:
    """Behind its gradients, where the other waits to save, or before the tracker names what both have saved.

    The launcher starts both again. What the tracker names counts, though holdfast may hold more.
    """
    dying = door(way, "--kill", "3", "--moment", moment, launcher=HOLDFAST_RUN)
    told = workshop.run(dying, Task(workshop.directory(f"one, {moment}"), 2, 6))
    assert set(told.starts.values()) <= starts
    assert (workshop.directory(f"one, {moment}") / "killed").exists()
    # A step that the tracker names at the kill is told by nobody: it is made no second time.
    assert (
        undisturbed.steps.items() >= told.steps.items() >= {((rank, 5), undisturbed.steps[rank, 5]) for rank in (0, 1)}
    )
    assert _states(told.output) == _states(undisturbed.output) != {}


@pytest.mark.parametrize(("whom", "moment", "starts"), [("one", "gradients", {3}), ("all", "save", {3})])
def test_ranks_that_get_sigterm_are_started_again_and_end_undisturbed(
    whom: str, moment: str, starts: set[int], way: str, workshop: Workshop, undisturbed: Told
) -> None:
    """SIGTERM ends a rank at once where the script has no handler: Megatron Core has none, and holdfast adds none."""
    root = workshop.directory(f"term, {whom}")
    struck = door(way, "--kill", "3", "--moment", moment, "--term", whom, launcher=HOLDFAST_RUN)
    told = workshop.run(struck, Task(root, 2, 6))
    assert (root / "killed").exists()
    assert set(told.starts.values()) == starts
    assert told.steps == undisturbed.steps
    assert _states(told.output) == _states(undisturbed.output) != {}


def test_a_job_that_gets_sigterm_goes_on_from_its_last_save(way: str, workshop: Workshop, undisturbed: Told) -> None:
    """Behind the save of a step that the tracker does not name yet: the next launch makes this step again."""
    root = workshop.directory("term, job")
    struck = door(way, "--kill", "3", "--moment", "saved", "--term", "job", launcher=HOLDFAST_RUN)
    first = workshop.run(struck, Task(root, 2, 6), fails=True)
    assert (root / "killed").exists()
    assert first.code != 0, "it is not finished"
    told = workshop.run(door(way, launcher=HOLDFAST_RUN), Task(root, 2, 6))
    assert set(told.starts.values()) == {3}
    assert {**first.steps, **told.steps} == undisturbed.steps
    assert _states(told.output) == _states(undisturbed.output) != {}


def test_a_load_comes_from_holdfast_and_without_it_from_the_same_tree(way: str, workshop: Workshop) -> None:
    """The native loader reads what the tracker names; the state of every rank is the same bit for bit."""
    root = workshop.directory("native")
    ours = workshop.run(door(way), Task(root, 2, 3))
    if way in ("dp2", "cp2", "async"):
        assert twice(root / "holdfast") >= 0.2
    again = workshop.run(door(way), Task(root, 2, 3))
    assert re.findall(r"from \d (.*)", again.output) == ['"holdfast"', '"holdfast"']
    shutil.rmtree(root / "holdfast")
    theirs = workshop.run(door(way, "--native"), Task(root, 2, 3, plain=True))
    assert set(theirs.starts.values()) == {3}
    assert _states(theirs.output) == _states(again.output) == _states(ours.output) != {}


def twice(root: Path) -> float:
    """What part of the newest version's bytes two ranks hold alike.

    Each rank has all weights, and half of the distributed optimizer's three numbers for each of them: a quarter is alike.
    """
    storage = open_storage(root, Events())
    bundles = storage.manifest(max(storage.versions())).bundles
    alike = sum(bundle.length for bundle in bundles if len(bundle.ref.ranks) == 2)
    return alike / sum(bundle.length for bundle in bundles)


def _states(output: str) -> dict[str, str]:
    return dict(re.findall(r"state (\d+) ([0-9a-f]{16})", output))
