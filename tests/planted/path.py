"""Lets programs that a drill starts import what stands in `tests/`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

TESTS = str(Path(__file__).resolve().parents[1])


@contextlib.contextmanager
def tests_in_path() -> Iterator[None]:
    path = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH", "")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        yield
