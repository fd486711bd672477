"""`holdfast rm`: versions go as retention removes them, and nothing goes that a restart would go on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run
from holdfast.base.events import Events
from holdfast.cli.stored.remove import remove
from holdfast.core.model import Version
from holdfast.tiers.storage.incarnations import Incarnations, make_stamp
from holdfast.tiers.storage.version_store import Storage, open_storage
from sample_kit import sampled
from tiers.samples import new_store, save, tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two runs that fresh starts ended, the second with a roll-back in it, and the one that goes on."""
    store = new_store(tmp_path / "root")
    store.incarnations.record_resumed(1, None)
    for step in (1, 2):
        save(store, Version(1, step))
    for incarnation, resumed, steps in ((2, None, (1, 2, 3)), (3, Version(2, 2), (3,)), (4, None, (1, 2))):
        assert store.incarnations.register() == incarnation
        store.incarnations.record_resumed(incarnation, resumed)
        for step in steps:
            save(store, Version(incarnation, step))
    return tmp_path / "root"


def storage(root: Path) -> Storage:
    return open_storage(root, Events())


def test_what_is_named_goes(holdfast: Run, root: Path) -> None:
    answer = holdfast("rm", root, str(Version(1, 1)), str(Version(2, 3)), "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["removed"] == [str(Version(1, 1)), str(Version(2, 3))]
    left = storage(root).versions()
    assert left == [Version(1, 2), Version(2, 1), Version(2, 2), Version(3, 3), Version(4, 1), Version(4, 2)]
    assert not (root / str(Version(1, 1))).exists()


def test_abandoned_runs_go_but_for_what_is_pinned(holdfast: Run, root: Path) -> None:
    storage(root).marks.pin(Version(2, 2))
    answer = holdfast("rm", root, "--abandoned")
    assert answer.returncode == 0, answer.stderr
    assert f"{Version(1, 2)}: removed" in answer.stdout
    assert storage(root).versions() == [Version(2, 2), Version(4, 1), Version(4, 2)]
    assert "nothing to remove" in holdfast("rm", root, "--abandoned").stdout


def test_what_is_held_stays_and_what_only_the_dead_hold_goes(holdfast: Run, root: Path) -> None:
    store = storage(root)
    store.marks.hold(Version(1, 1), make_stamp(3))  # of an incarnation before
    store.marks.hold(Version(1, 2), make_stamp(4))  # of this process
    store.marks.hold(Version(2, 1), "i000004-t000000-h000000000000-p1")  # of another machine
    answer = holdfast("rm", root, str(Version(1, 2)))
    assert answer.returncode == 1
    assert f"{Version(1, 2)} is held by a process" in answer.stdout
    assert holdfast("rm", root, "--abandoned").returncode == 0
    assert storage(root).versions() == [Version(1, 2), Version(2, 1), Version(4, 1), Version(4, 2)]
    shown = {row["version"]: row["held"] for row in json.loads(holdfast("ls", root, "--json").stdout)["versions"]}
    assert shown == {str(v): v in (Version(1, 2), Version(2, 1)) for v in storage(root).versions()}
    assert "durable, held" in holdfast("ls", root).stdout


@pytest.mark.parametrize("during", ["look", "removal"])
def test_a_restart_that_begins_meanwhile_keeps_everything(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], during: str
) -> None:
    """It may go on from any version. In the removal: the first is gone by then, and the second stays."""
    owner, name = (Incarnations, "lineage") if during == "look" else (Storage, "manifest")
    real, calls = getattr(owner, name), []

    def slept(self: object, *args: object) -> object:
        found = real(self, *args)
        calls.append(args)
        if len(calls) == (1 if during == "look" else 2):
            open_storage(root, Events()).incarnations.register()
        return found

    before = storage(root).versions()
    monkeypatch.setattr(owner, name, slept)
    assert remove(str(root), [str(Version(1, 1)), str(Version(2, 3))], abandoned=False, as_json=False) == 1
    monkeypatch.undo()
    assert "a restart began meanwhile" in capsys.readouterr().out
    assert set(before) - set(storage(root).versions()) == (set() if during == "look" else {Version(1, 1)})


def test_what_a_restart_would_go_on_from_is_refused(holdfast: Run, root: Path) -> None:
    before = tree(root)
    answer = holdfast("rm", root, str(Version(4, 2)), str(Version(1, 1)))
    assert answer.returncode == 2
    assert f"a restart would go on from {Version(4, 2)}" in answer.stderr
    assert tree(root) == before, "nothing of what was named is removed"


@pytest.mark.parametrize(
    ("names", "code", "said"),
    sampled(
        [((), 2, "no version is named"), (("newest",), 2, "not a version"), ((str(Version(7, 7)),), 1, "is not there")],
        ((str(Version(7, 7)),), 1, "is not there"),
    ),
)
def test_wrong_names_remove_nothing(holdfast: Run, root: Path, names: tuple[str, ...], code: int, said: str) -> None:
    before = tree(root)
    answer = holdfast("rm", root, *names)
    assert answer.returncode == code
    assert said in answer.stderr
    assert tree(root) == before


def test_what_cannot_be_removed_is_told_and_keeps_no_other(holdfast: Run, root: Path) -> None:
    (root / str(Version(1, 1)) / "manifest-0.json").write_bytes(b"{}")
    answer = holdfast("rm", root, str(Version(1, 1)), str(Version(1, 2)))
    assert answer.returncode == 1
    assert f"{Version(1, 1)}: not removed" in answer.stdout
    assert f"{Version(1, 2)}: removed" in answer.stdout


@pytest.mark.parametrize("what", sampled(["manifest.json", "bundle"], "bundle"))
def test_where_the_newest_is_damaged_the_one_before_it_is_refused(holdfast: Run, root: Path, what: str) -> None:
    """To be committed is not enough: a restart goes on from the newest that is whole."""
    newest, whole = root / str(Version(4, 2)), Version(4, 1)
    path = newest / what if what != "bundle" else next(newest.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    answer = holdfast("rm", root, str(whole))
    assert answer.returncode == 2
    assert f"a restart would go on from {whole}" in answer.stderr
    assert whole in storage(root).versions()


def test_runs_of_which_nothing_is_known_are_not_taken_for_ended(holdfast: Run, tmp_path: Path) -> None:
    """As at a place to which no version of the incarnation between was copied, by an older holdfast."""
    store = new_store(tmp_path / "root")
    store.incarnations.record_resumed(1, None)
    save(store, Version(1, 1))
    for _ in range(2):
        store.incarnations.register()
    store.incarnations.record_resumed(3, Version(2, 2))
    save(store, Version(3, 3))
    answer = holdfast("rm", tmp_path / "root", "--abandoned")
    assert answer.returncode == 2
    assert "nothing is recorded of incarnation 2" in answer.stderr
    assert storage(tmp_path / "root").versions() == [Version(1, 1), Version(3, 3)]
