"""A secret file, as the keepers of a job share one."""

from __future__ import annotations

from pathlib import Path

import pytest

SECRET = bytes(range(32))


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.secret"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o600)
    return path
