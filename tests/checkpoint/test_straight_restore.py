"""What one rank alone wants of a version that lies in storage only goes straight into its tensors, although a keeper runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.base.errors import CorruptError, StorageBusy
from holdfast.checkpoint.checkpointer import checkpointer as door
from holdfast.checkpoint.job import slot_reservation
from holdfast.checkpoint.restore import storage_source
from holdfast.core.model import Level, Version
from holdfast.keeper.rpc.client import KeeperClient
from holdfast.testing.faults.rig import start_hurtable
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage import read_limit
from holdfast.tiers.storage.version_store import Storage
from kit.checkpointers import Make, Trainee, kill_keeper, leave
from sample_kit import MORE, sampled

STEPS = 3


class Model(Trainee):
    """A model whose fresh objects have the layout that was saved, so that bundles are read whole."""

    def objects(self) -> dict[str, object]:
        return {"model": self.model}

    def fingerprint(self) -> bytes:
        return b"".join(tensor.numpy().tobytes() for tensor in self.model.state_dict().values())


def trained(make: Make, steps: int = STEPS) -> Trainee:
    """A job that made each step durable and is over with its keeper: no memory holds anything of it."""
    trainee = Model()
    checkpointer = make(trainee)
    for step in range(checkpointer.restore(), steps):
        trainee.train()
        checkpointer.save(step, "durable").wait()
    kill_keeper(checkpointer)
    leave(checkpointer)
    return trainee


def restored(checkpointer: holdfast.Checkpointer) -> set[str]:
    assert checkpointer.last_restore is not None
    return set(checkpointer.last_restore.bytes)


def test_no_memory_holds_what_was_read_before_the_next_save(make: Make) -> None:
    before = trained(make).fingerprint()
    trainee = Model()
    checkpointer = make(trainee)
    assert checkpointer.restore() == STEPS
    assert trainee.fingerprint() == before
    assert restored(checkpointer) == {"storage"}
    assert checkpointer.last_restore is not None
    assert "no other rank wants them" in checkpointer.last_restore.why

    status = checkpointer.keeper_status()
    told = status["ranks"]["0"]
    assert told["restored"] == {"version": str(Version(1, STEPS - 1)), "bytes": dict(checkpointer.last_restore.bytes)}
    assert status["counters"].get("storage_read_bytes", 0) == 0, "the keeper read nothing of it"
    assert all(slot["state"] in ("unpopulated", "empty") for slot in told["slots"])

    trainee.train()
    checkpointer.save(STEPS).wait("captured", 60)
    saved = trainee.fingerprint()
    leave(checkpointer)
    trainee = Model()
    following = make(trainee)
    assert following.restore() == STEPS + 1
    assert trainee.fingerprint() == saved
    assert restored(following) == {"slot"}, "the next save brought it into memory"


def test_a_damaged_file_is_refused_as_ever_and_the_version_before_is_taken(make: Make, tmp_path: Path) -> None:
    trained(make)
    (file,) = (tmp_path / "job" / str(Version(1, STEPS - 1))).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    checkpointer = make(Model())
    assert checkpointer.restore() == STEPS - 1
    assert checkpointer.last_restore is not None
    assert checkpointer.last_restore.version == Version(1, STEPS - 2)
    assert "differs from its seal" in " ".join(checkpointer.last_restore.refused)


def test_with_every_copy_damaged_it_is_an_error(make: Make, tmp_path: Path) -> None:
    trained(make, steps=1)
    (file,) = (tmp_path / "job" / str(Version(1, 0))).glob("*.safetensors")
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CorruptError, match="none can be used"):
        make(Model()).restore()


def test_no_rank_reads_the_manifest_again_for_the_names_of_its_files(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(make)
    monkeypatch.setattr(storage_source.Storage, "manifest", _once(storage_source.Storage.manifest))
    assert make(Model()).restore() == STEPS


def _once(real: object) -> object:
    """Reads each manifest once, as rank 0 does to decide."""
    seen: set[Version] = set()

    def manifest(self: object, version: Version) -> object:
        assert version not in seen
        seen.add(version)
        return real(self, version)  # type: ignore[operator]

    return manifest


@MORE
def test_training_goes_on_before_memory_is_made_and_the_first_save_waits_for_it(
    make: Make, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(make)
    control = tmp_path / "hurt"
    control.write_text("stall@pages")
    config = holdfast.Config(runtime_dir=str(runtime_dir), linger_s=60.0)
    keeper = start_hurtable(str(tmp_path / "job"), config, control)
    monkeypatch.setattr(door, "SLOTS_S", 600.0)  # a restore that waited so long would be no restore
    try:
        trainee = Model()
        checkpointer = make(trainee, begin_timeout_s=0.01)
        assert checkpointer.restore() == STEPS
        trainee.train()
        control.write_text("")
        for step in (STEPS, STEPS + 1):  # one slot each
            assert checkpointer.save(step).wait("captured", 60) >= Level.CAPTURED
    finally:
        control.write_text("")
        keeper.terminate()
        keeper.wait(30)


@pytest.mark.parametrize(
    ("num_cores", "put_off"), sampled([(2, True), (7, True), (8, False), (192, False)], (7, True), (8, False))
)
def test_on_few_cores_memory_is_made_after_the_restore(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_cores: int, put_off: bool
) -> None:
    trained(make, steps=1)
    asked: list[bool] = []
    real = KeeperClient.prepare

    def prepare(self: KeeperClient, *args: int, **options: bool) -> object:
        asked.append(options.get("put_off", False))
        return real(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(slot_reservation, "usable_cores", lambda: num_cores)
    monkeypatch.setattr(KeeperClient, "prepare", prepare)
    checkpointer = make(Model())
    checkpointer.restore()
    assert asked[0] is put_off
    assert checkpointer.save(1).wait("captured", 60) >= Level.CAPTURED


def ends_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patch: tuple[type, str, Any], goes_on: threading.Event
) -> None:
    """A restore with a method that hangs until `goes_on` raises, and the next one, without it, has the version."""
    with monkeypatch.context() as patched:
        patched.setattr(*patch)
        checkpointer = make(Model(), close_timeout_s=0.3)
        with pytest.raises(StorageBusy, match="nothing was read for") as caught:
            checkpointer.restore()
    assert str(tmp_path / "job") in str(caught.value)
    leave(checkpointer)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "holdfast reading":
            thread.join(60)
    assert make(Model()).restore() == STEPS, "nothing is held against the version"


def test_a_disk_that_hangs_ends_the_restore_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained(make)
    goes_on, real = threading.Event(), LocalBackend.read_into

    def hang(self: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        assert goes_on.wait(120)
        return real(self, name, view, offset=offset)

    monkeypatch.setattr(read_limit, "SLOWEST_BYTES_PER_S", 1 << 40)
    ends_by_name(make, monkeypatch, tmp_path, (LocalBackend, "read_into", hang), goes_on)


@MORE
@pytest.mark.parametrize("what", sampled(["named", "manifest"], "manifest"))
def test_a_disk_that_hangs_before_a_version_is_chosen_ends_the_restore_by_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Rank 0 lists versions and reads their manifests; all ranks wait for it."""
    trained(make)
    goes_on, real = threading.Event(), getattr(Storage, what)

    def hang(self: Storage, *args: Any) -> Any:
        assert goes_on.wait(20)
        return real(self, *args)

    ends_by_name(make, monkeypatch, tmp_path, (Storage, what, hang), goes_on)
