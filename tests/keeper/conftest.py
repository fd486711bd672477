from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keeper.rig import Rig
from kit.secrets import secret_file  # noqa: F401 - a fixture


@pytest.fixture
def base() -> Iterator[Path]:
    """A short directory: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="hf-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_rig(base: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(base, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
