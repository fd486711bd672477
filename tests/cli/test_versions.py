"""`ls`, `inspect`, `verify` on real checkpoints, good, damaged, missing and foreign."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run, commit
from holdfast.base.errors import StorageError, VersionNotFound
from holdfast.base.events import Events
from holdfast.cli import console
from holdfast.cli.stored import export, versions
from holdfast.core.model import Version
from holdfast.tiers.backends.local import LocalBackend
from holdfast.tiers.storage.manifest import Manifest
from holdfast.tiers.storage.stored_bundles import StoredBundles
from holdfast.tiers.storage.version_store import Storage, open_storage
from sample_kit import sampled

NEWEST = "i000001-s0000000020"


def flip_one_byte(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def bundle_files(root: Path, version: str) -> list[Path]:
    return sorted((root / version).glob("*.safetensors"))


def test_ls_shows_every_version(holdfast: Run, checkpoint: Path) -> None:
    answer = holdfast("ls", checkpoint, "--json")
    assert answer.returncode == 0, answer.stderr
    shown = json.loads(answer.stdout)["versions"]
    assert [(v["version"], v["state"], v["world_size"]) for v in shown] == [
        ("i000001-s0000000010", "durable", 2),
        (NEWEST, "durable", 2),
    ]
    assert NEWEST in holdfast("ls", checkpoint).stdout


def test_ls_tells_what_was_never_committed(holdfast: Run, checkpoint: Path) -> None:
    (checkpoint / NEWEST / "manifest.json").unlink()
    answer = holdfast("ls", checkpoint, "--json")
    assert answer.returncode == 0
    assert json.loads(answer.stdout)["versions"][1]["state"] == "not committed"


def test_ls_shows_a_damaged_manifest_and_goes_on(holdfast: Run, checkpoint: Path) -> None:
    flip_one_byte(checkpoint / "i000001-s0000000010" / "manifest.json", 20)
    answer = holdfast("ls", checkpoint, "--json")
    assert answer.returncode == 1
    damaged, good = json.loads(answer.stdout)["versions"]
    assert damaged["state"] == "damaged"
    assert damaged["error"]["code"].startswith("HF30")
    assert good["state"] == "durable"


@pytest.mark.parametrize("name", sampled(["manifest.json", "*.safetensors"], "*.safetensors"))
def test_what_cannot_be_read_is_not_called_damaged(holdfast: Run, checkpoint: Path, name: str) -> None:
    """Who reads that word removes the version; it may be good."""
    file = next((checkpoint / NEWEST).glob(name))
    file.rename(file.with_name("aside"))
    file.symlink_to("nowhere")
    answer = holdfast("verify", checkpoint)
    assert answer.returncode == 1
    assert f"{NEWEST}: not readable now" in answer.stdout
    assert "DAMAGED" not in answer.stdout
    listed = holdfast("ls", checkpoint, "--json")
    state = json.loads(listed.stdout)["versions"][1]["state"]
    assert state == ("not readable now" if name == "manifest.json" else "durable")
    assert json.loads(holdfast("verify", checkpoint, "--json").stdout)["versions"][1]["state"] == "not readable now"


def test_a_version_of_another_job_is_named_and_hides_no_other(holdfast: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Somebody copied it here by hand: it is left where it is, and not believed."""
    other = "i000001-s0000000030"
    storage = open_storage(tmp_path / "other", Events())
    job = storage.claim()
    storage.incarnations.register()
    commit(storage, job, Version(1, 30))
    shutil.copytree(tmp_path / "other" / other, checkpoint / other)

    answer = holdfast("ls", checkpoint, "--json")
    assert answer.returncode == 1
    shown = json.loads(answer.stdout)["versions"]
    assert [v["state"] for v in shown] == ["durable", "durable", "another job's"]
    assert (shown[2]["version"], shown[2]["error"]["code"]) == (other, "HF600")
    answer = holdfast("verify", checkpoint, "--json")
    assert answer.returncode == 1
    assert [v["state"] for v in json.loads(answer.stdout)["versions"]] == ["good", "good", "another job's"]
    assert (checkpoint / other / "manifest.json").exists()


def test_inspect_names_entries_and_values(holdfast: Run, checkpoint: Path) -> None:
    answer = holdfast("inspect", checkpoint, "--json")
    assert answer.returncode == 0, answer.stderr
    document = json.loads(answer.stdout)
    assert document["version"] == NEWEST
    (entry,) = document["entries"]
    assert (entry["name"], entry["dtype"], entry["shape"], entry["bytes"]) == ("model.weight", "F32", [4, 3], 48)
    assert list(document["values"].values()) == [{"trainer.step": 20}]
    assert "trainer.step = 20" in holdfast("inspect", checkpoint, NEWEST).stdout


def test_verify_proves_good_bytes(holdfast: Run, checkpoint: Path) -> None:
    answer = holdfast("verify", checkpoint, "--json")
    assert answer.returncode == 0, answer.stdout
    assert json.loads(answer.stdout)["healthy"] is True


def test_verify_names_the_damaged_file_and_its_bytes(holdfast: Run, checkpoint: Path) -> None:
    damaged = bundle_files(checkpoint, NEWEST)[0]
    flip_one_byte(damaged, damaged.stat().st_size - 1100)
    answer = holdfast("verify", checkpoint)
    assert answer.returncode == 1
    assert damaged.name in answer.stdout
    assert "i000001-s0000000010: good" in answer.stdout
    (problem,) = json.loads(holdfast("verify", checkpoint, NEWEST, "--json").stdout)["versions"][0]["problems"]
    assert damaged.name in problem["where"]
    assert "byte" in problem["what"]


def test_verify_of_one_good_version_ignores_another_damaged_one(holdfast: Run, checkpoint: Path) -> None:
    flip_one_byte(bundle_files(checkpoint, NEWEST)[0], 5000)
    assert holdfast("verify", checkpoint, "i000001-s0000000010").returncode == 0


def retire_when(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, root: Path, *, part: str = "") -> None:
    """Retention removes the oldest version in the middle of a look: before the first call of `method` that names it."""
    real, done = getattr(owner, method), []
    oldest = Version(1, 10)

    def call(self: object, *args: object, **more: object) -> object:
        if not done and str(oldest) in str(args[0]) and part in str(args[0]):
            done.append(True)
            open_storage(root, Events()).retire(oldest)
        return real(self, *args, **more)

    monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize("before", [(Storage, "manifest"), (StoredBundles, "verify"), (StoredBundles, "image")])
def test_a_version_that_is_retired_meanwhile_is_not_damaged(
    checkpoint: Path, before: tuple[type, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    retire_when(monkeypatch, *before, checkpoint)
    assert versions.verify_versions(str(checkpoint), None, as_json=False) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "i000001-s0000000010: retired while it was verified"
    assert second.startswith(f"{NEWEST}: good")
    assert [version.step for version in open_storage(checkpoint, Events()).versions()] == [20]


def test_a_missing_file_of_a_version_that_stands_is_damage(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle_files(checkpoint, NEWEST)[0].unlink()
    assert versions.verify_versions(str(checkpoint), None, as_json=True) == 1
    good, bad = json.loads(capsys.readouterr().out)["versions"]
    assert (good["state"], bad["state"]) == ("good", "damaged")
    assert "missing" in bad["problems"][0]["what"]


def test_a_root_that_vanishes_is_no_retirement(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unmounted in the middle: nothing can be said of the files, least of all that all is well."""
    real = StoredBundles.verify

    def unmounted(self: StoredBundles, *args: Any) -> None:
        if checkpoint.exists():
            checkpoint.rename(checkpoint.with_name("away"))
        real(self, *args)

    monkeypatch.setattr(StoredBundles, "verify", unmounted)
    assert versions.verify_versions(str(checkpoint), None, as_json=True) == 1
    for shown in json.loads(capsys.readouterr().out)["versions"]:
        assert {problem["code"] for problem in shown["problems"]} == {"HF200"}


def test_digests_leave_out_what_is_retired_meanwhile(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = versions.checksums.write

    def write(*args: object) -> None:  # all versions were proved by now
        retire_when(monkeypatch, LocalBackend, "read_into", checkpoint, part="manifest-0")
        real(*args)

    monkeypatch.setattr(versions.checksums, "write", write)
    assert versions.verify_versions(str(checkpoint), None, as_json=True, sha256=tmp_path / "list") == 0
    assert {line.split("  ")[1].partition("/")[0] for line in (tmp_path / "list").read_text().splitlines()} == {NEWEST}


def test_a_version_that_never_was_there_is_said_so(checkpoint: Path) -> None:
    with pytest.raises(VersionNotFound, match="i000001-s0000000099 is not there"):
        versions.verify_versions(str(checkpoint), "i000001-s0000000099", as_json=True)


@pytest.mark.parametrize("command", sampled(["verify", "inspect", "groups"], "verify"))
def test_a_root_without_a_durable_version_is_not_called_good(holdfast: Run, checkpoint: Path, command: str) -> None:
    """Who verifies before an upload, or before older places go, must not take nothing for good."""
    for manifest in checkpoint.glob("i*/manifest.json"):
        manifest.unlink()
    answer = holdfast(command, checkpoint, "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["error"]["what"] == "no version is durable yet"


@pytest.mark.parametrize("command", sampled(["verify", "inspect", "groups", "rm"], "verify", "rm"))
def test_a_version_that_ls_shows_is_called_uncommitted_and_not_absent(
    holdfast: Run, checkpoint: Path, command: str
) -> None:
    (checkpoint / NEWEST / "manifest.json").unlink()
    answer = holdfast(command, checkpoint, NEWEST)
    assert answer.returncode == 1
    assert f"{NEWEST} is not committed" in answer.stderr


@pytest.mark.parametrize("kind", ["link", "file"])
def test_no_older_version_is_exported_for_one_that_was_moved_away(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """Somebody needed space, and left a link: a restart waits for such a version, and takes nothing older."""
    (checkpoint / NEWEST).rename(checkpoint.parent / "moved")
    if kind == "link":
        (checkpoint / NEWEST).symlink_to("../moved")
    else:
        (checkpoint / NEWEST).write_text("moved to the other disk")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        export.export(str(checkpoint), str(tmp_path / "out"), form="safetensors", version=None, only="", as_json=True)
    assert NEWEST in caught.value.where
    assert not (tmp_path / "out").exists()


def test_an_export_of_what_is_retired_meanwhile_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire_when(monkeypatch, StoredBundles, "read_chunks_into", checkpoint)
    with pytest.raises(VersionNotFound, match="not there") as caught:
        export.export(
            str(checkpoint), str(tmp_path / "out"), form="safetensors", version="i000001-s0000000010", only="", as_json=True
        )  # fmt: skip
    assert "retired while it was read" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_digests_are_listed_as_other_tools_check_them(holdfast: Run, checkpoint: Path, tmp_path: Path) -> None:
    """By coreutils, in a copy: all files of the good versions and no other; a changed byte is found."""
    damaged = bundle_files(checkpoint, NEWEST)[0]
    flip_one_byte(damaged, 5000)
    lists = tmp_path / "all.sha256"
    assert holdfast("verify", checkpoint, "--sha256", lists).returncode == 1
    good = "i000001-s0000000010"
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint / good, copy / good)
    names = {line.split("  ")[1] for line in lists.read_text().splitlines()}
    assert names == {f"{good}/{file.name}" for file in (copy / good).iterdir()}

    def check() -> int:
        return subprocess.run(["sha256sum", "--check", "--quiet", lists], cwd=copy, capture_output=True).returncode

    assert check() == 0
    flip_one_byte(bundle_files(copy, good)[0], 5000)
    assert check() == 1
    answer = holdfast("verify", checkpoint, good, "--sha256", tmp_path / "nowhere" / "list")
    assert answer.returncode == 2
    assert "cannot be written" in answer.stderr
    assert "remedy" in answer.stderr


def test_a_list_of_digests_takes_the_place_of_plain_files_only(holdfast: Run, checkpoint: Path, tmp_path: Path) -> None:
    """As root a rename over `/dev/stdout` or `/dev/null` takes them away from the whole machine."""
    plain, pipe, link = tmp_path / "plain", tmp_path / "pipe", tmp_path / "link"
    assert holdfast("verify", checkpoint, "--sha256", plain).returncode == 0
    digests = plain.read_bytes()
    link.symlink_to(plain)
    plain.write_bytes(b"")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert holdfast("verify", checkpoint, "--sha256", pipe).returncode == 0
        assert os.read(reader, 1 << 16) == digests
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert holdfast("verify", checkpoint, "--sha256", link).returncode == 0
    assert link.is_symlink()
    assert plain.read_bytes() == digests
    for directory in ("", ".", tmp_path):
        answer = holdfast("verify", checkpoint, "--sha256", directory, "--json")
        assert answer.returncode == 2
        assert "cannot be written" in json.loads(answer.stdout)["error"]["what"]


def test_a_list_of_digests_for_standard_output_stands_before_what_is_told(
    holdfast: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """Into a file or a pipe: its lines are whole, and nothing is written over them. The link is what `/dev/stdout` is."""
    expected, stdout = tmp_path / "expected", tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")
    assert holdfast("verify", checkpoint, "--sha256", expected).returncode == 0
    out = tmp_path / "out"
    command = [sys.executable, "-m", "holdfast.cli.cli", "verify", str(checkpoint), "--sha256", str(stdout)]
    with out.open("wb") as file:
        assert subprocess.run(command, stdout=file, timeout=60).returncode == 0
    piped = subprocess.run(command, stdout=subprocess.PIPE, timeout=60)
    assert stdout.is_symlink()
    assert out.read_bytes() == piped.stdout
    assert piped.stdout.startswith(expected.read_bytes())
    assert piped.stdout.decode().count(": good") == 2


def test_a_loop_of_links_is_a_path_that_refuses(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for command in ("ls", "verify", "inspect", "groups"):
        answer = holdfast(command, tmp_path / "a", "--json")
        assert answer.returncode == 1
        assert json.loads(answer.stdout)["error"]["code"] == "HF200", answer.stdout


def newest_cannot_be_read_now(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` and `ls` say so, and show the other one."""
    for look in (versions.verify_versions, lambda root, _, as_json: versions.list_versions(root, as_json=as_json)):
        assert look(str(checkpoint), None, as_json=True) == console.PROBLEM
        good, newest = json.loads(capsys.readouterr().out)["versions"]
        assert good["state"] in {"good", "durable"}
        assert newest["state"] == "not readable now"


def test_a_version_that_refuses_hides_no_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory of somebody else, or one on bad sectors."""

    def refusing(done: Any) -> Any:
        def refused(backend: LocalBackend, name: str, **more: int) -> Any:
            if name.partition("/")[0] == NEWEST:
                raise StorageError("the path refuses: Permission denied", where=f"{checkpoint}/{NEWEST}")
            return done(backend, name, **more)

        return refused

    for verb in ("listing", "read"):
        monkeypatch.setattr(LocalBackend, verb, refusing(getattr(LocalBackend, verb)))
    newest_cannot_be_read_now(checkpoint, capsys)
    assert versions.verify_versions(str(checkpoint), "i000001-s0000000010", as_json=True) == console.GOOD


def test_a_manifest_that_is_listed_and_not_found_is_not_called_retired(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that lags denies what it lists. `verify && echo all good` must not pass over it."""
    read = Storage.manifest

    def manifest(storage: Storage, version: Version) -> Manifest:
        if str(version) == NEWEST:
            raise VersionNotFound(f"there is no {NEWEST}/manifest.json", where=f"{NEWEST}/manifest.json")
        return read(storage, version)

    monkeypatch.setattr(Storage, "manifest", manifest)
    newest_cannot_be_read_now(checkpoint, capsys)
    (checkpoint / NEWEST / "manifest.json").unlink()
    assert versions.examine(open_storage(checkpoint, Events()), Version(1, 20)).retired


@pytest.mark.parametrize("command", sampled(["ls", "inspect", "verify"], "verify"))
def test_a_path_without_checkpoints_is_a_problem_with_a_remedy(holdfast: Run, tmp_path: Path, command: str) -> None:
    answer = holdfast(command, tmp_path / "nothing")
    assert answer.returncode == 1
    assert "HF302" in answer.stderr
    assert "remedy" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "nothing").exists()


def test_a_foreign_directory_is_named_and_left_alone(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    answer = holdfast("ls", tmp_path, "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["error"]["code"] == "HF202"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_root_that_lost_its_record_is_told_what_to_put_back(holdfast: Run, checkpoint: Path) -> None:
    record = (checkpoint / "holdfast.json").read_bytes()
    (checkpoint / "holdfast.json").unlink()
    answer = holdfast("ls", checkpoint)
    assert answer.returncode == 1
    assert "holdfast.json is missing beside versions: put it back" in answer.stderr
    (checkpoint / "holdfast.json").write_bytes(record[:-5])
    answer = holdfast("ls", checkpoint)
    assert answer.returncode == 1
    assert "put holdfast.json back from a copy of this directory" in answer.stderr
    (checkpoint / "holdfast.json").write_bytes(record)
    assert holdfast("ls", checkpoint).returncode == 0


def test_a_checkpoint_and_a_job_are_not_asked_of_at_once(holdfast: Run, checkpoint: Path) -> None:
    answer = holdfast("groups", checkpoint, "--job", checkpoint)
    assert answer.returncode == 2
    assert "give ROOT alone" in answer.stderr


def test_a_distance_that_no_clock_knows_is_wrong_usage(holdfast: Run, tmp_path: Path) -> None:
    for seconds in ("1e400", "1e12", "nan"):
        answer = holdfast("status", "--watch", seconds, "--runtime-dir", tmp_path / "run")
        assert (answer.returncode, answer.stdout) == (2, "")


def test_wrong_usage_ends_with_two(holdfast: Run, checkpoint: Path) -> None:
    assert holdfast("inspect", checkpoint, "../../etc").returncode == 2
    assert holdfast("ls").returncode == 2
    assert holdfast("frobnicate").returncode == 2


def test_what_takes_long_says_how_far_it_is(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions.verify_versions(str(checkpoint), None, as_json=True)
    assert capsys.readouterr().err == "", "it took no two seconds"
    monkeypatch.setattr(console, "QUIET_S", 0.0)
    versions.verify_versions(str(checkpoint), NEWEST, as_json=True)
    out, err = capsys.readouterr()
    assert err.startswith(f"verifying {NEWEST}: ")
    assert "left" in err
    assert json.loads(out)["healthy"] is True, "standard output has the result and nothing else"
    export.export(str(checkpoint), str(tmp_path / "out.st"), form="safetensors", version=None, only="", as_json=True)
    assert capsys.readouterr().err.startswith(f"exporting {NEWEST}: ")
