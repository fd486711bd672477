from __future__ import annotations

from kit.layout_jobs import jobs  # noqa: F401 - a fixture
