"""What tests of the launcher share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_kit import Job


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    started = Job(tmp_path)
    yield started
    started.end()
