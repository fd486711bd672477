"""`holdfast doctor` sees what is there, says what is wrong, and leaves nothing behind."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from holdfast.cli import doctor, tested_versions


def states(answer: str) -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(answer)["checks"]}


def test_a_sound_machine_and_path(holdfast: Run, tmp_path: Path, runtime_dir: Path) -> None:
    root = tmp_path / "new" / "run1"
    answer = holdfast("doctor", root, "--json")
    found = states(answer.stdout)
    assert answer.returncode == 0, answer.stdout
    assert found["create once"] == found["write and fsync"] == found["snapshot memory"] == "good"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["foo://bar", "http://127.0.0.1:1/run1", ""])
def test_what_no_job_could_open_is_a_problem(url: str) -> None:
    """Every other command refuses it; a directory of that name below the working directory is not what was asked about."""
    (found,) = doctor.directory_checks(url)
    assert (found.name, found.state) == ("path", "problem")
    assert "is not a place for checkpoints" in found.detail
    assert "file://" in found.remedy


def test_a_url_of_a_directory_is_that_directory(checkpoint: Path) -> None:
    found = next(iter(doctor.directory_checks(f"file://{checkpoint}")))
    assert (found.state, found.detail) == ("good", f"{checkpoint} is a checkpoint directory")


def test_links_that_lead_nowhere_and_a_damaged_record_are_problems(checkpoint: Path, tmp_path: Path) -> None:
    nowhere, loop, file = tmp_path / "nowhere", tmp_path / "loop", checkpoint / doctor.MARKER
    nowhere.symlink_to("not there")
    loop.symlink_to("loop")
    for link in (nowhere, loop):
        assert (
            "leads nowhere"
            in next(found for found in doctor.directory_checks(str(link)) if found.state == "problem").detail
        )
    file.write_text("{")
    found = doctor.ownership(checkpoint)
    assert (found.state, "cannot be opened" in found.detail) == ("problem", True)


def test_a_place_where_nothing_can_be_made_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in /proc for root, or where no inode is left."""

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    found = list(doctor.storage_checks(tmp_path))[-1]
    assert (found.name, found.state) == ("rights", "problem")
    assert "No space left" in found.detail
    assert "free space" in found.remedy


def test_a_checkpoint_directory_stays_as_it_was(holdfast: Run, checkpoint: Path, runtime_dir: Path) -> None:
    before = sorted(checkpoint.rglob("*"))
    assert holdfast("doctor", checkpoint).returncode == 0
    assert sorted(checkpoint.rglob("*")) == before


def test_foreign_files_are_a_problem(holdfast: Run, tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    answer = holdfast("doctor", tmp_path, "--json")
    assert answer.returncode == 1
    assert states(answer.stdout)["path"] == "problem"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_fresh_file_system_is_as_good_as_empty(tmp_path: Path) -> None:
    """As the job sees it, which would take it (tiers.backends.open_url)."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".tmp").mkdir()
    assert (doctor.ownership(tmp_path).state, doctor.ownership(tmp_path).detail) == (
        doctor.GOOD,
        f"{tmp_path} is empty",
    )
    (tmp_path / "home").mkdir()
    assert "home/" in doctor.ownership(tmp_path).detail


def test_a_path_that_may_not_be_looked_at_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def refused(self: Path) -> bool:
        if self.parent == tmp_path / "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return exists(self)

    monkeypatch.setattr(Path, "exists", refused)  # as for anybody but root
    (found,) = doctor.storage_checks(tmp_path / "locked" / "job")
    assert (found.state, found.remedy) == (doctor.PROBLEM, "give this user the right to look there")
    assert "Permission denied" in found.detail


def test_a_runtime_directory_open_to_others_is_a_problem(
    holdfast: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime_dir.chmod(0o755)
    answer = holdfast("doctor", "--json")
    assert answer.returncode == 1
    assert states(answer.stdout)["runtime directory"] == "problem"


def test_a_socket_path_that_is_too_long_is_a_problem(holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", "/tmp/" + "x" * 100)
    answer = holdfast("doctor", "--json")
    assert answer.returncode == 1
    assert states(answer.stdout)["runtime directory"] == "problem"


def test_a_file_system_that_lets_two_commits_through_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless:
        def __init__(self, root: Path) -> None:
            self.root = root

        def create(self, name: str, data: bytes, *, stamp: str) -> bool:
            (self.root / name).write_bytes(data)
            return True

    monkeypatch.setattr(doctor, "LocalBackend", Careless)
    assert doctor.create_once(tmp_path).state == doctor.PROBLEM


@pytest.mark.parametrize("policy", ["always", "within_size", "advise", "force"])
def test_huge_pages_for_shared_memory_are_good(policy: str) -> None:
    assert doctor.huge_pages(policy).state == doctor.GOOD


@pytest.mark.parametrize("policy", ["never", "deny"])
def test_a_kernel_without_huge_pages_for_slots_is_told_with_the_setting_and_its_gain(policy: str) -> None:
    check = doctor.huge_pages(policy)
    assert check.state == doctor.NOTE
    assert policy in check.detail
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in check.remedy
    assert "2 MiB" in check.remedy


def test_a_kernel_without_the_setting_is_told_nothing_to_do() -> None:
    assert doctor.huge_pages("").remedy == ""


def test_the_budget_says_what_it_allows(holdfast: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_BUDGET", "1GiB")
    rows = {check["name"]: check["detail"] for check in json.loads(holdfast("doctor", "--json").stdout)["checks"]}
    assert "room for 512.0 MiB of state" in rows["memory budget"]
    assert "or 256.0 MiB beside replicas" in rows["memory budget"]


def test_too_large_a_budget_is_a_problem(holdfast: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_BUDGET", "900TiB")
    answer = holdfast("doctor", "--json")
    assert answer.returncode == 1
    assert states(answer.stdout)["memory budget"] == "problem"


def test_the_network_is_tried_and_a_missing_secret_is_a_problem(
    holdfast: Run, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, secret = tmp_path / "settings.toml", tmp_path / "secret"
    monkeypatch.setenv("HOLDFAST_CONFIG", str(settings))
    settings.write_text('listen = "127.0.0.1"\n')
    assert states(holdfast("doctor", "--json").stdout)["network"] == "problem"
    secret.touch(0o600)
    secret.write_text("0f" * 32)
    settings.write_text(f'listen = "127.0.0.1"\nsecret_file = "{secret}"\n')
    answer = holdfast("doctor", "--json").stdout
    assert states(answer)["network"] == "note"  # only this machine can reach it
    assert "mutual TLS" in answer
    secret.chmod(0o644)
    assert states(holdfast("doctor", "--json").stdout)["network"] == "problem"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.10.0", ""),
        ("2.12.1+cu130", ""),
        ("2.14.9", ""),
        ("2.9.1", "older than what was tested, 2.10 to 2.14"),
        ("2.15.0a0+git1", "newer than what was tested, 2.10 to 2.14"),
        ("3.0", "newer than what was tested, 2.10 to 2.14"),
    ],
)
def test_the_first_two_numbers_of_a_release_are_compared(version: str, said: str) -> None:
    assert tested_versions.outside(version, "2.10.0", "2.14.1") == said
    assert tested_versions.outside("0.17.1", "0.16.0", "0.16.1") == "newer than what was tested, 0.16"


def test_a_release_that_was_not_tested_is_noted_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranges = {
        "python": ["3.0", "9.0"],
        "torch": ["2.10.0", "2.14.1"],
        "transformers": ["5.0", "5.24"],
        "ray": ["1.0", "1.0"],
    }
    (tmp_path / "tested.json").write_text(json.dumps(ranges))
    monkeypatch.setattr(tested_versions, "_FILE", tmp_path / "tested.json")
    asked = importlib.metadata.version
    versions = {"torch": "9.1.0", "transformers": "1.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or asked(name))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = {check.name: check for check in doctor.untested_versions()}
    assert {"torch release", "transformers release"} == found.keys() - {"ray release"}
    assert {check.state for check in found.values()} == {doctor.NOTE}
    assert found["torch release"].detail.startswith("9.1.0: newer than what was tested, ")
    assert found["transformers release"].detail.startswith("1.2: older than what was tested, ")


def test_of_tested_releases_nothing_is_said() -> None:
    newest = {name: newest for name, (_, newest) in json.loads(tested_versions._FILE.read_text()).items()}
    here = {each.name: each for each in tested_versions.installed()}
    assert {"python", "torch"} <= here.keys() & newest.keys()
    for name, each in here.items():
        if each.version == newest[name]:
            assert not each.untested
