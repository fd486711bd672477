from __future__ import annotations

from kit.checkpointers import make  # noqa: F401 - a fixture
from kit.late_copies import held  # noqa: F401 - a fixture
