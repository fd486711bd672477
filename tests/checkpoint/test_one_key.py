"""All nodes of a job encrypt with one key, or the job does not begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.base.config import Config
from holdfast.base.errors import ConfigError
from holdfast.base.events import Events
from holdfast.checkpoint.job.bootstrap import assemble
from holdfast.checkpoint.job.collectives import Ranks
from holdfast.tiers.storage.encryption import KeySource
from holdfast.tiers.storage.version_store import open_storage
from ranks_kit import on_all

LINK: Any = None  # who is refused has asked no keeper for anything


@pytest.mark.parametrize(("second", "told"), [("2" * 64, "has key"), ("", "has none")])
def test_nodes_with_different_keys_are_refused_before_anything_is_written(
    second: str, told: str, tmp_path: Path, runtime_dir: Path
) -> None:
    """What they wrote would open with no key, and the files of a node without one would be plain."""
    root, settings = tmp_path / "job", []
    for number, secret in enumerate(("1" * 64, second)):
        key = tmp_path / f"{number}.key"
        key.write_text(secret)
        key.chmod(0o600)
        one = Config(node_label=f"n{number}", runtime_dir=str(runtime_dir), encryption_key=str(key) if secret else "")
        settings.append(one)

    def begin(group: Ranks) -> None:
        config = settings[group.rank]
        storage = open_storage(root, Events(), encryption=KeySource.of(config))
        assemble(group, str(root), config, storage=storage, link=LINK)

    for error in on_all(2, begin):
        assert isinstance(error, ConfigError)
        assert "the ranks have different encryption keys" in error.what
        assert f"node n1 {told}" in error.what
        assert "node n0 has key" in error.what
    assert not root.exists()
