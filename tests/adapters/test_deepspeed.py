"""DeepSpeed through the contract of doors: ZeRO 0 to 3 of two ranks on CPU with the real package; bf16 with ZeRO 2."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from doors_kit import HOLDFAST_RUN, SOURCE, TORCHRUN, starter
from holdfast.base.events import Events
from holdfast.testing.contracts.adapter import CHECKS, Door, Task, Workshop
from holdfast.testing.contracts.adapter_processes import Told
from holdfast.tiers.storage.version_store import open_storage

WORKER = Path(__file__).with_name("deepspeed_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.rival("deepspeed"), pytest.mark.timeout(1300)]


WAYS = {
    "zero0": ("--stage", "0", "--width", "128"),  # random numbers of two ranks are 39 kB
    "zero1": ("--stage", "1"),
    "zero2": ("--stage", "2"),
    "zero3": ("--stage", "3"),
    "bf16": ("--stage", "2", "--bf16"),
}


def door(way: str, *words: str, launcher: str = TORCHRUN) -> Door:
    return Door(
        starter(WORKER, *WAYS[way], *words, launcher=launcher, wide="--width 48"),
        steps=6,
        # Two moments and the master copy are each rank's own and outweigh the module, which both hold; without ZeRO
        # both hold everything.
        twins=2 if way == "zero0" else 1,
        other_ranks=1 if way == "zero0" else 0,  # DeepSpeed loads ZeRO's state into the same number of ranks only
        refuses="size mismatch|[Ss]hape|does not fit|must match",
        root=lambda path: path / "holdfast",
        environment={**SOURCE, "DS_ACCELERATOR": "cpu"},
    )


COMPILES = """
import deepspeed
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and deepspeed.ops.__compatible_ops__.get(builder.NAME):
    builder.load()
"""


@pytest.fixture(scope="module", autouse=True)
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed's communication operator, compiled into a directory of these tests before any rank needs it.

    A rank that is cut off while it compiles leaves a lock, for which every later one waits for ever (torch.utils.file_baton). In
    the user's own cache one such lock holds up every run of this user.
    """
    place = str(tmp_path_factory.mktemp("extensions"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", place)
        patch.setenv("DS_ACCELERATOR", "cpu")
        subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILES], check=True, capture_output=True, timeout=840)
        yield


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def workshop(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp(way), timeout_s=400.0) as made:
        yield made


@pytest.fixture(scope="module")
def whole(way: str, workshop: Workshop) -> Told:
    return workshop.reference or workshop.run(door(way), Task(workshop.directory("whole"), 2, 6))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract(check: object, way: str, workshop: Workshop) -> None:
    check(door(way), workshop)  # type: ignore[operator]


def test_what_only_memory_holds_comes_back_without_a_file_of_deepspeeds_own(
    way: str, workshop: Workshop, whole: Told
) -> None:
    """Killed before any of them was written, for all that the next run can see."""
    task = Task(workshop.directory("bare"), 2, 6)
    before = workshop.run(door(way), task, kill_at=3)
    for tag in task.checkpoints.glob("global_step*"):
        shutil.rmtree(tag)
    (task.checkpoints / "latest").unlink(missing_ok=True)
    after = workshop.run(door(way), task)
    last = max(step for _, step in before.steps)  # 3, or more if the kill came late
    assert set(after.starts.values()) <= {last, last + 1}
    assert after.steps.items() <= whole.steps.items()
    assert before.steps.items() <= whole.steps.items()


def test_of_two_ranks_one_is_killed_between_two_batches_of_a_step(way: str, workshop: Workshop) -> None:
    """The launcher starts both again; gradients are accumulated, as users do."""
    accumulating = ("--accumulate", "2")
    whole = workshop.run(door(way, *accumulating), Task(workshop.directory("accumulated"), 2, 6))
    killed = door(way, *accumulating, "--kill", "3", launcher=HOLDFAST_RUN)
    told = workshop.run(killed, Task(workshop.directory("one"), 2, 6))
    assert set(told.starts.values()) == {3}
    assert told.steps == whole.steps
    assert _states(told.output) == _states(whole.output)


@pytest.mark.parametrize("whom", ["one", "all"])
def test_ranks_that_get_sigterm_are_started_again_and_end_undisturbed(
    whom: str, way: str, workshop: Workshop, whole: Told
) -> None:
    """SIGTERM ends a rank at once where the script has no handler: DeepSpeed has none, and holdfast adds none."""
    struck = door(way, "--kill", "3", "--term", whom, launcher=HOLDFAST_RUN)
    told = workshop.run(struck, Task(workshop.directory(f"term, {whom}"), 2, 6))
    assert (workshop.directory(f"term, {whom}") / "killed").exists()
    assert set(told.starts.values()) == {3}
    assert told.steps == whole.steps
    assert _states(told.output) == _states(whole.output)


def test_a_job_that_gets_sigterm_goes_on_from_its_last_save(way: str, workshop: Workshop, whole: Told) -> None:
    root = workshop.directory("term, job")
    first = workshop.run(door(way, "--kill", "3", "--term", "job", launcher=HOLDFAST_RUN), Task(root, 2, 6), fails=True)
    assert (root / "killed").exists()
    assert first.code != 0, "it is not finished"
    told = workshop.run(door(way, launcher=HOLDFAST_RUN), Task(root, 2, 6))
    assert set(told.starts.values()) == {3}
    assert {**first.steps, **told.steps} == whole.steps
    assert _states(told.output) == _states(whole.output)


def test_a_tag_means_its_step_and_so_many_saves_go_to_storage_as_were_asked_for(way: str, workshop: Workshop) -> None:
    """Every third save is durable and has files of DeepSpeed's own; a tag brings back its version, not the newest."""
    root = workshop.directory("tags")
    whole = workshop.run(door(way, "--durable-every", "3"), Task(root, 2, 6))
    versions = open_storage(root / "holdfast", Events()).versions()
    assert [version.step for version in versions] == [2, 5]
    assert sorted(path.name for path in root.glob("global_step*") if any(path.iterdir())) == [
        "global_step3",
        "global_step6",
    ]
    for tag in root.glob("global_step*"):
        shutil.rmtree(tag)  # so that it is holdfast's
    back = workshop.run(door(way, "--tag", "global_step3", "--no-native"), Task(root, 2, 5))
    assert set(back.starts.values()) == {3}
    assert back.steps == {place: told for place, told in whole.steps.items() if 3 <= place[1] < 5}
    assert not [path for tag in root.glob("global_step*") for path in tag.iterdir()]
    assert (root / "latest").read_text() == "global_step6", "left as it was"


def test_a_tag_that_the_script_counts_in_its_own_way_is_no_version_of_that_step(way: str, workshop: Workshop) -> None:
    """Each step has two batches, and the script counts those: "global_step4" is what stood behind the second step."""
    if way != "zero2":
        pytest.skip("one is enough")
    root = workshop.directory("own tags")
    workshop.run(door(way, "--count-by", "2"), Task(root, 2, 5))
    back = workshop.run(door(way, "--count-by", "2", "--tag", "global_step4", "--own-files"), Task(root, 2, 5))
    assert set(back.starts.values()) == {2}


@pytest.mark.parametrize("native", [(), ("--no-native",)], ids=["native", "alone"])
def test_saves_under_one_tag_come_back_by_it(
    native: tuple[str, ...], way: str, workshop: Workshop, request: pytest.FixtureRequest
) -> None:
    """Scripts that keep one checkpoint call it `last`; one rank is killed behind the third save."""
    if way != "zero2":
        pytest.skip("one is enough")
    whole: Told = request.getfixturevalue("whole")
    root = workshop.directory(f"one tag{len(native)}")
    words = ("--tag", "last", "--same-tag", *native)
    told = workshop.run(door(way, *words, "--kill", "3", launcher=HOLDFAST_RUN), Task(root, 2, 6))
    assert (root / "killed").exists()
    assert set(told.starts.values()) == {3}
    assert told.steps == whole.steps
    assert _states(told.output) == _states(whole.output)
    if not native:
        assert (root / "latest").read_text() == "last"
        theirs = workshop.run(door(way, "--native", "--tag", "last"), Task(root, 2, 6, plain=True))
        assert set(theirs.starts.values()) == {6}
        assert _states(theirs.output) == _states(whole.output)


def test_deepspeed_alone_loads_what_latest_names(way: str, workshop: Workshop) -> None:
    """The same state of every rank, by DeepSpeed's own loader from its own files, without holdfast."""
    root = workshop.directory("native")
    ours = workshop.run(door(way), Task(root, 2, 4))
    assert (root / "latest").read_text() == "global_step4"
    theirs = workshop.run(door(way, "--native"), Task(root, 2, 4, plain=True))
    assert set(theirs.starts.values()) == {4}
    assert _states(theirs.output) == _states(ours.output) != {}


def _states(output: str) -> dict[str, str]:
    return dict(re.findall(r"state (\d+) ([0-9a-f]{16})", output))


def test_weights_that_all_ranks_hold_are_stored_once(way: str, workshop: Workshop) -> None:
    root = workshop.directory("native") / "holdfast"
    if not root.is_dir():
        workshop.run(door(way), Task(workshop.directory("native"), 2, 4))
    storage = open_storage(root, Events())
    manifest = storage.manifest(max(storage.versions()))
    shared = {bundle.file for bundle in manifest.bundles if bundle.ref.ranks == (0, 1)}
    assert bool(shared) == (way != "zero3")
    for bundle in manifest.bundles:
        weights = [e for e in storage.bundles.image(manifest.version, bundle).entries if ".module." in e.name]
        assert way == "zero3" or not weights or bundle.file in shared
