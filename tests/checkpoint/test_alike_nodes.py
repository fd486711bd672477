"""All nodes of a job encrypt with one key and keep the same versions, or the job does not begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError, HoldfastError, UsageError
from holdfast.base.events import Events
from holdfast.checkpoint.job import collectives
from holdfast.checkpoint.job.bootstrap import assemble
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.version_store import open_storage
from ranks_kit import on_all

LINK: Any = None  # who is refused has asked no keeper for anything


def refused(root: Path, runtime_dir: Path, *settings: dict[str, Any]) -> list[HoldfastError]:
    """What each rank is told, a node each; nothing was written."""
    common = {"runtime_dir": str(runtime_dir)}
    configs = [Config(node_label=f"n{number}", **common, **each) for number, each in enumerate(settings)]

    def begin(group: Ranks) -> None:
        config = configs[group.rank]
        storage = open_storage(root, Events(), encryption=KeySource.of(config))
        assemble(group, str(root), config, storage=storage, link=LINK)

    errors = on_all(len(configs), begin)
    assert not root.exists()
    return errors


@pytest.mark.parametrize(("second", "told"), [("2" * 64, "has key"), ("", "has none")])
def test_nodes_with_different_keys_are_refused_before_anything_is_written(
    second: str, told: str, tmp_path: Path, runtime_dir: Path
) -> None:
    """What they wrote would open with no key, and the files of a node without one would be plain."""
    settings: list[dict[str, Any]] = []
    for number, secret in enumerate(("1" * 64, second)):
        key = tmp_path / f"{number}.key"
        key.write_text(secret)
        key.chmod(0o600)
        settings.append({"encryption_key": str(key) if secret else ""})
    for error in refused(tmp_path / "job", runtime_dir, *settings):
        assert isinstance(error, ConfigError)
        assert "the ranks have different encryption keys" in error.what
        assert f"node n1 {told}" in error.what
        assert "node n0 has key" in error.what


@pytest.mark.parametrize("other", [{"keep_last": 5}, {"keep_every": "1000"}])
def test_nodes_that_keep_different_versions_are_refused(
    other: dict[str, Any], tmp_path: Path, runtime_dir: Path
) -> None:
    """The node that coordinates would remove what the settings of another one keep."""
    for error in refused(tmp_path / "job", runtime_dir, {}, other):
        assert isinstance(error, UsageError)
        assert "the ranks name different retention" in error.what
        assert f"{next(iter(other))} {next(iter(other.values()))!r}" in error.what


@pytest.mark.parametrize(("one", "other"), [("60s", "1m"), ("10, 1.1h", "10,66m"), ("0", "00"), ("1000", "01000")])
def test_nodes_that_spell_one_retention_in_two_ways_keep_the_same(
    one: str, other: str, tmp_path: Path, runtime_dir: Path
) -> None:
    """Here they are refused for what is asked next, their keys."""
    key = tmp_path / "job.key"
    key.write_text("1" * 64)
    key.chmod(0o600)
    settings = ({"keep_every": one}, {"keep_every": other, "encryption_key": str(key)})
    for error in refused(tmp_path / "job", runtime_dir, *settings):
        assert "different encryption keys" in error.what


def test_nodes_with_different_releases_are_told_so(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = collectives.gather_json

    def of_one_column_less(group: Ranks, row: Any) -> Any:
        older = group.rank == 1 and isinstance(row, list) and "n1" in row
        return gather(group, row[:-1] if older else row)

    monkeypatch.setattr(collectives, "gather_json", of_one_column_less)
    for error in refused(tmp_path / "job", runtime_dir, {}, {}):
        assert isinstance(error, UsageError)
        assert "different releases of holdfast" in error.what
