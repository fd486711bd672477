"""Everything a user, a disk or a stranger can do wrong: one clear error, soon, with the remedy; and nothing is lost.

Each test makes a checkpoint directory with a good version in it (or none), does something bad, and asks the library
and the commands. What must hold each time: the class and code of the error, the place that it names, a remedy, that it
came at once, and that what was good before is restored afterwards.

Garbage on the keeper's socket: tests/keeper/test_spawn.py. Hostile images, manifests and values one by one, in time and
memory: tests/tiers/test_image.py, test_manifest.py, test_values.py. Failing system calls: tests/tiers/*_faults.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import forked
import holdfast
from holdfast.base.errors import (
    ConfigError,
    CorruptError,
    ForeignDirectory,
    HoldfastError,
    InUse,
    LevelNotReached,
    MemoryRefused,
    MismatchError,
    NewerFormat,
    StorageError,
    StorageFull,
    UsageError,
)
from holdfast.base.events import Events
from holdfast.cli.stored import versions
from holdfast.core.model import Version
from holdfast.tiers.format import image as image_format
from holdfast.tiers.storage.incarnations import make_stamp
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.run_lock import RunLock
from holdfast.tiers.storage.version_store import open_storage
from keepers_kit import wait_ended
from kit.hostile_images import HOSTILE
from kit.manifest_edits import rewrite
from sample_kit import MORE, sampled
from tiers.faults import damage, mounted

# "Within a second", and as much again for a machine that does other things.
SOON_S = 6.0  # within a second on a quiet machine
GOOD, BAD = Version(1, 0), Version(1, 1)
CONFIG = ("memory_budget", "require_memory", "close_timeout_s", "strict", "run_id", "linger_s")

Make = Callable[..., holdfast.Checkpointer]


def network(*, layers: int = 2, width: int = 16) -> nn.Sequential:
    torch.manual_seed(layers * 1000 + width)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def content(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.fixture
def make(tmp_path: Path, runtime_dir: Path) -> Iterator[Make]:
    """Builds checkpointers; what is still open at the end leaves without a save, and its keeper ends."""
    made: list[holdfast.Checkpointer] = []

    def build(path: Path | str | None = None, model: nn.Module | None = None, **options: Any) -> holdfast.Checkpointer:
        given: dict[str, Any] = {name: options.pop(name) for name in CONFIG if name in options}
        settings: dict[str, Any] = {
            "every": "0",
            "durable_every": "0",
            "linger_s": 1.0,
            "close_timeout_s": 20.0,
            **given,
        }
        config = holdfast.Config(runtime_dir=str(runtime_dir), **settings)
        model = network() if model is None else model
        made.append(holdfast.Checkpointer(path or tmp_path / "job", model=model, config=config, **options))
        return made[-1]

    yield build
    for checkpointer in made:
        leave(checkpointer)


def leave(checkpointer: holdfast.Checkpointer) -> None:
    checkpointer.__exit__(RuntimeError, None, None)


def end_keeper(checkpointer: holdfast.Checkpointer) -> None:
    """Nothing stays in memory: what comes back now comes from storage."""
    keeper = psutil.Process(checkpointer.keeper_status()["pid"])
    leave(checkpointer)
    keeper.kill()
    assert not wait_ended([keeper])


@dataclass
class Problem:
    """What was raised."""

    error: HoldfastError | None = None


@contextmanager
def refused(
    kind: type[HoldfastError], *, code: str, place: object, remedy: str, soon: float = SOON_S
) -> Iterator[Problem]:
    """The block raises exactly this class, at once, naming the place and what to do."""
    problem = Problem()
    started = time.monotonic()
    with pytest.raises(HoldfastError) as caught:
        yield problem
    took = time.monotonic() - started
    problem.error = caught.value
    assert type(caught.value) is kind, caught.value
    assert caught.value.code == code
    assert str(place) in f"{caught.value.where} {caught.value.what}"
    assert remedy in caught.value.remedy
    assert took < soon, f"the answer took {took:.2f} s"


@pytest.fixture(scope="module")
def sample(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, dict[Version, list[torch.Tensor]]]]:
    """A directory with two durable versions, and what they hold."""
    root = tmp_path_factory.mktemp("sample") / "job"
    runtime = Path(os.environ["HOLDFAST_RUNTIME_DIR"]).with_name("bad")
    config = holdfast.Config(runtime_dir=str(runtime), every="0", durable_every="0", linger_s=1.0)
    model, states = network(), {}
    with holdfast.Checkpointer(root, model=model, config=config) as checkpointer:
        checkpointer.restore()
        for version in (GOOD, BAD):
            with torch.no_grad():
                model[0].weight.add_(1.0)
            states[version] = content(model)
            checkpointer.save(version.step, level="durable").wait()
    return root, states


@pytest.fixture
def job(sample: tuple[Path, dict[Version, list[torch.Tensor]]], tmp_path: Path) -> Path:
    """A copy of the sample that may be spoiled."""
    return Path(shutil.copytree(sample[0], tmp_path / "job"))


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# --- where it may not go


def test_paths_that_cannot_be_checkpoint_directories(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    file.write_text("dear diary")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "away")
    for path in (file, file / "below", tmp_path / "nowhere"):
        with refused(StorageError, code="HF200", place=path, remedy="another path"):
            make(path).restore()
    for text in ("", "ftp://host/run"):
        with refused(ConfigError, code="HF101", place=text, remedy="give a directory, a file:// URL"):
            holdfast.Checkpointer(text, model=network())
    assert file.read_text() == "dear diary"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nowhere", "thesis.tex"]


def test_missing_parents_are_made(make: Make, tmp_path: Path) -> None:
    checkpointer = make(f"file://{tmp_path}/a/b/c")
    assert checkpointer.restore() == 0
    assert (tmp_path / "a/b/c/holdfast.json").exists()


def test_a_directory_that_may_not_be_written(make: Make, tmp_path: Path, job: Path) -> None:
    with ExitStack() as stack:
        if os.geteuid():
            empty = tmp_path / "empty"
            for place in (tmp_path / "empty", job):
                place.mkdir(exist_ok=True)
                place.chmod(0o555)
                stack.callback(place.chmod, 0o755)
        else:
            empty = stack.enter_context(mounted(tmp_path / "empty", "-t", "tmpfs", "-o", "ro", "none"))
            stack.enter_context(mounted(job, "--bind", str(job)))
            subprocess.run(["mount", "-o", "remount,bind,ro", str(job)], check=True, timeout=30)
        for place in (empty, empty / "deeper", job):
            with refused(StorageError, code="HF200", place=place, remedy="writ"):
                make(place).restore()
        assert versions.verify_versions(str(job), None, as_json=False) == 0, "looking needs no right to write"
    checkpointer = make(job)
    assert checkpointer.restore() == BAD.step + 1


@pytest.mark.parametrize("names", [["thesis.tex"], ["i000001-s0000000001/model.safetensors"], ["run.lock"]])
def test_a_directory_of_someone_elses_files(make: Make, tmp_path: Path, names: list[str], capsys: Any) -> None:
    root = tmp_path / "home"
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"mine")
    before = tree(root)
    with refused(ForeignDirectory, code="HF202", place=root, remedy="empty or a new directory") as problem:
        make(root).restore()
    assert names[0].split("/")[0] in str(problem.error)
    for command in (
        versions.list_versions,
        partial_version(versions.inspect_version),
        partial_version(versions.verify_versions),
    ):
        with refused(ForeignDirectory, code="HF202", place=root, remedy="empty or a new directory"):
            command(str(root), as_json=True)
    assert tree(root) == before
    assert sorted(path.name for path in root.iterdir()) == [names[0].split("/")[0]]


def partial_version(command: Callable[..., int]) -> Callable[..., int]:
    return lambda root, *, as_json: command(root, None, as_json=as_json)


# --- what happens while it trains


@pytest.mark.root
def test_a_full_disk_costs_the_durable_level_until_there_is_space_again(make: Make, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none") as disk:
        model = network(width=512)  # 2 MiB
        checkpointer = make(disk / "job", model, close_timeout_s=60.0)
        checkpointer.restore()
        checkpointer.save(0, level="durable").wait()
        ballast = disk / "ballast"
        fill_up(ballast)
        with torch.no_grad():
            model[0].weight.add_(1.0)

        handle = checkpointer.save(1, level="durable")
        assert handle.wait("captured", 60) >= holdfast.Level.CAPTURED
        with pytest.raises(LevelNotReached, match="no space is left") as caught:
            handle.wait("durable", 1.0)
        assert caught.value.code == "HF700"
        assert handle.reached is holdfast.Level.CAPTURED
        (alarm,) = checkpointer.keeper_status()["alarms"]
        assert "free space" in alarm["text"]
        assert str(handle.version) in alarm["text"]
        assert open_storage(disk / "job", Events()).versions() == [GOOD], "nothing half visible"
        assert versions.verify_versions(str(disk / "job"), None, as_json=False) == 0, "the good version is still good"
        late = checkpointer.save(2, level="durable")
        assert late.wait("captured", 60) >= holdfast.Level.CAPTURED, "memory levels go on"
        with pytest.raises(LevelNotReached, match="no space is left"):
            late.wait("durable", 1.0)
        with refused(StorageFull, code="HF201", place=disk / "other", remedy="free space"):
            make(disk / "other").restore()

        ballast.unlink()
        assert late.wait("durable", 40) == holdfast.Level.DURABLE, "it is written again from memory"
        assert checkpointer.save(3, level="durable").wait() == holdfast.Level.DURABLE
        assert checkpointer.keeper_status()["alarms"] == []
        checkpointer.close()
        storage = open_storage(disk / "job", Events())
        assert storage.versions()[-2:] == [Version(1, 2), Version(1, 3)]
        assert versions.verify_versions(str(disk / "job"), None, as_json=False) == 0
        assert list((disk / "job" / ".tmp").iterdir()) == []
        other = network(width=512)
        assert make(disk / "job", other).restore() == 4
        assert equal(content(other), content(model))


@pytest.mark.root
@pytest.mark.parametrize("memory_budget", sampled(["", "1MB"], ""))
def test_what_an_earlier_start_left_half_written_does_not_keep_a_disk_full(
    memory_budget: str, make: Make, tmp_path: Path
) -> None:
    """Only a commit removed it, and for want of its space none came. With a level in memory, and without."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none") as disk:
        model, root = network(width=512), disk / "job"  # 2 MiB
        first = make(root, model, linger_s=1.0)
        first.restore()
        first.save(0, level="durable").wait()
        first.close()
        for step in (5, 6):
            half = root / str(Version(1, step))
            shutil.copytree(root / str(GOOD), half)
            (half / "manifest.json").unlink()
        again = make(root, network(width=512), memory_budget=memory_budget, close_timeout_s=60.0)
        assert again.restore() == 1
        with (disk / "ballast").open("wb") as ballast:  # a MiB is left
            ballast.write(bytes(1 << 20))
        handle = again.save(1, level="durable")
        if memory_budget:  # the save itself was given up
            handle = again.save(2, level="durable")
        assert handle.wait("durable", 40) == holdfast.Level.DURABLE
        assert open_storage(root, Events()).unfinished() == []
        assert open_storage(root, Events()).versions() == [GOOD, handle.version]
        again.close()


@MORE
@pytest.mark.root
def test_a_restart_on_a_full_disk_comes_back_from_memory(make: Make, tmp_path: Path) -> None:
    """Neither the number of the incarnation nor what it resumed from can be written; both are, before it commits."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none") as disk:
        model, root = network(width=512), disk / "job"  # 2 MiB
        first = make(root, model)
        first.restore()
        first.save(0, level="durable").wait()
        with torch.no_grad():
            model[0].weight.add_(1.0)
        first.save(1).wait("captured", 60)
        newest = content(model)
        ballast = disk / "ballast"
        fill_up(ballast)
        first.abandon()

        for step, incarnation in ((1, 2), (2, 3)):  # the second one knows of the first by the keeper alone
            other = network(width=512)
            again = make(root, other, close_timeout_s=60.0)
            assert again.restore() == step + 1
            assert equal(content(other), newest)
            handle = again.save(step + 1, level="durable")
            assert handle.wait("captured", 60) >= holdfast.Level.CAPTURED
            assert handle.version == Version(incarnation, step + 1)
            with pytest.raises(LevelNotReached, match="no space is left"):
                handle.wait("durable", 0.5)
            if incarnation == 2:
                again.abandon()
        storage = open_storage(root, Events())
        assert storage.incarnations.highest() == 1
        assert storage.versions() == [GOOD]

        ballast.unlink()
        assert handle.wait("durable", 40) == holdfast.Level.DURABLE
        assert storage.incarnations.highest() == 3
        assert storage.incarnations.lineage() == {1: None, 2: Version(1, 1), 3: Version(2, 2)}
        again.close()
        assert make(root, network(width=512)).restore() == 4


def fill_up(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))


@MORE
def test_a_directory_that_is_deleted_while_it_trains(make: Make, tmp_path: Path) -> None:
    model = network()
    checkpointer = make(model=model, close_timeout_s=1.5, linger_s=30.0)
    checkpointer.restore()
    checkpointer.save(0, level="durable").wait()
    shutil.rmtree(tmp_path / "job")

    for step in (1, 2):
        handle = checkpointer.save(step, level="durable")
        assert handle.wait("captured", 60) >= holdfast.Level.CAPTURED
    pid = checkpointer.keeper_status()["pid"]
    assert any("vanished" in alarm["text"] for alarm in wait_for_alarms(checkpointer))
    with pytest.raises(LevelNotReached) as caught:
        checkpointer.close()
    assert str(handle.version) in caught.value.what
    assert "not durable" in caught.value.what
    assert "the checkpoint directory has vanished" in caught.value.what
    assert not (tmp_path / "job").exists()

    # And the user starts again, before the keeper of the old job has ended.
    again = make(model=network(), linger_s=30.0)
    assert again.restore() == 0, "nothing of the old job is left"
    assert again.keeper_status()["pid"] == pid
    again.save(0, level="durable").wait()
    again.close()
    assert open_storage(tmp_path / "job", Events()).versions() == [Version(1, 0)]


def wait_for_alarms(checkpointer: holdfast.Checkpointer) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 10
    while not (alarms := checkpointer.keeper_status()["alarms"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return list(alarms)


def test_too_little_memory_is_told_before_training_with_numbers(make: Make, tmp_path: Path) -> None:
    with refused(MemoryRefused, code="HF400", place="rank 0", remedy="MEMORY_BUDGET", soon=2 * SOON_S) as problem:
        make(model=network(width=512), memory_budget="1MiB", require_memory=True).restore()
    needed = re.search(r"needs (\d+) bytes; of 1048576 allowed", str(problem.error))
    assert needed is not None
    assert int(needed[1]) > 2 * 2 * 512 * 512 * 4
    assert f"to {needed[1]} bytes or more" in str(problem.error)
    assert open_storage(tmp_path / "job", Events()).versions() == []


FIRST_JOB = """
import sys, torch, holdfast
torch.manual_seed(2016)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
checkpointer = holdfast.Checkpointer(sys.argv[1], model=model, every=0, durable_every=0)
checkpointer.restore()
print("trains", flush=True)
sys.stdin.readline()
print(checkpointer.save(5, level="durable").wait().name, flush=True)
checkpointer.close()
"""


@MORE
def test_a_second_job_on_the_same_path(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "job"
    command = [sys.executable, "-c", FIRST_JOB, str(root)]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        try:
            assert first.stdout.readline() == "trains\n"
            monkeypatch.setattr(RunLock, "take", partialmethod(RunLock.take, timeout_s=0.2))
            for run_id in ("default", "other"):
                with refused(InUse, code="HF600", place=root / "run.lock", remedy="another path") as problem:
                    make(root, run_id=run_id).restore()
                assert f"process {first.pid} on {os.uname().nodename}, run 'default'" in str(problem.error)
            registered = sorted(path.name for path in (root / "incarnations").iterdir())
            assert registered == ["000001.json", "000001.resumed.json"], "the first job is not fenced"
            first.stdin.write("go on\n")
            first.stdin.flush()
            assert first.stdout.readline() == "DURABLE\n"
            assert first.wait(30) == 0
        finally:
            first.kill()
    assert make(root).restore() == 6, "it is let in when the first has left"


# --- what is not what was saved


def spoil(job: Path, which: str, how: str) -> Path:
    """Damages a file of the newer version; returns it."""
    (file,) = (job / str(BAD)).glob(which)
    if how == "of another version":
        (other,) = (job / str(GOOD)).glob(which)
        shutil.copyfile(other, file)
    else:
        damage(file, how)
    return file


@pytest.mark.parametrize(
    ("which", "how"),
    sampled(
        [
            ("*.safetensors", "truncated"),
            ("*.safetensors", "extended"),
            ("*.safetensors", "zeroed"),
            ("*.safetensors", "swapped"),
            ("*.safetensors", "of another version"),
            ("*.safetensors", "removed"),
            ("manifest.json", "truncated"),
            ("manifest.json", "zeroed"),
            ("manifest.json", "of another version"),
            ("manifest-0.json", "extended"),
            ("manifest-0.json", "swapped"),
            ("manifest-0.json", "removed"),
        ],
        ("*.safetensors", "swapped"),
        ("manifest.json", "truncated"),
        ("manifest-0.json", "removed"),
    ),
)
def test_a_damaged_version_is_named_and_the_one_before_it_is_used(
    make: Make, job: Path, sample: Any, which: str, how: str, capsys: Any
) -> None:
    file = spoil(job, which, how)
    before = tree(job)
    place = str(file.parent)

    started = time.monotonic()
    assert versions.verify_versions(str(job), None, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert [v["version"] for v in found["versions"] if v["state"] == "damaged"] == [str(BAD)]
    (problem,) = [problem for v in found["versions"] for problem in v["problems"]]
    assert problem["code"] == "HF300"
    assert problem["where"].startswith(place)
    assert problem["remedy"]
    assert versions.list_versions(str(job), as_json=True) == (1 if which.startswith("manifest") else 0)
    capsys.readouterr()
    with suppress(CorruptError):  # it looks at headers, which may still be right
        versions.inspect_version(str(job), None, as_json=True)
    assert time.monotonic() - started < SOON_S

    model = network()
    checkpointer = make(job, model)
    assert checkpointer.restore() == GOOD.step + 1
    assert equal(content(model), sample[1][GOOD])
    report = checkpointer.last_restore
    assert report is not None
    assert str(BAD) in f"{report.reason} {report.refused}"
    assert {name: data for name, data in tree(job).items() if name in before and "run.lock" not in name} == {
        name: data for name, data in before.items() if "run.lock" not in name
    }
    end_keeper(checkpointer)
    with refused(CorruptError, code="HF300", place=BAD, remedy="", soon=2 * SOON_S):
        make(job, model).restore(BAD)


def write_hostile(job: Path, image: bytes) -> Version:
    """A version whose image is nonsense and whose manifest and digests are right: somebody wrote it on purpose."""
    storage = open_storage(job, Events())
    version, stamp = Version(1, 9), make_stamp(1)
    good = storage.manifest(BAD)
    refs = [file.ref for file in good.bundles]
    files = []
    for number, ref in enumerate(refs):
        data = image if number == 0 else (job / str(BAD) / good.bundles[number].file).read_bytes()
        seal = image_format.seal(ref.bundle_id, memoryview(data))
        claim = replace(ref, num_bytes=min(ref.num_bytes, len(data)))
        files.append(storage.bundles.write(version, claim, seal, memoryview(data), stamp=stamp))
    name, length, digest = storage.write_part(version, 0, files, stamp=stamp)
    storage.commit(
        Manifest(version, good.job_id, good.world_size, good.layout, None, {name: (length, digest)}), stamp=stamp
    )
    return version


@pytest.mark.parametrize(
    "case",
    sampled(
        ["header of 2^63", "a million names", "overlap", "bundle named as a path", "deep JSON", "offset of 400 bits"],
        "header of 2^63",
        "overlap",
        "bundle named as a path",
    ),
)
def test_a_hostile_file_with_a_right_digest_is_refused_all_the_same(
    make: Make, job: Path, sample: Any, case: str, capsys: Any
) -> None:
    version = write_hostile(job, HOSTILE[case])
    with refused(CorruptError, code="HF300", place=version, remedy="holdfast verify", soon=2 * SOON_S):
        versions.inspect_version(str(job), None, as_json=True)
    started = time.monotonic()
    assert versions.verify_versions(str(job), str(version), as_json=True) == 1
    assert time.monotonic() - started < 2 * SOON_S
    (problem,) = json.loads(capsys.readouterr().out)["versions"][0]["problems"]
    assert str(version) in problem["where"]
    model = network()
    checkpointer = make(job, model)
    started = time.monotonic()
    assert checkpointer.restore() == BAD.step + 1
    assert time.monotonic() - started < 3 * SOON_S
    assert equal(content(model), sample[1][BAD])
    assert checkpointer.last_restore is not None
    assert str(version) in " ".join(checkpointer.last_restore.refused)


@pytest.mark.parametrize(
    ("old", "new"),
    sampled(
        [
            ('"manifest-0.json"', '"../manifest-0.json"'),
            ('"length":', '"length":-'),
            ('"world_size":1', '"world_size":0'),
        ],
        ('"manifest-0.json"', '"../manifest-0.json"'),
        ('"length":', '"length":-'),
    ),
)
def test_a_hostile_manifest_is_refused(make: Make, job: Path, old: str, new: str) -> None:
    rewrite(job / str(BAD) / "manifest.json", old, new)
    with refused(CorruptError, code="HF300", place=BAD, remedy=""):
        versions.inspect_version(str(job), str(BAD), as_json=True)
    checkpointer = make(job)
    assert checkpointer.restore() == GOOD.step + 1


def test_a_newer_format_is_named_as_such(make: Make, job: Path, capsys: Any) -> None:
    for version in (GOOD, BAD):
        rewrite(job / str(version) / "manifest.json", '"format_version":1', '"format_version":4')
    before = tree(job)
    with refused(NewerFormat, code="HF301", place=BAD, remedy="upgrade holdfast", soon=2 * SOON_S) as problem:
        make(job).restore()
    assert "format 4" in str(problem.error)
    with refused(NewerFormat, code="HF301", place=BAD, remedy="upgrade holdfast"):
        versions.inspect_version(str(job), None, as_json=True)
    assert versions.list_versions(str(job), as_json=True) == 1
    assert versions.verify_versions(str(job), None, as_json=True) == 1
    assert capsys.readouterr().out.count('"HF301"') == 4
    after = tree(job)
    assert {name: after[name] for name in before if "run.lock" not in name} == {
        name: data for name, data in before.items() if "run.lock" not in name
    }


def test_a_newer_or_damaged_record_of_the_job_is_never_a_fresh_start(make: Make, job: Path) -> None:
    record = job / "holdfast.json"
    good = record.read_bytes()
    rewrite(record, '"format_version":1', '"format_version":7')
    with refused(NewerFormat, code="HF301", place=record, remedy="upgrade"):
        make(job).restore()
    for how in ("truncated", "zeroed", "empty"):
        record.write_bytes(good)
        damage(record, how)
        with refused(CorruptError, code="HF300", place=record, remedy="put holdfast.json back"):
            make(job).restore()
    record.write_bytes(good)
    damage(job / "incarnations" / "000001.resumed.json", "flipped")
    with refused(CorruptError, code="HF300", place="000001.resumed.json", remedy=""):
        make(job).restore()


# --- another model


def test_another_models_checkpoint_is_refused_by_name_and_changes_nothing(make: Make, job: Path) -> None:
    for model, name in (
        (network(layers=3), "model.2.weight"),
        (network(layers=1), "model.1.weight"),
        (network(width=8), "model.0.weight"),
    ):
        before = content(model)
        with refused(MismatchError, code="HF102", place=name, remedy="strict=False", soon=2 * SOON_S):
            make(job, model).restore()
        assert equal(content(model), before)


@dataclass(frozen=True)
class Misfit:
    """Another model, and what a restore that is not strict has to say about it."""

    model: nn.Module
    not_loaded: set[str]
    not_used: set[str]
    misfit: set[str]


def misfits() -> dict[str, Misfit]:
    second = {"model.1.weight", "model.1.bias"}
    wider = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    return {
        "an extra layer": Misfit(network(layers=3), {"model.2.weight", "model.2.bias"}, set(), set()),
        "a missing layer": Misfit(network(layers=1), set(), second, set()),
        "another shape": Misfit(wider, set(), set(), second),
    }


@pytest.mark.parametrize(
    ("by", "case"),
    sampled(
        product(["argument", "setting"], misfits()),
        ("setting", "an extra layer"),
        ("argument", "another shape"),
    ),
)
def test_without_strict_what_fits_is_loaded_and_the_rest_is_told(
    make: Make, job: Path, sample: Any, caplog: pytest.LogCaptureFixture, case: str, by: str
) -> None:
    wanted = misfits()[case]
    model = wanted.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if by == "argument":
        checkpointer = make(job, model)
        assert checkpointer.restore(strict=False) == BAD.step + 1
    else:
        checkpointer = make(job, model, strict=False)
        with pytest.raises(MismatchError):
            make(job, model, strict=False).restore(strict=True)
        assert checkpointer.restore() == BAD.step + 1
    report = checkpointer.last_restore
    assert report is not None
    assert set(report.not_loaded) == wanted.not_loaded
    assert set(report.not_used) == wanted.not_used
    assert {text.split(" ")[0] for text in report.misfit} == wanted.misfit
    (line,) = [record.getMessage() for record in caplog.records if "strict is off" in record.getMessage()]
    assert all(name in line for name in wanted.not_loaded | wanted.not_used | wanted.misfit)
    assert torch.equal(model[0].weight, sample[1][BAD][0]), "what fits is loaded"
    for name in wanted.not_loaded | {text.split(" ")[0] for text in report.misfit}:
        name = name.removeprefix("model.")
        assert torch.equal(model.state_dict()[name], before[name]), "what does not fit stays as it was"
    assert checkpointer.save(5, level="durable").wait() == holdfast.Level.DURABLE


def test_a_tensor_that_stock_readers_do_not_know_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    scales = torch.ones(4).to(torch.float8_e8m0fnu)
    with refused(UsageError, code="HF100", place="scales.block", remedy="view(torch.uint8)", soon=2 * SOON_S):
        make(scales={"block": scales}).restore()
    checkpointer = make(scales={"block": scales.view(torch.uint8)})
    assert checkpointer.restore() == 0
