"""MindSpore finds holdfast under the interface that it calls with AITURBO=1."""

from __future__ import annotations

import binascii
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.adapters.aiturbo.engine import CheckpointShmManager, Ckpt, Front
from holdfast.base.errors import MismatchError, StorageError
from holdfast.base.events import Events
from holdfast.testing.contracts.adapter import CHECKS, Door, Task, Workshop
from holdfast.tiers.storage.version_store import open_storage

WORKER = Path(__file__).with_name("aiturbo_worker.py")
RANK = Path(__file__).with_name("aiturbo_rank.py")
SOURCE = Path(__file__).parents[2] / "src"
FRONT = SOURCE / "holdfast/adapters/aiturbo/front"


def door() -> Door:
    path = os.pathsep.join([str(SOURCE), str(FRONT), os.environ.get("PYTHONPATH", "")])

    def start(task: Task) -> list[str]:
        width = ["--width", "48"] if task.changed else []
        switch = "AITURBO=0" if task.plain else "AITURBO=1"
        command = ["env", switch, sys.executable, str(WORKER), str(task.checkpoints), "--steps", str(task.steps)]
        return [*command, *width]

    return Door(
        start,
        ranks=1,
        steps=6,
        refuses="load_param_into_net",
        root=lambda path: path / "holdfast",
        environment={"PYTHONPATH": path, "GLOG_v": "3"},
    )


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with Workshop(tmp_path_factory.mktemp("mindspore")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.rival("mindspore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_contract_with_the_real_mindspore(check: object, workshop: Workshop) -> None:
    check(door(), workshop)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.rival("mindspore")
@pytest.mark.timeout(300)
def test_mindspore_counts_and_removes_names_and_makes_no_file_of_its_own(workshop: Workshop) -> None:
    root = workshop.directory("names")
    workshop.run(door(), Task(root, 1, 6))
    names = sorted(path.name for path in root.glob("*.ckpt"))
    assert names == ["m0-1_5.ckpt", "m0-1_6.ckpt"]  # keep_checkpoint_max=2
    newest = json.loads((root / names[-1]).read_text())["holdfast"]
    assert newest == str(max(open_storage(root / "holdfast", Events()).versions()))


# --- the interface itself, without MindSpore ----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ranks(root: Path, runtime_dir: Path, *words: str) -> list[dict[str, str]]:
    """Runs two ranks of aiturbo_rank.py; what each says."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{FRONT}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HOLDFAST_RUNTIME_DIR": str(runtime_dir),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(root), str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = []
    try:
        for process in started:
            out, err = process.communicate(timeout=90)
            assert process.returncode == 0, err
            told.append(json.loads(out))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("dedup", [True, False], ids=["dedup", "redundant"])
def test_two_ranks_store_shared_slices_once_and_get_their_own_back(
    dedup: bool, tmp_path: Path, runtime_dir: Path
) -> None:
    told = ranks(tmp_path, runtime_dir, "save", "dedup" if dedup else "redundant")
    assert [one["note"] for one in told] == ["of rank 0", "of rank 1"]
    assert told[0]["shared"] == told[1]["shared"]
    assert told[0]["own"] != told[1]["own"]
    storage = open_storage(tmp_path / "holdfast", Events())
    manifest = storage.manifest(max(storage.versions()))
    where = [
        (entry.name.rpartition("/")[2], bundle.ref.ranks)
        for bundle in manifest.bundles
        for entry in storage.bundles.image(manifest.version, bundle).entries
        if "shared" in entry.name
    ]
    if dedup:
        assert [group for _, group in where] == [(0, 1)]
    else:
        assert sorted(group for _, group in where) == [(0,), (1,)]
    # Another pair of processes, from the same keepers or from storage.
    assert ranks(tmp_path, runtime_dir, "load", "-") == told


def test_every_kind_of_array_comes_back_as_it_was() -> None:
    saved = Ckpt()
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(3, dtype=np.int64),
        "flags": np.array([True, False]),
        "u32": np.array([1, 2**31], dtype=np.uint32),
        "text": np.array("epoch 3"),
    }
    saved.entries = {name: [array, binascii.crc32(array.tobytes())] for name, array in arrays.items()}
    back = Ckpt()
    back.load_state_dict(saved.state_dict())
    for name, array in arrays.items():
        found, crc = back.entries[name]
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert np.array_equal(found, array)
        assert crc == binascii.crc32(found.tobytes())


def test_an_interval_keeps_the_oldest_name_of_its_minutes_and_leaves_older_ones(tmp_path: Path) -> None:
    now = 10_000.0
    for name, age_s in (("m-1_1.ckpt", 700), ("m-1_2.ckpt", 500), ("m-1_3.ckpt", 400), ("m-1_4.ckpt", 10)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    manager = CheckpointShmManager()
    manager.update_ckpoint_filelist(str(tmp_path), "m")
    manager.keep_one_ckpoint_per_minutes(10, now)
    assert [Path(path).name for path in manager.ckpoint_filelist] == ["m-1_1.ckpt", "m-1_2.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-1_1.ckpt", "m-1_2.ckpt"]


@pytest.fixture
def front(tmp_path: Path, runtime_dir: Path) -> Iterator[Front]:
    made = Front(tmp_path / "ckpts", 0, 1)
    made.root.mkdir(exist_ok=True)
    yield made
    made.close()


def test_a_load_is_of_the_name_that_was_asked_for_with_the_crc_that_was(front: Front) -> None:
    """One rank, without MindSpore: two checkpoints, each found by its name; the CRC is that of the bytes."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step, name in ((3, "m-1_3.ckpt"), (4, "m-1_4.ckpt")):
        front.save(name, step, {"w": [array + step]})
    old = front.load("m-1_3.ckpt", crc_check=True)
    assert np.array_equal(old["w"][0], array + 3)
    assert old["w"][1] == binascii.crc32((array + 3).tobytes())
    (plain,) = front.load("m-1_4.ckpt", crc_check=False)["w"]
    assert np.array_equal(plain, array + 4)
    (front.root / "m-1_3.ckpt").unlink()
    with pytest.raises(MismatchError, match=r"m-1_3\.ckpt is not the newest"):
        front.load("m-1_3.ckpt", crc_check=True)
    (front.root / "m-1_3.ckpt").write_bytes(b"of MindSpore's own")
    with pytest.raises(StorageError, match="not saved through holdfast"):
        front.load("m-1_3.ckpt", crc_check=True)


def test_of_two_saves_in_one_step_each_comes_back(front: Front) -> None:
    for name, value in (("a-1_3.ckpt", 1.0), ("b-1_3.ckpt", 2.0), ("b-1_3.ckpt", 2.0)):
        front.save(name, 3, {"w": [np.full(2, value)]})
    assert front.load("a-1_3.ckpt", crc_check=False)["w"][0].tolist() == [1.0, 1.0]
    assert front.load("b-1_3.ckpt", crc_check=False)["w"][0].tolist() == [2.0, 2.0]


def test_names_are_counted_as_mindspore_counts_files(tmp_path: Path) -> None:
    for at, name in enumerate(("m-1_1.ckpt", "m-1_2.ckpt", "m-graph.meta", "m_1-1_1.ckpt", "m-1_3_breakpoint.ckpt")):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (at, at))
    manager = CheckpointShmManager()
    manager.update_ckpoint_filelist(str(tmp_path), "m")
    assert manager.ckpoint_num == 2
    manager.remove_oldest_ckpoint_file()
    assert manager.ckpoint_filelist == [str(tmp_path / "m-1_2.ckpt")]
    assert not (tmp_path / "m-1_1.ckpt").exists()
    assert (tmp_path / "m_1-1_1.ckpt").exists()
