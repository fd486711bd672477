"""The runtime directory is ours alone, or nobody writes there: each writer is tried against what another user may have put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.base import private
from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, HoldfastError
from holdfast.cli import report, status
from holdfast.elastic.launch.compile_cache import CompileCache
from holdfast.elastic.watchdog import run_journal
from holdfast.elastic.watchdog.watchdog import Watchdog
from holdfast.keeper.observe import degraded_notice
from holdfast.keeper.rpc.paths import place_of

NOBODY = 65534


def of_another_user(path: Path) -> None:
    path.mkdir(mode=0o755)
    os.chown(path, NOBODY, NOBODY)


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


UNFIT = [pytest.param(of_another_user, marks=pytest.mark.root), open_to_all, a_link]


@pytest.fixture(params=UNFIT, ids=lambda make: make.__name__)
def unfit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A runtime directory that somebody else made first."""
    path = tmp_path / "runtime"
    request.param(path)
    return path


def files_in(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if not found.is_dir()]


def test_the_journal_writes_nothing_there(unfit: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_journal.Journal(unfit / "run-default-n").restored(3)
    assert files_in(unfit) == []
    assert "the journal of this run ends here" in caplog.text


def test_stacks_are_not_written_there(unfit: Path, caplog: pytest.LogCaptureFixture) -> None:
    Watchdog(unfit / "run-default-n")._keep(0, 123, "Thread 0x1 (most recent call first)")
    assert files_in(unfit) == []
    assert "could not be written" in caplog.text


def test_nothing_compiled_is_fetched_kept_or_believed(
    unfit: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ: dict[str, str] = {}
    cache = CompileCache(str(tmp_path / "store"), unfit / "run-default-n" / "compiled", environ, below=unfit)
    planted = cache.directory / "inductor" / "fxgraph" / "evil"
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"code")
    assert cache.fetch() == 0
    assert environ == {}, "torch keeps its caches where it always does"
    cache.start()
    cache.close()
    assert not (tmp_path / "store").exists(), "what others put there is not spread either"
    assert "nothing that is compiled" in caplog.text


def test_no_keeper_lives_there_and_no_note(unfit: Path, tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "job"), Config(runtime_dir=str(unfit)))
    for act in (place.make, lambda: degraded_notice.post(place, root="r", reason="why")):
        with pytest.raises(ConfigError, match="not ours alone"):
            act()
    assert files_in(unfit) == []
    place.notice.parent.mkdir(parents=True)
    place.notice.touch()
    degraded_notice.withdraw(place)
    assert place.notice.exists(), "it may be what a link leads to"


@pytest.mark.parametrize(
    "look", [lambda _: report.observed(None), lambda path: status.runtime_path(str(path))], ids=["report", "status"]
)
def test_who_looks_believes_nothing_there(
    unfit: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(unfit))
    with pytest.raises(HoldfastError, match="not ours alone"):
        look(unfit)


def test_nobody_is_told_to_change_the_mode_of_a_file_or_of_what_a_link_leads_to(tmp_path: Path) -> None:
    """`HOLDFAST_RUNTIME_DIR=/etc/passwd`: a chmod 700 of that ends more than a job."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    for path in (file, link):
        with pytest.raises(ConfigError, match="not ours alone") as told:
            private.prove(path)
        assert "chmod" not in told.value.remedy


@pytest.mark.parametrize("planted", ["link", "hard link", "fifo"])
def test_a_file_that_leads_elsewhere_is_left_alone(tmp_path: Path, planted: str) -> None:
    """As it may stand in a directory that was open to others before."""
    directory, victim = tmp_path / "run", tmp_path / "victim"
    directory.mkdir(mode=0o700)
    victim.write_text("precious")
    target = directory / run_journal.NAME
    if planted == "link":
        target.symlink_to(victim)
    elif planted == "hard link":
        target.hardlink_to(victim)
    else:
        os.mkfifo(target)
    with pytest.raises((HoldfastError, OSError)):
        os.close(private.open_in(directory, run_journal.NAME, os.O_WRONLY | os.O_APPEND))
    assert victim.read_text() == "precious"


@pytest.mark.root
def test_the_runtime_directory_of_another_user_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -E` hands on XDG_RUNTIME_DIR."""
    theirs = tmp_path / "theirs"
    of_another_user(theirs)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    assert not Config().runtime_path.is_relative_to(theirs)
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(ours))
    assert Config().runtime_path == ours / "holdfast"


@pytest.mark.parametrize("name", ["node_label", "rack_label", "backup_node"])
@pytest.mark.parametrize("label", [".", ".."])
def test_a_label_that_names_another_directory_is_refused(name: str, label: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config(**{name: label})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("us", "owner", "group", "mode", "may"),
    [
        (1000, 1000, 1000, 0o600, True),
        (1000, 2000, 1000, 0o600, False),
        (0, 2000, 0, 0o600, False),  # root can read it; whoever owns it chose what is in it
        (1000, 0, 1000, 0o440, True),  # as Kubernetes mounts a secret under `fsGroup`
        (1000, 0, 1000, 0o460, False),
        (1000, 0, 3000, 0o440, False),
        (1000, 1000, 1000, 0o440, False),
        (0, 0, 0, 0o440, False),
    ],
)
def test_a_secret_is_in_a_file_of_ours_or_of_roots(
    us: int, owner: int, group: int, mode: int, *, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: us)
    monkeypatch.setattr(os, "getegid", lambda: us)
    monkeypatch.setattr(os, "getgroups", lambda: [us])
    found = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, group, 0, 0, 0, 0))
    assert private.is_secret(found) is may


def test_directories_on_the_way_are_private_too(tmp_path: Path) -> None:
    private.make(tmp_path / "a" / "b" / "c", below=tmp_path / "a")
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c")] == [
        "0o700"
    ] * 3
    (tmp_path / "a/b").chmod(0o755)
    with pytest.raises(ConfigError, match="not ours alone"):
        private.make(tmp_path / "a" / "b" / "c", below=tmp_path / "a")
